"""What ppo/rollout/ expects of an engine, as data and one protocol.

Owns the request and completion types and the order of calls. Must not know any engine, the
trainer's loop or how requests are spread over replicas.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from ppo.errors import InputError

SLICE_S = 0.5
"""seconds that an engine works, or waits, between two looks at what else there is to do"""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one generation are drawn; the same for all its requests, but for what one
    says itself.

    Log-probs are those of log softmax(z / temperature) before top_k and top_p, and of
    log softmax(z) when temperature is 0 (SPEC 3).
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = 1.0
    """Smallest set of tokens with at least this probability; 1 keeps all."""
    top_k: int = -1
    """Number of most likely tokens kept; -1 keeps all."""
    max_new_tokens: int
    """Upper limit of tokens per completion."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; the tokens that complete the text belong to it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion; the token belongs to it."""
    ignore_eos: bool = False
    """Ignores stop_token_ids (as SGLang does), so that only stop and length end a completion."""
    seed: int = 0
    """Key of the sampling noise."""
    step: int = 0
    """Training step; gives the same prompt other noise in another epoch."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {getattr(self, name)}: {rule}"
            for name, valid, rule in (
                ("temperature", self.temperature >= 0, "must be at least 0"),
                ("top_p", 0 < self.top_p <= 1, "must be in (0, 1]"),
                ("top_k", self.top_k == -1 or self.top_k > 0, "must be positive, or -1 for all"),
                ("max_new_tokens", self.max_new_tokens > 0, "must be positive"),
                ("stop", all(self.stop), "must not hold an empty text"),
            )
            if not valid
        ]
        if problems:
            raise ValueError("; ".join(problems))


class Request(NamedTuple):
    """One completion asked for."""

    uid: int
    """Unique per sample and the same after a restart and on any number of ranks."""
    prompt_ids: list[int]
    max_new_tokens: int | None = None
    """None: as many as the generation's"""
    stop: tuple[str, ...] | None = None
    """None: the generation's"""
    sampled_before: int = 0
    """Tokens of the prompt that were sampled with this uid: a conversation that goes on draws the
    noise that comes next. SGLang counts all tokens of the prompt instead."""


class Completion(NamedTuple):
    """One completion; a stop token, or the tokens that complete a stop text, are included."""

    response_ids: Sequence[int] | np.ndarray
    """int32 from an engine"""
    logprobs: Sequence[float] | np.ndarray
    """float32 from an engine"""
    finish_reason: str
    """`stop` (stop token or text) or `length` (max_new_tokens or max_model_len)."""


class Completions(NamedTuple):
    """Many completions, one after the other: no number of them is a Python object."""

    ids: np.ndarray
    """int32, of all responses"""
    logprobs: np.ndarray
    """float32"""
    lengths: list[int]
    """tokens of each"""
    finish_reasons: list[str]

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> "Completions":
        """From one object for each."""
        ids = [np.asarray(c.response_ids, np.int32) for c in completions]
        logprobs = [np.asarray(c.logprobs, np.float32) for c in completions]
        return cls(
            np.concatenate([np.zeros(0, np.int32), *ids]),
            np.concatenate([np.zeros(0, np.float32), *logprobs]),
            [len(x) for x in ids],
            [c.finish_reason for c in completions],
        )

    def borders(self) -> list[tuple[int, int]]:
        """Where each one lies in `ids` and `logprobs`: from, to."""
        return list(pairwise(accumulate(self.lengths, initial=0)))


class Finished(NamedTuple):
    """A request that has ended."""

    uid: int
    completion: Completion


class Generation(Protocol):
    """Requests on their way in one engine.

    All ranks of a rollout group make the same calls with the same requests. What has ended is told
    to every rank of the group, or to its leader alone; the others are told nothing then.
    """

    @property
    def room(self) -> int:
        """Requests that may be submitted now to start at once or soon; at least 1 when idle."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests. Raises ValueError for one that the engine cannot serve."""
        ...

    def advance(self, seconds: float = SLICE_S) -> list[Finished]:
        """Work, or wait, for about so long; returns what has ended, at once if all has."""
        ...

    def metrics(self) -> dict[str, float]:
        """rollout/* of this generation, when no completion is awaited any more; none where nothing
        was told."""
        ...

    def close(self) -> None:
        """Drop what has not ended."""
        ...


