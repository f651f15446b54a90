"""SGLang in a process of its own, as a rank of the trainer sees it: the leader asks the host.

Owns the conversation with the host about weights, memory and one generation. Must not know the
order of calls, or what an instruction to the loader says.

Communication: a payload of weights is one gather and one barrier over the rollout group's host
group; the leader submits the list.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppo.engines.contract import Completion, Finished
from ppo.engines.sglang.executor import Described, Facts, Patience, Sums
from ppo.engines.sglang.handles import answer_in, serialize, shareable_memory
from ppo.engines.sglang.process import POLL_S, HostProcess
from sharding.mesh import Mesh
from sharding.progress import PROGRESS

RESULT_BYTES = 4096


class HostExecutor:
    """An `Executor` (ppo/engines/sglang/executor.py): a host process of the leader.

    What a generation returns is told to the leader alone.
    """

    generates_together = False  # the engine's processes do, not the trainer's

    def __init__(
        self, settings: dict[str, Any], mesh: Mesh, *, log_dir: Path, patience: Patience
    ) -> None:
        """Start the host, without waiting for it. `settings` are those of `HostProcess`."""
        self._mesh, self._patience = mesh, patience
        self.host: HostProcess | None = None
        if mesh.rollout_tp_rank == 0:
            log_dir.mkdir(parents=True, exist_ok=True)
            log = log_dir / f"engine_{mesh.rank:04d}.log"
            self.host = HostProcess(settings, rank=mesh.rank, log=log)

    def start(self) -> Generator[None, None, Facts | None]:
        """Wait on the leader until the engine is up."""
        if self.host is None:
            return None
        info = yield from self.host.collect(0, "start", timeout_s=self._patience.start)
        return Facts(info["kv_tokens"], info["version"])

    def release(self, tags: Sequence[str]) -> None:
        """Nothing where the engine has died in a generation."""
        if not self.ended:
            self.ask("release", tags=list(tags))

    def resume(self, tags: Sequence[str]) -> None:
        """By the leader."""
        self.ask("resume", tags=list(tags))

    def flush(self) -> None:
        """By the leader."""
        self.ask("flush")

    def ask(self, verb: str, **arguments: Any) -> Any:
        """Have the host do something and wait for it; on a rank that has none, nothing."""
        if self.host is None:
            return None
        return self.host.ask(verb, timeout_s=self._patience.call, **arguments)

    @contextmanager
    def update(self) -> Iterator[HostUpdate]:
        """What is allocated meanwhile can be opened by another process."""
        with shareable_memory(self._mesh.device):
            yield HostUpdate(self, self._mesh)

    def begin(self, seed: int) -> HostStream | None:
        """On the leader. SGLang's processes go on with the noise that they have begun with."""
        return None if self.host is None else HostStream(self.host, self._patience.generate)

    @property
    def ended(self) -> bool:
        """Whether the host has been found dead, or been closed."""
        return self.host is not None and self.host.ended

    def close(self) -> None:
        """End the engine's processes."""
        if self.host is not None:
            self.host.close()


class HostUpdate:
    """An `Update`: every rank sends handles by way of the leader, who asks until that fails."""

    def __init__(self, executor: HostExecutor, mesh: Mesh) -> None:
        self._executor, self._mesh, self._failed = executor, mesh, False
        self._result = torch.zeros(RESULT_BYTES, dtype=torch.uint8, device=mesh.device)

    def begin(self) -> None:
        """Open SGLang's session."""
        self._ask("begin_update")

    def send(self, instruction: dict[str, Any], flat: Tensor) -> dict[str, Any] | None:
        """Collective over the rollout group; the engine has read everybody's payload at its end."""
        result = self._result
        shared = flat if instruction["entries"] else result  # nothing to share has no handle
        payload = serialize([(json.dumps(instruction), shared), ("result", result)])
        payloads, had_failed = self._gathered(payload), self._failed
        try:
            self._ask("update", payloads=payloads)
        finally:
            dist.barrier(self._mesh.rollout_host_group)
        answer = answer_in(result)
        result.zero_()
        if answer is None and not had_failed:
            self._failed = True
            raise RuntimeError("SGLang's worker has not answered into this rank's memory")
        return answer

    def end(self) -> None:
        """Close SGLang's session."""
        self._ask("end_update")

    def _ask(self, verb: str, **arguments: Any) -> None:
        if self._failed:
            return
        try:
            self._executor.ask(verb, **arguments)
        except RuntimeError:
            self._failed = True
            raise

    def _gathered(self, payload: bytes) -> list[bytes]:
        """Payloads of the group in tensor-parallel order, on its leader."""
        leads = self._mesh.rollout_tp_rank == 0
        payloads = [b""] * self._mesh.dims.rollout_tp if leads else None
        dist.gather_object(payload, payloads, group=self._mesh.rollout_host_group, group_dst=0)
        return payloads or []


class HostStream:
    """A `Stream`: requests go to the host as they come, completions come as they end."""

    def __init__(self, host: HostProcess, timeout_s: float) -> None:
        """timeout_s: without progress, after which the engine counts as hung."""
        self._host, self._timeout_s = host, timeout_s
        self._heard, self._marker = time.monotonic(), None
        self._idle = True
        self._call: int | None = host.submit("generate")

    def submit(self, requests: Sequence[Described]) -> None:
        """Add requests."""
        self._host.submit("more", call=self._call, requests=list(requests))
        if self._idle:
            self._heard = time.monotonic()  # an engine that had nothing to do had nothing to tell

    def advance(self, seconds: float, unfinished: int) -> list[Finished]:
        """Wait. Raises EngineError when the host ends, or reports no progress for too long."""
        ended: list[Finished] = []
        deadline = time.monotonic() + seconds
        assert self._call is not None
        while len(ended) < unfinished and time.monotonic() < deadline:
            told = self._host.listen(self._call, "generate", min(seconds, POLL_S))
            if told is not None:
                marker, news = told
                if marker != self._marker or news:
                    self._marker, self._heard = marker, time.monotonic()
                    PROGRESS.tick()
                ended += [
                    Finished(uid, Completion(ids, logprobs, reason))
                    for uid, ids, logprobs, reason in news.get("finished", [])
                ]
        self._idle = len(ended) == unfinished
        if not self._idle and time.monotonic() - self._heard > self._timeout_s:
            raise self._host.hung("generate", self._timeout_s)
        return ended

    def finish(self) -> Sums:
        """Say that no more will come."""
        assert self._call is not None
        call, self._call = self._call, None
        self._host.submit("more", call=call, requests=[])
        reply = self._host.wait(call, "generate", timeout_s=self._timeout_s)
        return Sums(reply["prompt_tokens"], reply["cached_tokens"], reply["loads"])

    def drop(self) -> None:
        """The call is still answered."""
        if self._call is not None and not self._host.ended:
            self._host.abort(self._call)
            self._call = None
