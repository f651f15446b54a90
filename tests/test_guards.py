"""Numbers that go wrong, end to end: all ranks do the same, and metrics.jsonl tells the story."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from ppo.guards.guard import GuardAbort
from ppo.run.folder import read_status
from sharding.checkpoint.files import read_manifest
from tests import number_faults as faults
from tests.distributed import run_distributed
from tests.test_train import rows_of, same_numbers, train_here

NAN = float("nan")
UNTIL_3 = ("trainer.total_training_steps=3", "data.val_files=[]", "trainer.critic_warmup=0")
LOW_REWARD = "{metric: critic/score/mean, below: -0.5, action: [scale_lr 0.5, rollback]}"
RESET = "{metric: critic/vf_loss, not_finite: true, action: reset_critic}"
FOR_EVER = "{metric: response_length/mean, above: 0, action: rollback, max_fires: 1}"
SPIKE = "{metric: actor/grad_norm, above: 1e4, action: skip_update}"
KL = "{metric: actor/ppo_kl_k3, above: 1.0, action: rollback}"


class Job(NamedTuple):
    """A run of three steps with two updates of each model in each, and what goes wrong in it."""

    overrides: tuple[str, ...] = UNTIL_3
    fault: Callable[[int], AbstractContextManager[Any]] = lambda rank: nullcontext()
    error: bool = False


def with_rules(*texts: str) -> tuple[str, ...]:
    return (*UNTIL_3, f"guards.rules=[{', '.join(texts)}]")


LOWEST = ("trainer.early_stop.metric=-critic/score/mean", "trainer.early_stop.patience=9")
KEEPS_LOWEST = ("trainer.keep_best=-critic/score/mean", "trainer.save_freq=2")
"""of these an iteration that is undone must not be the best"""
JOBS = {
    "nothing": Job(with_rules(LOW_REWARD)),
    "nan_gradient": Job(fault=lambda rank: faults.gradient(rank, update=3, on=1, norm=NAN)),
    "reward_collapse": Job(
        (*with_rules(LOW_REWARD), *LOWEST, *KEEPS_LOWEST), lambda rank: faults.rewards(2, less=1.0)
    ),
    "memory": Job(fault=lambda rank: faults.memory(rank, on=1, reading=3, share=0.95)),
    "large_gradient": Job(
        with_rules(SPIKE), lambda rank: faults.gradient(rank, update=3, on=None, norm=1e6)
    ),
    "kl_spike": Job(with_rules(KL), lambda rank: faults.weights("actor", after=3, factor=10.0)),
    "value_loss": Job(
        (*with_rules(RESET), "trainer.critic_warmup=1"),
        lambda rank: faults.weights("critic", after=2, factor=NAN),
    ),
    "for_ever": Job(with_rules(FOR_EVER), error=True),
}
QUICK = ("nothing", "nan_gradient", "reward_collapse", "memory")
"""what CI has time for; the others are for --full"""


def run_jobs(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, Any]:
    """What each job has come to on this rank: sums of its weights after each step, tokens."""
    found: dict[str, Any] = {}
    for name in names:
        job, sums, error = JOBS[name], [], None
        with job.fault(rank), faults.sums_after_each_step(sums):
            try:
                [seen] = train_here(rank, world_size, [(f"{folder}/{name}", job.overrides)])
            except GuardAbort as abort:
                error, seen = str(abort), {"tokens": []}
        assert (error is not None) == job.error
        found[name] = {"sums": sums, "tokens": seen["tokens"], "error": error}
        dist.barrier()
    return found


class Trained(NamedTuple):
    folder: Path
    ranks: list[dict[str, Any]]

    def sums(self, name: str, model: str) -> list[list[tuple[float, ...]]]:
        """Weights, moments and optimizer steps after each step, of each rank."""
        return [[step[model] for step in rank[name]["sums"]] for rank in self.ranks]

    def guards(self, name: str) -> list[dict[str, float]]:
        """guard/* of each row."""
        rows = rows_of(self.folder / name)
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        return [{k[6:]: v for k, v in row.items() if k.startswith("guard/")} for row in rows]

    def said(self, name: str) -> list[list[str]]:
        """What the guards have said, of each rank's log."""
        logs = sorted((self.folder / name / "logs").glob("rank_*.log"))
        assert len(logs) == len(self.ranks)
        mark = "WARNING ppo.guards.guard: "
        return [
            [line.partition(mark)[2] for line in log.read_text().splitlines() if mark in line]
            for log in logs
        ]


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("quick")
    return Trained(folder, run_distributed(run_jobs, 2, str(folder), list(QUICK)))


@pytest.fixture(scope="module", params=[2, 4])
def whole(request, tmp_path_factory) -> Trained:
    folder, names = tmp_path_factory.mktemp("whole"), list(JOBS)
    found = run_distributed(run_jobs, request.param, str(folder), names, timeout_s=120)
    return Trained(folder, found)


def check_quick(trained: Trained) -> None:
    """What goes wrong in the jobs that CI runs, and what all ranks have done about it."""
    assert trained.guards("nothing") == [{}, {}, {}]
    for name in trained.ranks[0]:
        first, *others = trained.said(name)
        assert all(other == first for other in others), name
        assert bool(first) == (name != "nothing"), name

    # a gradient that is no number on one rank: no rank takes that step, nor is it counted
    assert trained.guards("nan_gradient") == [{}, {"skip_update": 1}, {}]
    for of_rank, whole_run in zip(
        trained.sums("nan_gradient", "actor"), trained.sums("nothing", "actor"), strict=True
    ):
        assert of_rank[0] == whole_run[0] and of_rank[1][:2] != whole_run[1][:2]
        assert [steps for _, _, steps in of_rank] == [2, 3, 5]
    rows = rows_of(trained.folder / "nan_gradient")
    assert rows[1]["actor/grad_norm"] is None and rows[2]["actor/grad_norm"] > 0

    # the reward collapses: back to the weights of the start, with half of the rate and new prompts
    assert trained.guards("reward_collapse") == [
        {"rolled_back": 1},
        {"rollback": 1, "scale_lr": 1, "lr_factor/actor": 0.5, "rolled_back": 1},
        {"lr_factor/actor": 0.5},
    ]
    rates = [row["actor/lr"] for row in rows_of(trained.folder / "reward_collapse")]
    assert rates == [1e-3, 1e-3, 5e-4]
    for model in ("actor", "critic"):
        for of_rank in trained.sums("reward_collapse", model):
            assert [steps for _, _, steps in of_rank] == [2, 0, 2] and of_rank[1][1] == 0
    scores = [row["critic/score/mean"] for row in rows_of(trained.folder / "reward_collapse")]
    assert scores[1] < min(scores[0], scores[2])
    run = trained.folder / "reward_collapse"
    assert state_of(run, "early_stop")["best"] == -min(scores[0], scores[2])
    metrics = [read_manifest(path)["metric"] for path in sorted(run.glob("checkpoints/step_*"))]
    assert metrics[-2:] == [None, -scores[2]]  # of what is undone, and of the last
    batches = trained.ranks[0]["reward_collapse"]["tokens"]
    assert batches[2] not in batches[:2]

    # one rank's memory is short: all cut smaller micro-batches, and train the same
    assert trained.guards("memory") == [{"halve_budget": 1}, {}, {}]
    same_numbers(rows_of(trained.folder / "nothing"), rows_of(trained.folder / "memory"))
    assert state_of(trained.folder / "memory")["halvings"] == {"actor": 1}


def state_of(run: Path, name: str = "guard") -> dict[str, Any]:
    """What the newest checkpoint has of a part of the state."""
    newest = max((run / "checkpoints").glob("step_*"))
    return json.loads((newest / "train_state.json").read_text())["state"][name]


@pytest.mark.distributed
def test_faults_on_two_ranks(quick):
    check_quick(quick)


@pytest.mark.distributed
@pytest.mark.full
def test_every_fault_on_two_and_four_ranks(whole):
    check_quick(whole)
    assert whole.guards("large_gradient") == [{}, {"skip_update": 1}, {}]
    [row] = [r for r in rows_of(whole.folder / "large_gradient") if r["step"] == 2]
    assert row["actor/grad_norm"] > 4e5  # the mean of two

    # the mini-batch that shows the divergence takes no step, the iteration is undone
    assert whole.guards("kl_spike") == [
        {"rolled_back": 1},
        {"rollback": 1, "stop_epoch": 1, "rolled_back": 1},
        {},
    ]
    for of_rank in whole.sums("kl_spike", "actor"):
        assert [steps for _, _, steps in of_rank] == [2, 0, 2]

    # a critic that is lost: the actor learns nothing of it, a new one warms up for a step
    assert whole.guards("value_loss") == [{}, {"reset_critic": 2, "skip_update": 4}, {}]
    for of_critic, of_actor, start in zip(
        whole.sums("value_loss", "critic"),
        whole.sums("value_loss", "actor"),
        whole.sums("kl_spike", "critic"),
        strict=True,
    ):
        assert of_critic[0][0] != of_critic[0][0]
        assert of_critic[1] == start[1] and of_critic[2][2] == 2
        assert [steps for _, _, steps in of_actor] == [0, 0, 0]

    # no cure: the run ends, and says of what
    assert whole.guards("for_ever") == [{"rollback": 1, "rolled_back": 1}, {"rollback": 1}]
    status = read_status(whole.folder / "for_ever")
    assert status is not None and status["state"] == "failed" and status["step"] == 2
    assert (
        "response_length/mean above 0: rollback fired 2 times within 20 steps" in status["reason"]
    )
    assert len({rank["for_ever"]["error"] for rank in whole.ranks}) == 1


def with_a_collapse(rank: int, world_size: int, folder: str, starts: list[tuple[int, int]]) -> None:
    """Starts of a run: until which step, and in which of its batches the reward collapses."""
    for until, batch in starts:
        more = (f"trainer.total_training_steps={until}", "trainer.save_freq=2")
        with faults.rewards(batch, less=1.0):
            train_here(rank, world_size, [(folder, JOBS["reward_collapse"].overrides + more)])


@pytest.mark.distributed
@pytest.mark.full
def test_what_guards_have_changed_survives_an_exact_resume_on_any_number_of_ranks(tmp_path):
    one, two, moved = tmp_path / "one", tmp_path / "two", tmp_path / "moved"
    run_distributed(with_a_collapse, 2, str(one), [(4, 2)])
    run_distributed(with_a_collapse, 2, str(two), [(2, 2), (4, 0)])
    run_distributed(with_a_collapse, 2, str(moved), [(2, 2)])
    run_distributed(with_a_collapse, 1, str(moved), [(4, 0)])
    left = ("timing", "perf", "memory", "rollout/", "reshard")
    kept = [
        [{k: v for k, v in row.items() if not k.startswith(left)} for row in rows_of(folder)]
        for folder in (one, two)
    ]
    assert kept[0] == kept[1] and len(kept[0]) == 4
    same_numbers(rows_of(one), rows_of(moved))
    assert state_of(one) == state_of(two) == state_of(moved)
    assert state_of(one)["lr_factor"] == {"actor": 0.5} and state_of(one)["undone"] == 2