class Engine(Protocol):
    """One replica's engine, built for one FSDP2-sharded module with HF parameter names.

    All ranks of a rollout group make the same calls in the same order: wake, any number of
    generations one after the other, release; then wake again. The iterators do their work while
    they are advanced and give control back at least about every half second, so that the caller can
    look for stop requests; the caller may abandon them. `Run.drive` advances them and gives what
    they return.

    `module` is the trainer's: its `config` names the trainer's attention, so a model of one's own
    gets a copy. Only the first `num_ids_of(module)` ids may be sampled; log-probs are over these.
    """

    generates_together: bool
    """whether the ranks of a group meet in the collectives of a step of a generation"""
    most_sequences: int
    """that it generates at once, at most; what its KV cache has room for may be fewer"""
    repeats: bool
    """whether the same requests, submitted together while nothing runs, are answered with the same
    bits every time"""

    def start(self) -> Generator[None, None, None]:
        """Waits until the engine is up and has given its memory back; `wake` does it otherwise.

        Some engines size their cache by what is free when they start: the caller may hold more
        once this has ended.
        """
        ...

    def wake(
        self, loaded: Callable[[], None] = lambda: None
    ) -> Generator[None, None, dict[str, float]]:
        """Takes memory and loads the weights of the module; returns the metrics reshard/*.

        `loaded` is called when the module has been read, before the KV cache takes its memory.
        Collective over the shard group: every rank has to advance it the same number of times.
        """
        ...

    def begin(self, params: SamplingParams, *, longest_prompt: int, most: int) -> Generation:
        """Open a generation, when the one before has ended or was closed.

        Args:
            longest_prompt: tokens of the longest prompt that will come.
            most: requests that need to run at once at most.
        """
        ...

    def release(self) -> None:
        """Gives weights and KV cache back; also after an abandoned or failed call."""
        ...

    def close(self) -> None:
        """Ends the engine and everything it started; may be called twice."""
        ...


def check_requests(
    requests: Sequence[Request], *, max_model_len: int, vocab_size: int | None = None
) -> None:
    """ValueError that names the first bad request: empty, too long, or a token out of range."""
    for index, request in enumerate(requests):
        prompt_ids = request.prompt_ids
        where = f"request {index} (uid {request.uid})"
        if request.max_new_tokens is not None and request.max_new_tokens < 1:
            raise ValueError(f"{where}: max_new_tokens = {request.max_new_tokens} is not positive")
        if not prompt_ids:
            raise ValueError(f"{where}: the prompt is empty")
        if len(prompt_ids) >= max_model_len:
            raise ValueError(
                f"{where}: the prompt has {len(prompt_ids)} tokens, which leaves no room for a "
                f"response within max_model_len = {max_model_len}; shorten data.max_prompt_length "
                "or raise rollout.max_model_len"
            )
        if vocab_size is not None and not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
            raise ValueError(
                f"{where}: token ids from {min(prompt_ids)} to {max(prompt_ids)} do not fit the "
                f"model's vocabulary of {vocab_size}"
            )


def stop_token_ids(tokenizer: Any, *configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a response, ascending: of the tokenizer and `eos_token_id` of every config.

    configs: generation_config.json, config.json, and its text_config. Engines know none of these
    by themselves, so that all end where one ends.
    Raises InputError for an eos_token_id that is neither an id nor a list of ids.
    """
    found = {tokenizer.eos_token_id} - {None}
    for config in configs:
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool)]
        if wrong:
            raise InputError(f"eos_token_id = {value!r} of the model: {wrong[0]!r} is no token id")
        found.update(ids)
    return tuple(sorted(found))
