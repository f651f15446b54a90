"""What cannot work of rollout.episode: with other keys, and in the file that it names.

Owns looking, not running: the file is parsed, never imported.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from ppo.config import Config, EpisodeConfig, Problem
from ppo.plugin import PluginError, parse_plugin


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
        found = parse_plugin(episode.path, episode.name)
    except PluginError as error:
        yield Problem("rollout.episode", None, str(error))
        return
    for text in _wrong(found):
        yield Problem("rollout.episode.name", episode.name, text)


def _wrong(found: ast.stmt | None) -> Iterator[str]:
    """What is wrong with the definition of an episode; none where it is imported or made there."""
    if isinstance(found, ast.FunctionDef):
        yield "must be an async function (async def), or a class"
    if isinstance(found, ast.AsyncFunctionDef):
        arguments = found.args
        positional = len(arguments.posonlyargs) + len(arguments.args)
        required = positional - len(arguments.defaults)
        if required > 2 or (positional < 2 and arguments.vararg is None):
            yield "must take two arguments: the row and the policy"
