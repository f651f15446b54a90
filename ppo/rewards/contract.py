"""What goes into scoring and what comes out. Plain data; must not import torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class RewardError(ValueError):
    """The reward cannot work at all: no file, wrong signature, wrong type, no scorer."""


class RewardRequest(NamedTuple):
    """One sample to score."""

    data_source: str
    solution_str: str  # the response as text
    ground_truth: Any
    extra_info: dict[str, Any]
    prompt: Any = ""  # as written in the data: messages, or plain text


class RewardResult(NamedTuple):
    """Score of one sample, or why there is none."""

    score: float | None  # finite; None when it failed, or when no function applies to it
    failed: str | None = None  # "error" or "timeout"
    traceback: str = ""  # of a sample that failed
    extra: Mapping[str, float] = {}  # finite numbers that came with the score: metrics
    answer: str | None = None  # what the response answers, as far as the function says


class Function(NamedTuple):
    """One reward function, in a form that travels."""

    path: str | None  # None = the built-in scorers
    name: str
    kwargs: dict[str, Any]
    style: str  # verl or trl
    weight: float = 1.0  # in the sum over functions
    label: str = ""  # tells it from the other functions in metrics


class FunctionSettings(Protocol):
    """Section `reward.function`."""

    @property
    def path(self) -> list[str] | None: ...

    @property
    def name(self) -> list[str]: ...

    @property
    def weights(self) -> list[float] | None: ...

    @property
    def kwargs(self) -> dict[str, Any]: ...

    @property
    def style(self) -> str: ...


class RewardSettings(Protocol):
    """Section `reward`, as far as the pool reads it."""

    @property
    def function(self) -> FunctionSettings: ...

    @property
    def num_workers(self) -> int: ...

    @property
    def timeout_s(self) -> float: ...
