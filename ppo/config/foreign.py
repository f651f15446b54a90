"""Keys that other trainers have, and keys of ours whose feature does not exist yet.

Owns how a key is looked up in the tables of ppo/config/trainers/, and what is not built. It must
not know how files are read.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ppo.config.trainers import openrlhf, trl, verl

# a name -> the key that holds the same value
SAME = trl.SAME | openrlhf.SAME
# names of other trainers, wherever they stand
ANYWHERE = {
    **trl.ADVICE,
    **openrlhf.ADVICE,
    **verl.ANYWHERE,
    "vf_clip_param": "use critic.cliprange_value",
    "policy_kl_penalty": "use algorithm.kl_penalty and algorithm.kl_ctrl.kl_coef",
    "early_stop_kl": "use guards.target_ppo_kl, or a rule with stop_epoch in guards.rules",
    "inference_engine": "use rollout.engine",
    "data_parallel_size": "it follows from the world size and "
    "actor.ulysses_sequence_parallel_size; remove it",
}


class NotBuilt(NamedTuple):
    """A key of the specification without its feature."""

    off: str | None
    """the value that asks for nothing and is accepted; None = no value is"""
    instead: str = "leave it out"


NOT_BUILT = {
    "actor.tensor_parallel_size": NotBuilt("1", "use actor.ulysses_sequence_parallel_size"),
    "actor.expert_parallel_size": NotBuilt("1"),
    "actor.router_aux_loss_coef": NotBuilt("0"),
    "actor.router_replay": NotBuilt("off"),
    "critic.tensor_parallel_size": NotBuilt("1", "use actor.ulysses_sequence_parallel_size"),
    "rollout.tail": NotBuilt(None),
    "rollout.partial": NotBuilt(None),
}


class Foreign(NamedTuple):
    """What replaces a key of another trainer."""

    advice: str
    ours: str | None = None
    """the key that takes the same value"""


def foreign(path: str, known: set[str]) -> Foreign | None:
    """What replaces a key of another trainer, or None if the path is not known to be one."""
    ours = _ours(path)
    if ours != path and known.intersection(_heads(ours)):  # a key, or inside of a mapping
        return Foreign(f"write {ours}", ours)
    advice = _verl_advice(ours) or ANYWHERE.get(path) or _of_name(path, known)
    advice = advice or _verl_advice(path)
    return Foreign(_with_what_is_missing(advice)) if advice else None


def _with_what_is_missing(advice: str) -> str:
    """The advice, and which of the keys in it are not built: followed, it would be refused."""
    missing = [key for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", advice) if not_built(key)]
    return f"{advice}, which is not built yet" if missing else advice


def _verl_advice(path: str) -> str | None:
    """What is said of the key, or of the innermost section around it."""
    return next((verl.ADVICE[head] for head in _heads(path) if head in verl.ADVICE), None)


def _of_name(path: str, known: set[str]) -> str | None:
    """What replaces a name of another trainer that stands in one of our sections."""
    name = path.rpartition(".")[2]
    if any(key.endswith("." + name) for key in known):
        return None  # a key of ours in another section is what was meant
    if SAME.get(name) in known:
        return f"use {SAME[name]}"
    return ANYWHERE.get(name)


def not_built(path: str) -> NotBuilt | None:
    """The entry of a key, or of the section it stands in, whose feature does not exist yet.

    Keys of other trainers count as what they are called here.
    """
    return next((NOT_BUILT[head] for head in _heads(_ours(path)) if head in NOT_BUILT), None)


def is_read_inside(path: str) -> bool:
    """Whether a section that is not ours is to be answered key by key instead of as a whole."""
    inside = path + "."
    return inside.startswith(tuple(old for old in verl.RENAMED if old.endswith("."))) or any(
        known.startswith(inside)
        for table in (verl.RENAMED, verl.ADVICE, NOT_BUILT, SAME, ANYWHERE)
        for known in table
    )


def _ours(path: str) -> str:
    """What the key is called here, as far as it holds the same value."""
    if path in SAME:
        return SAME[path]
    for old, new in verl.RENAMED.items():
        if old.endswith(".") and path.startswith(old):
            path = new + path[len(old) :]
        elif path == old:
            path = new
    return path


def _heads(path: str) -> list[str]:
    """The path, and the sections around it, from the inside out."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
