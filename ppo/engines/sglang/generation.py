"""One generation of SGLang: requests go to the host as they come, completions come as they end.

Owns the conversation with the host about it. Must not know weights or the other ranks.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ppo.config import RolloutConfig
from ppo.engines.contract import (
    SLICE_S,
    Completion,
    Finished,
    Request,
    SamplingParams,
    check_requests,
)
from ppo.engines.sglang import args as sglang_args
from ppo.engines.sglang.process import POLL_S, HostProcess
from sharding.progress import PROGRESS


class Served:
    """A `Generation` (ppo/engines/contract.py) of the host, which the leader alone talks to."""

    def __init__(
        self,
        host: HostProcess | None,
        rollout: RolloutConfig,
        params: SamplingParams,
        *,
        vocab_size: int,
        kv_tokens: int,
        timeout_s: float,
        seeded: bool,
    ) -> None:
        """
        Args:
            host: None on ranks that lead no engine.
            timeout_s: without progress, after which the engine counts as hung.
            seeded: every request has noise of its own.
        """
        self._host, self._rollout, self._params = host, rollout, params
        self._vocab_size, self._kv_tokens, self._seeded = vocab_size, kv_tokens, seeded
        self._timeout_s = timeout_s
        self._unfinished = self._num_requests = self._num_tokens = 0
        self._started = self._heard = time.monotonic()
        self._marker: Any = None
        self._call = None if host is None else host.submit("generate")

    @property
    def room(self) -> int:
        """Requests that can run, and a quarter more that may wait for the next ones."""
        runs = self._rollout.max_num_seqs
        return max(0, runs + max(1, runs // 4) - self._unfinished)

    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests; the first of a prompt comes first, so that its prefix is cached for the
        others. Raises ValueError for one that does not fit."""
        rollout = self._rollout
        check_requests(requests, max_model_len=rollout.max_model_len, vocab_size=self._vocab_size)
        if self._host is None or not requests:
            return
        seen: Counter[tuple[int, ...]] = Counter()
        ranks = []
        for request in requests:
            prompt = tuple(request.prompt_ids)
            ranks.append(seen[prompt])
            seen[prompt] += 1
        order = sorted(range(len(requests)), key=ranks.__getitem__)
        more = [self._described(requests[i]) for i in order]
        self._host.submit("more", call=self._call, requests=more)
        if not self._unfinished:
            self._heard = time.monotonic()  # an engine that had nothing to do had nothing to tell
        self._unfinished += len(requests)
        self._num_requests += len(requests)

    def _described(self, request: Request) -> tuple[int, list[int], dict[str, Any]]:
        sampling = sglang_args.sampling_parameters(
            request, self._params, max_model_len=self._rollout.max_model_len, seeded=self._seeded
        )
        return request.uid, list(request.prompt_ids), sampling

    def advance(self, seconds: float = SLICE_S) -> list[Finished]:
        """Wait for so long, or until all has ended.

        Raises EngineError when the host ends, or reports no progress for too long.
        """
        ended: list[Finished] = []
        if self._host is None or self._call is None:
            return ended
        deadline = time.monotonic() + seconds
        while self._unfinished and time.monotonic() < deadline:
            told = self._host.listen(self._call, "generate", min(seconds, POLL_S))
            if told is not None:
                marker, news = told
                if marker != self._marker or news:
                    self._marker, self._heard = marker, time.monotonic()
                    PROGRESS.tick()
                ended += self._take(news)
        if self._unfinished and time.monotonic() - self._heard > self._timeout_s:
            raise self._host.hung("generate", self._timeout_s)
        return ended

    def _take(self, news: dict[str, Any]) -> list[Finished]:
        found = [
            Finished(uid, Completion(ids, logprobs, reason))
            for uid, ids, logprobs, reason in news.get("finished", [])
        ]
        self._unfinished -= len(found)
        self._num_tokens += sum(len(f.completion.response_ids) for f in found)
        return found

    def metrics(self) -> dict[str, float]:
        """rollout/* of this generation, which ends with this."""
        if self._host is None or self._call is None:
            return {}
        seconds = time.monotonic() - self._started
        call, self._call = self._call, None
        self._host.submit("more", call=call, requests=[])
        reply = self._host.wait(call, "generate", timeout_s=self._timeout_s)
        if not self._num_requests:
            return {}
        # Too short to be sampled: all requests ran at once.
        running = min(self._num_requests, self._rollout.max_num_seqs)
        tokens = reply["prompt_tokens"] + self._num_tokens
        loads = reply["loads"] or [(running, min(1.0, tokens / self._kv_tokens))]
        return {
            "rollout/tokens_per_s": self._num_tokens / seconds,
            "rollout/kv_tokens": float(self._kv_tokens),
            "rollout/kv_util": max(used for _, used in loads),
            "rollout/num_running_mean": sum(count for count, _ in loads) / len(loads),
            "rollout/cache_hit": reply["cached_tokens"] / reply["prompt_tokens"],
        }

    def close(self) -> None:
        """Have the engine drop what has not ended; the call is still answered."""
        if self._host is not None and self._call is not None and not self._host.ended:
            self._host.abort(self._call)
            self._call = None
