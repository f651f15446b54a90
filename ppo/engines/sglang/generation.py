"""One generation of SGLang: requests described in its words, completions as they end, metrics.

Owns what is the same wherever the engine runs. Must not know weights or the other ranks.
"""

import time
from collections import Counter
from collections.abc import Sequence

from ppo.config import RolloutConfig
from ppo.engines.contract import (
    SLICE_S,
    Finished,
    Request,
    SamplingParams,
    check_requests,
)
from ppo.engines.sglang.args import sampling_parameters
from ppo.engines.sglang.executor import Described, Stream
from ppo.model_shapes import KVCache


class Served:
    """A `Generation` (ppo/engines/contract.py)."""

    def __init__(
        self,
        stream: Stream | None,
        rollout: RolloutConfig,
        params: SamplingParams,
        *,
        vocab_size: int,
        cache: KVCache,
        seeded: bool,
    ) -> None:
        """
        Args:
            stream: None on ranks that have no part in it.
            seeded: every request has noise of its own.
        """
        self._stream, self._rollout, self._params = stream, rollout, params
        self._vocab_size, self._cache, self._seeded = vocab_size, cache, seeded
        self._unfinished = self._num_requests = self._num_tokens = 0
        self._started = time.monotonic()

    @property
    def room(self) -> int:
        """Requests that can run, and a quarter more that may wait for the next ones."""
        runs = self._cache.sequences
        return max(0, runs + max(1, runs // 4) - self._unfinished)

    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests; the first of a prompt comes first, so that its prefix is cached for the
        others. Raises ValueError for one that does not fit."""
        rollout = self._rollout
        check_requests(requests, max_model_len=rollout.max_model_len, vocab_size=self._vocab_size)
        if self._stream is None or not requests:
            return
        seen: Counter[tuple[int, ...]] = Counter()
        ranks = []
        for request in requests:
            prompt = tuple(request.prompt_ids)
            ranks.append(seen[prompt])
            seen[prompt] += 1
        order = sorted(range(len(requests)), key=ranks.__getitem__)
        self._stream.submit([self._described(requests[i]) for i in order])
        self._unfinished += len(requests)
        self._num_requests += len(requests)

    def _described(self, request: Request) -> Described:
        sampling = sampling_parameters(
            request, self._params, max_model_len=self._rollout.max_model_len, seeded=self._seeded
        )
        return request.uid, list(request.prompt_ids), sampling

    def advance(self, seconds: float = SLICE_S) -> list[Finished]:
        """Work, or wait, for so long, or until all has ended.

        Raises EngineError when the engine ends, or makes no progress for too long.
        """
        if self._stream is None or not self._unfinished:
            return []
        ended = self._stream.advance(seconds, self._unfinished)
        self._unfinished -= len(ended)
        self._num_tokens += sum(len(one.completion.response_ids) for one in ended)
        return ended

    def metrics(self) -> dict[str, float]:
        """rollout/* of this generation, which ends with this.

        Where requests run whose completions nobody wants any more, `close` drops them: to wait for
        them would take as long as they do.
        """
        if self._stream is None:
            return {}
        seconds = time.monotonic() - self._started
        known = {
            "rollout/tokens_per_s": self._num_tokens / seconds,
            "rollout/kv_tokens": float(self._cache.tokens),
        }
        if self._unfinished:
            return known
        sums = self._stream.finish()
        if not self._num_requests:
            return {}
        # Too short to be sampled: all requests ran at once.
        running = min(self._num_requests, self._cache.sequences)
        tokens = sums.prompt_tokens + self._num_tokens
        loads = sums.loads or [(running, min(1.0, tokens / self._cache.tokens))]
        return known | {
            "rollout/kv_util": max(used for _, used in loads),
            "rollout/num_running_mean": sum(count for count, _ in loads) / len(loads),
            "rollout/cache_hit": sums.cached_tokens / sums.prompt_tokens,
        }

    def close(self) -> None:
        """Drop what has not ended."""
        if self._stream is not None:
            self._stream.drop()
