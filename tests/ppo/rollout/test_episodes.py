"""Which episodes count as without room for a turn, and what is said of them."""

from ppo.config import load_config
from ppo.episodes.contract import COUNTS, EpisodeResult
from ppo.guards.guard import Guard
from ppo.metrics import Metrics
from ppo.rollout.episodes import log_episodes

REQUIRED = ("model.path=tiny", "data.train_files=tiny")


def ended(finish: str, turns: int) -> EpisodeResult:
    return EpisodeResult(
        number=0,
        uid=0,
        segments=[],
        score=None,
        extra={},
        text="",
        messages=[],
        finish=finish,
        counts={**dict.fromkeys(COUNTS, 0), "turns": turns},
        tape=[],
    )


def test_episodes_whose_beginning_leaves_no_room_for_a_turn_are_warned_about(caplog):
    guard = Guard(load_config(None, list(REQUIRED)).trainer.alarms.rules())
    shares = []
    for step, results in enumerate(
        [
            [ended("length", 2), ended("done", 0), ended("max_turns", 4), ended("done", 1)],
            [ended("length", 0), ended("length", 0), ended("done", 1), ended("length", 1)],
        ],
        start=1,
    ):
        metrics = Metrics()
        log_episodes(results, metrics)
        shares.append(metrics.reduce()["episodes/no_turn"])
        guard.before_update(step, {})
        guard.after_step(step, {"episodes/no_turn": shares[-1]})
    assert shares == [0.0, 0.5]
    (said,) = (record.message for record in caplog.records)
    assert said.startswith("step 2: episodes/no_turn = 0.5, above 0.01: data.max_prompt_length")
