"""What the order of calls (ppo/engines/sglang/engine.py) expects of where SGLang runs.

Owns the protocol of the two places: in the ranks themselves (rank_executor.py), and in a process of
its own (host_executor.py). Must not know either.
"""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ppo.engines.contract import Finished

SamplingOf = dict[str, Any]
Described = tuple[int, list[int], SamplingOf]
"""a request: uid, prompt, SGLang's sampling parameters"""


class EngineError(RuntimeError):
    """The engine ended, hung or refused; names the rank, and its log where it has one."""


class Patience(NamedTuple):
    """Seconds without progress after which an engine counts as hung."""

    start: float
    call: float
    generate: float


class Facts(NamedTuple):
    """What is known of an engine that is up."""

    kv_tokens: int
    version: str


class Sums(NamedTuple):
    """Of a generation, when all has ended."""

    prompt_tokens: int
    cached_tokens: int
    loads: Sequence[tuple[int, float]]
    """now and then: (running requests, share of the KV cache in use)"""


class Stream(Protocol):
    """The requests of one generation on their way."""

    def submit(self, requests: Sequence[Described]) -> None:
        """Add requests."""
        ...

    def advance(self, seconds: float, unfinished: int) -> list[Finished]:
        """Work, or wait, for about so long, or until so many have ended: what has ended."""
        ...

    def finish(self) -> Sums:
        """When all has ended, which ends the generation."""
        ...

    def drop(self) -> None:
        """Give up what has not ended; after `finish`, nothing. Also after an exception."""
        ...


class Update(Protocol):
    """A pass of all weights to the engine. Every rank of a rollout group makes the same calls, and
    takes part in them to the end whatever has failed."""

    def begin(self) -> None:
        """Before the first payload. Raises RuntimeError, as `send` and `end` do."""
        ...

    def send(self, instruction: dict[str, Any], flat: Tensor) -> dict[str, Any] | None:
        """Have the loader follow an instruction in the model that holds this rank's slice.

        Returns its answer; None where an earlier call has failed. See ppo/engines/sglang/loader.py.
        """
        ...

    def end(self) -> None:
        """After the last payload."""
        ...


class Executor(Protocol):
    """The engine of a rollout group, as one of its ranks sees it. Its ranks make the same calls."""

    generates_together: bool
    """whether every rank has to advance a generation"""

    def start(self) -> Generator[None, None, Facts | None]:
        """Wait until it is up; None on a rank that learns nothing of it."""
        ...

    def release(self, tags: Sequence[str]) -> None:
        """Give memory back; `tags` are SGLang's: weights, kv_cache."""
        ...

    def resume(self, tags: Sequence[str]) -> None:
        """Map memory that was released again; its content is garbage."""
        ...

    def flush(self) -> None:
        """Forget all prefixes."""
        ...

    def update(self) -> AbstractContextManager[Update]:
        """Around a pass of weights, and what is allocated for it."""
        ...

    def begin(self, seed: int) -> Stream | None:
        """A generation; None on a rank that has no part in it.

        seed: of the noise of requests that have none of their own, where the engine can take it.
        """
        ...

    def close(self) -> None:
        """End it. May be called twice. Not collective."""
        ...
