"""One generation of the embedded engine: rows come in, take steps together, and leave as they end.

Owns which requests run, prefill, decode and the end of a row. Must not know time slices, weights or
process groups: every rank of a tensor-parallel group runs it in lockstep, because every decision
follows from the tokens.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ppo.engines.contract import Completion, Finished, Request, SamplingParams
from ppo.engines.embedded.model import LocalModel
from ppo.engines.embedded.sampling import sample, uniforms
from ppo.engines.embedded.stop_text import StopText
from sharding.offload import to_device


@dataclass(slots=True, eq=False)
class Response:
    """One request on its way; `position` is where its newest token will be written."""

    uid: int
    prompt_ids: list[int]
    limit: int
    position: int
    stop: tuple[str, ...] = ()
    sampled_before: int = 0
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class _State(NamedTuple):
    """Device side of the running rows, [R] int64 each."""

    tokens: Tensor
    positions: Tensor
    counts: Tensor
    uids: Tensor


class _Arrival(NamedTuple):
    """Sampled tokens on their way to the host, with the rows they belong to."""

    rows: list[Response]
    tokens: Tensor
    logprobs: Tensor
    event: torch.cuda.Event | None


class Generation:
    """Drives requests to their end, one `step` at a time, with at most `max_rows` at once.

    Finished rows leave the batch at once, waiting ones take their place. Requests that start
    together and have the same prompt share its prefill. On CUDA the host reads a step's tokens
    while the next step runs (`lag` = 1): a row may take one step too many, whose token is dropped.
    """

    def __init__(
        self,
        model: LocalModel,
        params: SamplingParams,
        *,
        longest_prompt: int,
        max_rows: int,
        max_model_len: int,
        max_prefill_tokens: int,
        stop_text: StopText,
        agree: Callable[[Tensor], None] | None = None,
        lag: int = 0,
    ):
        """agree: makes the sampled tokens [R] equal on all ranks of the group, in place."""
        self._model, self._params, self._stop_text = model, params, stop_text
        self._agree, self._lag, self._max_model_len = agree, lag, max_model_len
        self._stop_ids = frozenset(() if params.ignore_eos else params.stop_token_ids)
        self._waiting: deque[Response] = deque()
        self._prefills: deque[list[list[Response]]] = deque()
        self._running: list[Response] = []
        self._finished: list[Response] = []
        self._state = _State(*(torch.zeros(0, dtype=torch.int64, device=model.device),) * 4)
        self._arrivals: deque[_Arrival] = deque()
        self._max_rows, self._max_prefill_tokens = max_rows, max_prefill_tokens
        columns = longest_row(longest_prompt, params, max_model_len)
        self.cache = model.make_cache(rows=max_rows, columns=columns)
        self.num_prefilled = self.num_decodes = self.num_decoded_rows = self.peak_tokens = 0
        self.num_tokens = self.num_prompt_tokens = 0
        """response tokens of what has ended, prompt tokens of all"""

    @property
    def done(self) -> bool:
        """Whether nothing is left to do, until more is submitted."""
        return not (self._waiting or self._prefills or self._running)

    @property
    def room(self) -> int:
        """Rows that are free, and a quarter more that may wait for the next ones."""
        started = sum(len(rows) for chunk in self._prefills for rows in chunk)
        ahead = max(1, self._max_rows // 4)
        held = len(self._waiting) + started + len(self._running)
        return max(0, self._max_rows + ahead - held)

    def submit(self, requests: Sequence[Request]) -> None:
        """More rows; those of one prompt that come together share its prefill."""
        rows = [self._row(request) for request in requests]
        self._waiting.extend(row for siblings in _by_prompt(rows) for row in siblings)
        self.num_prompt_tokens += sum(len(request.prompt_ids) for request in requests)

    def _row(self, request: Request) -> Response:
        params, length = self._params, len(request.prompt_ids)
        most = params.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        return Response(
            uid=request.uid,
            prompt_ids=request.prompt_ids,
            limit=min(most, self._max_model_len - length),
            position=length,
            stop=params.stop if request.stop is None else request.stop,
            sampled_before=request.sampled_before,
        )

    def take_finished(self) -> list[Finished]:
        """What has ended since the last call."""
        taken, self._finished = self._finished, []
        return [
            Finished(
                row.uid,
                Completion(
                    np.array(row.response_ids, np.int32),
                    np.array(row.logprobs, np.float32),
                    row.finish_reason or "length",
                ),
            )
            for row in taken
        ]

    def step(self) -> None:
        """One prefill or one token for every running row; then rows leave and enter."""
        if not self._prefills:
            self._admit()
        if self._prefills:
            self._prefill(self._prefills.popleft())
        else:
            self._decode()
        while len(self._arrivals) > self._lag:
            self._read(self._arrivals.popleft())
        if any(row.finish_reason for row in self._running):
            self._compact()

    @property
    def cache_hit(self) -> float:
        """Share of prompt tokens that were not computed, since a sibling's prefill has them."""
        prompt_tokens = self.num_prompt_tokens
        return 1 - self.num_prefilled / prompt_tokens if prompt_tokens else 0.0

    def _admit(self) -> None:
        """Moves waiting rows to prefill when enough places are free to make it worthwhile."""
        free = self._max_rows - len(self._running)
        enough = min(len(self._waiting), max(1, self._max_rows // 8))
        if not self._waiting or (self._running and free < enough):
            return
        starting = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        chunk: list[list[Response]] = []
        for rows in sorted(_by_prompt(starting), key=lambda rows: len(rows[0].prompt_ids)):
            if chunk and (len(chunk) + 1) * len(rows[0].prompt_ids) > self._max_prefill_tokens:
                self._prefills.append(chunk)
                chunk = []
            chunk.append(rows)
        self._prefills.append(chunk)

    def _prefill(self, groups: list[list[Response]]) -> None:
        """Prompts [U, P], right-padded, each once for all its rows; samples their first tokens."""
        device = self._model.device
        prompts = [torch.tensor(rows[0].prompt_ids) for rows in groups]
        input_ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)  # [U, P]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        copies = torch.tensor([len(rows) for rows in groups])
        source = to_device(torch.arange(len(groups)).repeat_interleave(copies), device)  # [R]
        step = self.cache.prefill(lengths.tolist(), copies.tolist(), device)
        logits = self._model.logits(
            to_device(input_ids, device), step, self.cache, last=to_device(lengths - 1, device)
        )
        self.num_prefilled += int(lengths.sum())
        rows = [row for group in groups for row in group]
        self._running = self._running + rows
        started = _State(
            tokens=torch.zeros_like(source),
            positions=to_device(lengths, device)[source],
            counts=to_device(torch.tensor([row.sampled_before for row in rows]), device),
            uids=to_device(torch.tensor([row.uid for row in rows]), device),
        )
        started = self._sample(rows, logits[source], started)
        self._state = _State(*(torch.cat(both) for both in zip(self._state, started, strict=True)))

    def _decode(self) -> None:
        """Feeds every running row its newest token and samples the next one."""
        state, rows = self._state, self._running
        longest = max(row.position for row in rows) + 1
        step = self.cache.decode(state.positions, longest)
        logits = self._model.logits(state.tokens[:, None], step, self.cache)
        for row in rows:
            row.position += 1
        self._state = self._sample(rows, logits, state._replace(positions=state.positions + 1))
        self.num_decodes += 1
        self.num_decoded_rows += len(rows)
        self.peak_tokens = max(self.peak_tokens, sum(row.position for row in rows))

    def _sample(self, rows: list[Response], logits: Tensor, state: _State) -> _State:
        """Draws token number `counts` of each row and sends it to the host."""
        params = self._params
        noise = uniforms(state.uids, state.counts, seed=params.seed, step=params.step)
        tokens, logprobs = sample(
            logits,
            noise,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
        )
        if self._agree is not None:
            self._agree(tokens)
        self._arrivals.append(_send(rows, tokens, logprobs))
        return state._replace(tokens=tokens, counts=state.counts + 1)

    def _read(self, arrival: _Arrival) -> None:
        """Appends one token to each row and decides which rows have ended."""
        if arrival.event is not None:
            arrival.event.synchronize()
        if not arrival.logprobs.isfinite().all():
            raise RuntimeError("the engine's model gave log-probs that are not finite")
        pairs = zip(arrival.tokens.tolist(), arrival.logprobs.tolist(), strict=True)
        going = []
        for row, (token, logprob) in zip(arrival.rows, pairs, strict=True):
            if row.finish_reason is not None:
                continue
            row.response_ids.append(token)
            row.logprobs.append(logprob)
            if token in self._stop_ids:
                row.finish_reason = "stop"
            else:
                going.append(row)
        hits = self._stop_text.hits([row.response_ids for row in going], [r.stop for r in going])
        for row, hit in zip(going, hits, strict=True):
            if hit:
                row.finish_reason = "stop"
            elif len(row.response_ids) >= row.limit:
                row.finish_reason = "length"

    def _compact(self) -> None:
        """Drops the finished rows from the batch and their columns from the cache."""
        kept = [i for i, row in enumerate(self._running) if row.finish_reason is None]
        order = self.cache.keep(kept)
        ended = [row for row in self._running if row.finish_reason is not None]
        self._finished += ended
        self.num_tokens += sum(len(row.response_ids) for row in ended)
        self._running = [self._running[i] for i in order]
        index = to_device(torch.tensor(order, dtype=torch.int64), self._model.device)
        self._state = _State(*(tensor[index] for tensor in self._state))


def _by_prompt(rows: Sequence[Response]) -> list[list[Response]]:
    """Rows with the same prompt together, in the order of their first."""
    groups: dict[tuple[int, ...], list[Response]] = {}
    for row in rows:
        groups.setdefault(tuple(row.prompt_ids), []).append(row)
    return list(groups.values())


def longest_row(longest_prompt: int, params: SamplingParams, max_model_len: int) -> int:
    """Tokens of prompt and response together that the longest row can reach."""
    return min(longest_prompt + params.max_new_tokens, max_model_len)


def _send(rows: list[Response], tokens: Tensor, logprobs: Tensor) -> _Arrival:
    """Starts the copy of sampled tokens to the host without waiting for it."""
    if not tokens.is_cuda:
        return _Arrival(rows, tokens, logprobs, None)
    hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (tokens, logprobs)]
    for host, device in zip(hosts, (tokens, logprobs), strict=True):
        host.copy_(device, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return _Arrival(rows, hosts[0], hosts[1], event)
