"""Which of TRL's trainers is meant, and its batches, counted over all devices and in prompts.

Owns what follows from sequences of one device, accumulation and steps per generation. Must not know
our keys besides those that say an estimator and a number of devices.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ppo.config.migrate.given import Given

_OF_PPO = {"num_ppo_epochs", "num_mini_batches", "cliprange", "vf_coef", "response_length", "lam"}
NUM_GENERATIONS = {"grpo": 8, "rloo": 2}


class Steps(NamedTuple):
    """Batches over all devices, in prompts, and optimizer steps of an iteration."""

    prompts: int
    mini_batch: int
    optimizer_steps: int
    world_size: int
    is_counted: bool
    """whether it was said how many devices there are"""


def algorithm_of(given: Given) -> str:
    """grpo, rloo or ppo: as said, else by the name of class or program, else by the keys."""
    said = str(given.keys.get("algorithm.adv_estimator", ""))
    if said in ("grpo", "rloo", "gae"):
        return {"gae": "ppo"}.get(said, said)
    named = re.search("rloo|grpo|ppo", given.program.lower())
    if named:
        return named[0]
    if "rloo_k" in given.keys:
        return "rloo"
    return "ppo" if _OF_PPO & given.keys.keys() else "grpo"


def steps_of(given: Given) -> Steps:
    """The batches of the run there. One that is no whole number of prompts is 0."""
    nodes, ranks = (given.keys.get(f"check.{name}") for name in ("nnodes", "nproc_per_node"))
    said = [
        given.ranks.get("nnodes") or whole_number(nodes),
        given.ranks.get("nproc_per_node") or whole_number(ranks),
    ]
    world = given.ranks.get("world_size") or (said[0] or 1) * (said[1] or 8)
    is_counted = "world_size" in given.ranks or said[1] is not None
    accumulated = _number(given, "gradient_accumulation_steps", 1)
    each = _number(given, "per_device_train_batch_size", 8) * accumulated * world
    algorithm = algorithm_of(given)
    if algorithm == "ppo":
        parts = _number(given, "num_mini_batches", 1)
        return Steps(parts * each, each, 1, world, is_counted)
    of_all = whole_number(given.keys.get("generation_batch_size")) or (
        each // accumulated * _number(given, "steps_per_generation", accumulated)
    )
    epochs, n = _number(given, "num_iterations", 1), samples_of(given, algorithm)
    is_whole = of_all % n == each % n == of_all % each == 0
    prompts, mini_batch = (of_all // n, each // n) if is_whole else (0, 0)
    return Steps(prompts, mini_batch, max(1, of_all // each) * epochs, world, is_counted)


def samples_of(given: Given, algorithm: str) -> int:
    """Responses of a prompt, of grpo and rloo."""
    said = whole_number(given.keys.get("num_generations", given.keys.get("rloo_k")))
    return said or NUM_GENERATIONS[algorithm]


def whole_number(raw: Any) -> int | None:
    """A number above 0; None for all else."""
    text = str(raw)
    return int(text) if text.isdigit() and int(text) > 0 else None


def _number(given: Given, name: str, default: int) -> int:
    return whole_number(given.keys.get(name)) or default
