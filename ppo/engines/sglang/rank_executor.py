"""SGLang in the ranks of the trainer: each is one tensor-parallel rank of its group's engine.

Owns when the process is SGLang's, the watch over it, and the model that weights are copied into.
Must not know the order of calls, or what an instruction to the loader says.

Communication: the ranks of a rollout group make the same calls with the same requests, and meet in
SGLang's own collectives; they give control back after the same steps.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo.engines.contract import Finished
from ppo.engines.sglang.executor import Described, EngineError, Facts, Patience, Sums
from ppo.engines.sglang.loader import follow
from ppo.engines.sglang.memory import (
    KV_CACHE,
    MemorySaver,
    Storages,
    use_memory_saver_in_process,
)
from ppo.engines.sglang.own_state import OwnState
from ppo.engines.sglang.scheduler import Steps, start_scheduler
from ppo.engines.sglang.stall import StallWatch
from ppo.engines.slices import StepCount
from sharding.mesh import Mesh
from sharding.progress import PROGRESS

VARIABLES = {
    # the queue of tensor-parallel ranks would start a process for its shared memory; nobody uses it
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",
    # torch_memory_saver refuses expandable segments, which its memory pools never lie in
    "PYTORCH_CUDA_ALLOC_CONF": None,
}
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RankExecutor:
    """An `Executor` (ppo/engines/sglang/executor.py) without any process but the ranks."""

    def __init__(
        self,
        settings: dict[str, Any],
        mesh: Mesh,
        *,
        log_dir: Path,
        patience: Patience,
        give_up: Callable[[str], object],
    ) -> None:
        """Build the engine. Collective over its rollout group.

        Args:
            settings: as for the host process.
            give_up: ends this process, told why; called when the engine makes no progress.
        """
        self._mesh, self._patience = mesh, patience
        self.on_cuda = mesh.device.type == "cuda"
        self.generates_together = mesh.dims.rollout_tp > 1
        log_dir.mkdir(parents=True, exist_ok=True)
        log = log_dir / f"engine_{mesh.rank:04d}.log"
        self._log = _log_into(log)
        self._watch = StallWatch(rank=mesh.rank, log=log, give_up=give_up)
        self._state = OwnState({**settings["environment"], **VARIABLES}, settings["first_on_path"])
        self._steps: Steps | None = None
        self._running: RankStream | None = None
        try:
            with self.lent("start", patience.start):
                self._build(settings["engine"])
        except BaseException:
            self.close()
            raise

    def _build(self, arguments: dict[str, Any]) -> None:
        mesh = self._mesh
        if arguments.get("enable_memory_saver"):
            use_memory_saver_in_process()
        self._state.make_world(
            "nccl" if self.on_cuda else "gloo",
            rank=mesh.rollout_tp_rank,
            size=mesh.dims.rollout_tp,
            name=str(mesh.rollout_dp_rank),
        )
        gpu_id = torch.cuda.current_device() if self.on_cuda else mesh.rollout_tp_rank
        scheduler = start_scheduler(arguments, tp_rank=mesh.rollout_tp_rank, gpu_id=gpu_id)
        self._steps = Steps(scheduler, self._progress)
        self.model: torch.nn.Module = scheduler.tp_worker.model_runner.model
        if arguments.get("enable_memory_saver"):
            self._memory: MemorySaver | Storages = MemorySaver(scheduler.weight_updater)
        else:
            pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
            self._memory = Storages(self.model, pool)

    @property
    def steps(self) -> Steps:
        """The scheduler's."""
        assert self._steps is not None, "the engine is closed"
        return self._steps

    @contextmanager
    def lent(self, what: str, limit_s: float | None = None) -> Iterator[None]:
        """Around all that is called of SGLang; limit_s without progress end this process."""
        limit_s = self._patience.call if limit_s is None else limit_s
        with self._state.lent(), self._watch.over(what, limit_s):
            warnings.showwarning = _log_warning  # until the trainer has its own again
            yield

    def _progress(self) -> None:
        PROGRESS.tick()
        self._watch.beat()

    def start(self) -> Generator[None, None, Facts | None]:
        """It is up."""
        import sglang

        yield from ()
        return Facts(self.steps.scheduler.max_total_num_tokens, sglang.__version__)

    def release(self, tags: Sequence[str]) -> None:
        """Nothing is on its way any more: `RankStream.drop` has seen to it."""
        with self.lent("release"):
            if KV_CACHE in tags:
                self.steps.flush()
            self._memory.release(tags)

    def resume(self, tags: Sequence[str]) -> None:
        """Collective over the rollout group with a memory saver."""
        with self.lent("resume"):
            self._memory.resume(tags)

    def flush(self) -> None:
        """Without freeing memory of the trainer's."""
        with self.lent("flush"):
            self.steps.flush()

    @contextmanager
    def update(self) -> Iterator[RankUpdate]:
        """Payloads go straight into the parameters."""
        yield RankUpdate(self)

    def begin(self, seed: int) -> RankStream:
        """Every rank of the group holds the same requests and hears of the same completions."""
        assert self._running is None, "a generation before this one has not ended"
        with self.lent("begin"):
            self._state.seed(seed)
        self._running = RankStream(self, self._mesh, self._patience.generate)
        return self._running

    def ended_generation(self) -> None:
        """Another one may begin."""
        self._running = None

    def close(self) -> None:
        """Give SGLang's groups and its context back; another engine can be built after it."""
        self._watch.close()
        if self._steps is not None:
            self._steps = None
            del self.model, self._memory
            with self._state.lent():
                _forget_groups()
        self._state.end_world()
        _log_nowhere(self._log)


