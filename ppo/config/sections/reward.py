"""The section `reward`: who scores responses, and within which limits.

Owns names, types, defaults and units. Must not know how files are read or checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ppo.config.bounds import (
    Bound,
    FilePath,
    FollowingBudget,
    JinjaText,
    Length,
    NonNegative,
    PythonName,
    UnitInterval,
    Weight,
)
from ppo.config.fields import MayChange, Section, derived, inherits
from ppo.config.sections.model import FsdpConfig


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig(Section):
    """One scorer of the user, or several whose scores are summed."""

    path: list[FilePath] | None = None
    """Python file, or several; null = built-in scorers, picked by data_source"""
    name: list[PythonName] = field(default_factory=lambda: ["compute_score"])
    """name of the function in that file, or several: one for each file, or all in one file"""
    weights: list[Weight] | None = None
    """of each function in the sum; null = all 1"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """extra keyword arguments of every call"""
    style: Literal["verl", "trl"] = "verl"
    """verl = one sample per call, trl = f(prompts, completions, **columns) -> list"""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(Section):
    """A model that scores."""

    enable: bool = False
    """score with a reward model"""
    path: FilePath | None = None
    """HF folder or hub name of a sequence classification model; `tiny` = a seeded random one"""
    chat_template: JinjaText | None = None
    """Jinja text that replaces its tokenizer's chat template; null = the tokenizer's"""
    max_token_len_per_gpu: MayChange[FollowingBudget] = derived(
        "actor.log_prob_max_token_len_per_gpu"
    )
    """tokens of one pass on a rank; null = actor.log_prob_max_token_len_per_gpu"""
    fsdp: FsdpConfig = inherits(FsdpConfig, "actor.fsdp")
    """sharding; keys that are null follow actor.fsdp; parameters are held in param_dtype and
    offloaded when idle"""


@dataclass(frozen=True, kw_only=True)
class RewardWeightsConfig(Section):
    """The weight of each scorer in the score."""

    function: Weight | None = None
    """of the function; null = 1, but no function without reward.function.path where a reward model
    scores or the estimator needs no reward"""
    model: Weight = 1.0
    """of the reward model"""


@dataclass(frozen=True, kw_only=True)
class OverlongBufferConfig(Section):
    """DAPO's penalty for responses that come near data.max_response_length."""

    len: Length | None = None
    """tokens before data.max_response_length over which the penalty grows from 0 to penalty_factor;
    null = none"""
    penalty_factor: NonNegative = 1.0
    """what a response of data.max_response_length tokens costs"""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Section):
    """Scoring of responses."""

    function: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)
    """scorer of your own, or several whose scores are summed"""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """a sequence classifier with one label, whose logit for the whole conversation is the score"""
    manager: Literal["naive", "dapo"] = "naive"
    """dapo: the score of a training sample has the penalty of overlong_buffer in it"""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    """that penalty"""
    weights: RewardWeightsConfig = field(default_factory=RewardWeightsConfig)
    """how scores are summed; 0 = the score is a metric only"""
    normalize: bool = False
    """subtract the mean of all scores of the run so far and divide by their standard deviation,
    before the KL penalty; metrics of scores stay as they are"""
    num_workers: MayChange[Annotated[int, Bound(ge=1, le=4096, usual=(1, 256))]] = 8
    """scoring processes of a node"""
    timeout_s: Annotated[float, Bound(ge=0.01, le=1e6, usual=(0.1, 3600))] = 60.0
    """time limit of one sample, seconds; a sample over it is masked out of the loss"""
    max_failed_fraction: UnitInterval = 0.1
    """the run ends when a larger share of a step's samples could not be scored"""
