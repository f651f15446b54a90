"""What cannot work of rollout.episode: with other keys, and in the file that it names.

Owns looking, not running: the file is parsed, never imported.
"""

from collections.abc import Iterator
from pathlib import Path

from ppo.config import Config, EpisodeConfig, Problem
from ppo.episodes.contract import EpisodeError, EpisodeProgram
from ppo.episodes.program import check_program


def episode_problems(config: Config) -> Iterator[Problem]:
    """Keys that contradict episodes."""
    rollout, episode = config.rollout, config.rollout.episode
    if not rollout.has_episodes:
        if episode.replay is not None:
            rule = "repeats episodes, and rollout.episode.path names none"
            yield Problem("rollout.episode.replay", episode.replay, rule, "name their file too")
        return
    if rollout.ignore_eos:
        yield Problem(
            "rollout.ignore_eos", True, "with rollout.episode no turn would end", "leave it out"
        )
    if config.algorithm.needs.greedy:
        yield Problem(
            "algorithm.adv_estimator",
            config.algorithm.adv_estimator,
            "compares with greedy responses, which rollout.episode does not sample",
            "use rloo",
        )
    longest = config.data.max_response_length
    for name, val in config.data.val_sets.items():
        if val.max_response_length not in (None, longest):
            yield Problem(
                f"data.val_sets.{name}.max_response_length",
                val.max_response_length,
                f"must be data.max_response_length ({longest}) with rollout.episode",
                "leave it out",
            )
    if episode.tool_timeout_s > episode.timeout_s:
        yield Problem(
            "rollout.episode.tool_timeout_s",
            episode.tool_timeout_s,
            f"must not be above rollout.episode.timeout_s ({episode.timeout_s:g})",
        )


def episode_file_problems(episode: EpisodeConfig) -> Iterator[Problem]:
    """What is wrong inside the file, where it is here."""
    if episode.path is None or not Path(episode.path).is_file():
        return
    try:
        check_program(EpisodeProgram(episode.path, episode.name))
    except EpisodeError as error:
        yield Problem("", None, str(error))
