"""Out of memory: what a rank leaves of it, and the smaller token budgets of the starts after it.

Owns oom.json. It cannot be helped within the process: the other ranks are in collectives that
cannot be withdrawn. So the run ends, and its next start cuts smaller micro-batches, whose gradient
is the same. Must not know what a phase computes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ppo.config import Config, values_of, with_values
from ppo.errors import InputError
from ppo.files import replace_text

logger = logging.getLogger(__name__)

OOM_FILE = "oom.json"
ACTOR, CRITIC = "actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"
REF, REWARD = "ref.log_prob_max_token_len_per_gpu", "reward.model.max_token_len_per_gpu"
BUDGETS = {
    **dict.fromkeys(("update_actor", "old_log_prob"), ACTOR),
    **dict.fromkeys(("update_critic", "values"), CRITIC),
    "ref": REF,
    "reward_model": REWARD,
}
"""by phase; any other has none, and may have had room taken by all of them"""
_OF_CUDA = ("CUDA error: out of memory", "CUDA out of memory", "CUDA error: CUBLAS_STATUS_ALLOC")


def is_out_of_memory(exception: BaseException | None) -> bool:
    """Whether it, or what it was raised from, is of a device on this rank that has no memory."""
    while exception is not None:
        if isinstance(exception, torch.OutOfMemoryError) or str(exception).startswith(_OF_CUDA):
            return True
        exception = exception.__cause__ or exception.__context__
    return False


def write_oom(
    folder: Path,
    config: Config,
    halvings: Mapping[str, int],
    *,
    dp: int,
    rank: int,
    phase: str,
    tokens: int,
) -> None:
    """Write oom.json {rank, phase, budget, tokens, halvings}.

    Args:
        config: without what oom.json changes.
        halvings: of this start, by key; ranks that fail together write the same.
        dp: see `with_smaller_budgets`.
        phase: a name of timing_s.
        tokens: of the micro-batch that was computed.
    """
    keys = [BUDGETS[phase]] if phase in BUDGETS else list(dict.fromkeys(BUDGETS.values()))
    found = {
        "rank": rank,
        "phase": phase,
        "budget": _Budget.of(keys[0], config, dp).halved(halvings.get(keys[0], 0)),
        "tokens": tokens,
        "halvings": {**halvings, **{key: halvings.get(key, 0) + 1 for key in keys}},
    }
    replace_text(folder / OOM_FILE, json.dumps(found) + "\n")


def read_oom(folder: Path) -> dict[str, Any] | None:
    """What oom.json holds; None where there is none, or none of ours."""
    try:
        found = json.loads((folder / OOM_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    halvings = found.get("halvings") if isinstance(found, dict) else None
    known = set(BUDGETS.values())
    if not isinstance(halvings, dict) or not halvings.keys() <= known:
        return None
    return found if all(type(n) is int and 0 <= n < 64 for n in halvings.values()) else None


def with_smaller_budgets(config: Config, found: Mapping[str, Any], *, dp: int) -> Config:
    """The configuration with the budgets that oom.json asks for; each is said.

    Args:
        dp: ranks that the sequences of a mini-batch are spread over.

    Raises:
        InputError: the last start had the smallest ones already.
    """
    sections = tuple(f"{role.section}." for role in config.models.values())
    halvings = {key: n for key, n in found["halvings"].items() if n and key.startswith(sections)}
    budgets = {key: _Budget.of(key, config, dp) for key in halvings}
    struck = [key for key in budgets if BUDGETS.get(found["phase"], key) == key]
    if not any(budgets[key].halved(halvings[key] - 1) > budgets[key].least for key in struck):
        raise InputError(
            f"out of memory on rank {found['rank']} in {found['phase']} with the smallest "
            "micro-batches: shorten data.max_response_length, shard over more ranks, offload "
            "(fsdp.param_offload, fsdp.optimizer_offload), or lower "
            f"rollout.gpu_memory_utilization; then remove {OOM_FILE} from the run folder"
        )
    values = {}
    for key, budget in budgets.items():
        values[budget.path] = budget.halved(halvings[key])
        told = OOM_FILE, found["rank"], found["phase"], budget.path, values[budget.path]
        logger.warning(
            "out of memory before (%s: rank %s, %s): %s is %d instead of %d; remove the file to "
            "have it back",
            *(*told, budget.value),
            extra={"every_rank": True},
        )
    return with_values(config, values)


class _Budget(NamedTuple):
    """Tokens of a micro-batch, or sequences where those are what micro-batches are cut by."""

    path: str
    value: int
    least: int
    """with which each sequence has a micro-batch of its own"""

    @classmethod
    def of(cls, key: str, config: Config, dp: int) -> _Budget:
        given, section = values_of(config), key.partition(".")[0]
        if key in (ACTOR, CRITIC) and not given[f"{section}.use_dynamic_bsz"]:
            path = f"{section}.ppo_micro_batch_size_per_gpu"
            size = given[f"{section}.ppo_mini_batch_size"] * config.rollout.n
            return cls(path, given[path] or -(-size // dp), 1)
        least = -(-config.data.max_length // config.actor.ulysses_sequence_parallel_size)
        return cls(key, given[key], least)

    def halved(self, times: int) -> int:
        """The value after so many halvings; never larger than what is given."""
        return min(self.value, max(self.value >> times, self.least))