def _forget_groups() -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import reset_context

    parallel_state.destroy_model_parallel()
    for name in ("_WORLD", "_SELF_PP"):
        group = getattr(parallel_state, name, None)
        if group is not None:
            group.destroy()
            setattr(parallel_state, name, None)
    reset_context()


def _log_into(path: Path) -> logging.Handler:
    """SGLang's own log lines go into a file, as those of a host process do."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    log = logging.getLogger("sglang")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    return handler


def _log_warning(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
    text = warnings.formatwarning(message, category, filename, lineno)
    logging.getLogger("sglang").warning("%s", text.rstrip())


def _log_nowhere(handler: logging.Handler) -> None:
    logging.getLogger("sglang").removeHandler(handler)
    handler.close()


class RankUpdate:
    """An `Update` of the model in this process."""

    def __init__(self, executor: RankExecutor) -> None:
        self._executor = executor
        self._updater = executor.steps.scheduler.weight_updater

    def begin(self) -> None:
        """Open SGLang's session. Collective over the rollout group, as `end` is."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        with self._executor.lent("begin_update"):
            _check(self._updater.begin_weight_update(BeginWeightUpdateReqInput()))

    def send(self, instruction: dict[str, Any], flat: Tensor) -> dict[str, Any]:
        """The loader runs here and now."""
        with self._executor.lent("update"):
            return follow(self._executor.model, instruction, flat)

    def end(self) -> None:
        """Close SGLang's session: it does what follows a load to the weights of some layers."""
        import msgspec
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        updater = self._updater
        with self._executor.lent("end_update"):
            if self._executor.on_cuda:
                torch.cuda.synchronize()  # SGLang reads the weights on streams of its own
            updater._session = msgspec.structs.replace(updater._session, loaded_weights=True)
            _check(updater.end_weight_update(EndWeightUpdateReqInput()))


def _check(answer: Any) -> None:
    if not answer.success:
        raise RuntimeError(f"SGLang refused a weight update: {answer.message}")


class RankStream:
    """A `Stream` that works while it is advanced."""

    def __init__(self, executor: RankExecutor, mesh: Mesh, timeout_s: float) -> None:
        self._executor, self._steps = executor, executor.steps
        self._slice, self._timeout_s = StepCount(mesh), timeout_s
        self._loads: list[tuple[int, float]] = []
        self._steps.prompt_tokens = self._steps.cached_tokens = 0
        self._forwards, self._heard = -1, time.monotonic()
        self._over = False

    def submit(self, requests: Sequence[Described]) -> None:
        """Add requests."""
        self._forwards = -1
        with self._executor.lent("submit"):
            self._steps.submit(requests)

    def advance(self, seconds: float, unfinished: int) -> list[Finished]:
        """One slice. What is raised inside of SGLang comes out here, with its traceback."""
        started = time.monotonic()
        with self._executor.lent("generate", self._timeout_s):
            ended = self._steps.run(self._slice.steps, unfinished)
            if len(ended) < unfinished:
                self._loads.append(self._steps.load())
        if len(ended) < unfinished:
            self._slice.learn(time.monotonic() - started, seconds)
            self._check_progress()
        return ended

    def _check_progress(self) -> None:
        """Steps that compute nothing: requests wait that will never run."""
        forwards = self._steps.scheduler.forward_ct
        if forwards != self._forwards:
            self._forwards, self._heard = forwards, time.monotonic()
        elif time.monotonic() - self._heard > self._timeout_s:
            raise EngineError(f"the SGLang engine has computed nothing for {self._timeout_s:g} s")

    def finish(self) -> Sums:
        """Every slot of the KV cache that prefixes do not hold is free then."""
        with self._executor.lent("finish"):
            self._steps.settle()
        self._leave()
        return Sums(self._steps.prompt_tokens, self._steps.cached_tokens, self._loads)

    def drop(self) -> None:
        """Whatever has happened: the engine is as if it had begun nothing."""
        if not self._over:
            self._leave()
            with self._executor.lent("reset"):
                self._steps.reset()

    def _leave(self) -> None:
        self._over = True
        self._executor.ended_generation()
