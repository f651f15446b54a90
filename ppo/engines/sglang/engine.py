"""SGLang behind ppo/rollout/: start, sync, generate, release and resume in the only legal orders.

Owns one engine per rollout group, wherever it runs (ppo/engines/sglang/executor.py). Must not know
prompts, rewards or the trainer's steps.

Communication: `wake` and `release` are collective over all ranks, which agree at each step over the
host group, so that an engine that fails fails on every rank with the same error; they never give
control back in between. `start` and `generate` are made to be driven; with a host process they wait
on the leader only.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Generator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ppo.config import Config
from ppo.engines.contract import SamplingParams
from ppo.engines.sglang import args as sglang_args
from ppo.engines.sglang.executor import EngineError, Executor, Patience
from ppo.engines.sglang.generation import Served
from ppo.engines.sglang.handles import fit_shared_memory
from ppo.engines.sglang.host_executor import HostExecutor
from ppo.engines.sglang.stall import end_process
from ppo.engines.sglang.sync import WeightSync
from ppo.models.forward import num_ids_of
from sharding.agree import raise_everywhere, together
from sharding.mesh import Mesh
from sharding.reshard.shards import named_shards

logger = logging.getLogger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"
GIB = 1024**3
SHARE_OF_HANG = 0.9
START_TIMEOUT_S = 900.0  # imports, graph capture: nothing reports progress meanwhile
_END = object()
T = TypeVar("T")


class EngineState(Enum):
    """What the engine's memory holds."""

    STARTING = "starting"
    RELEASED = "released"
    STALE = "stale"  # mapped, but the weights are garbage or those of an earlier sync
    AWAKE = "awake"
    CLOSED = "closed"


class SGLangEngine:
    """The engine of one rollout group, as each of its ranks sees it."""

    repeats = False  # which requests share a step follows from the clock

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        module: nn.Module,
        *,
        model_path: str,
        log_dir: Path,
        give_up: Callable[[str], object] = end_process,
    ) -> None:
        """Build the engine, or start its processes without waiting for them. Collective over all
        ranks.

        ``module`` is the FSDP2-sharded actor; ``model_path`` a Hugging Face folder with its config.
        ``give_up`` ends this process, told why: an engine in it may hang where nothing can be
        raised.
        Raises ValueError when the KV cache cannot hold one sequence or the engine cannot see its
        devices.
        """
        self.config, self.mesh, self.rollout = config, mesh, config.rollout
        self.is_leader = mesh.rollout_tp_rank == 0
        self._num_syncs, self._num_ids = 0, num_ids_of(module)
        self._state = EngineState.STARTING
        self._memory = sglang_args.plan_memory(
            self.rollout,
            module.config,
            parameters=sum(parameter.numel() for _, parameter in named_shards(module)),
            device_bytes=sglang_args.device_bytes(mesh.device, mesh.dims.ranks_per_node),
            on_cpu=mesh.device.type == "cpu",
        )
        self.most_sequences = self._memory.cache.sequences
        on_cuda = mesh.device.type == "cuda"
        self.process = self.rollout.engine_process_kind(cuda=on_cuda)
        settings = sglang_args.settings(
            config,
            mesh.dims,
            rank=mesh.rank,
            device=mesh.device,
            process=self.process,
            cache=self._memory.cache,
            model_path=model_path,
            vocabulary=sglang_args.vocabulary_override(module.config, self._num_ids),
        )
        bucket_mib: float = self.rollout.reshard_bucket_mib
        if self.process == "host":
            bucket_mib = fit_shared_memory(bucket_mib, mesh)
        self._sync = WeightSync(
            module,
            mesh,
            num_ids=self._num_ids,
            dtype=getattr(torch, self.rollout.dtype),
            bucket_mib=bucket_mib,
        )
        if not on_cuda:
            logger.info("SGLang on a CPU: functional, not fast (launch/cpu_engine/README.md)")
        # its workers measure what is free on the devices of all ranks of the group
        self._agree(self._give_memory_back)
        self._open(settings, log_dir, give_up)
        self.generates_together = self.executor.generates_together

    def _open(
        self, settings: dict[str, Any], log_dir: Path, give_up: Callable[[str], object]
    ) -> None:
        options = {"log_dir": log_dir, "patience": self._patience()}
        if self.process == "host":
            self.executor: Executor = HostExecutor(settings, self.mesh, **options)
            return
        from ppo.engines.sglang.rank_executor import RankExecutor

        def build() -> None:
            self.executor = RankExecutor(settings, self.mesh, **options, give_up=give_up)

        self._agree(build)

    def start(self) -> Generator[None, None, None]:
        """Wait on the leaders until the engine is up; check its KV cache, release its memory."""
        if self._state is not EngineState.STARTING:
            return
        facts = yield from self.executor.start()
        if facts is not None:
            if facts.kv_tokens < self._memory.cache.tokens:
                raise EngineError(
                    f"rank {self.mesh.rank}: rollout.gpu_memory_utilization="
                    f"{self.rollout.gpu_memory_utilization:g} asks for a KV cache of "
                    f"{self._memory.cache.tokens} tokens, SGLang found room for "
                    f"{facts.kv_tokens}: lower it, or offload the trainer's parameters and "
                    "optimizer"
                )
            logger.info("SGLang %s: KV cache of %d tokens", facts.version, facts.kv_tokens)
        if self.rollout.free_cache_engine:
            self.executor.release([KV_CACHE, WEIGHTS])
        self._state = EngineState.RELEASED if self.rollout.free_cache_engine else EngineState.STALE

    def wake(
        self, loaded: Callable[[], None] = lambda: None
    ) -> Generator[None, None, dict[str, float]]:
        """Map the weights, load and verify them, map the KV cache.

        Every rank yields at the same times.
        """
        starting = self.start()
        while not all(self._agree(lambda: next(starting, _END) is _END)):
            yield
        assert self._state in (EngineState.RELEASED, EngineState.STALE), (
            f"wake in state {self._state}"
        )
        self._resume(WEIGHTS, self._memory.weight_bytes)
        metrics = self._load()
        loaded()
        if not self.rollout.free_cache_engine:  # release has emptied the prefix cache otherwise
            self._agree(self.executor.flush)
        self._resume(KV_CACHE, self._memory.cache.bytes)
        self._state = EngineState.AWAKE
        yield
        return metrics

    def _load(self) -> dict[str, float]:
        """One sync; checksums and, where they differ, a second pass that names both values. A model
        of the generic path has the second pass alone, which names the parameters."""
        due = self.rollout.verifies(self._num_syncs)
        self._raise(self._sync.run(self.executor.update(), action="load", checked=due))
        metrics = self._sync.stats()
        self._num_syncs += 1
        if due and (self._sync.style == "full" or any(self._agree(lambda: self._sync.differing))):
            self._raise(self._sync.run(self.executor.update(), action="verify"))
            self._raise([f"checksums differ: {name}" for name in self._sync.differing])
        if due:
            logger.info("the weights of SGLang and of the trainer are equal")
        return metrics

    def _resume(self, tag: str, num_bytes: int) -> None:
        """Map released memory again, when every rank of the group has emptied its own cache."""
        if self._state is not EngineState.RELEASED:
            return
        self._agree(lambda: self._make_room(tag, num_bytes))
        self._agree(lambda: self.executor.resume([tag]))

    def _make_room(self, tag: str, num_bytes: int) -> None:
        """Give cached memory back; an engine that runs out of memory dies without a word."""
        if self.mesh.device.type != "cuda":
            return
        self._give_memory_back()
        free, _ = torch.cuda.mem_get_info()
        if free < num_bytes:
            raise EngineError(
                f"the engine's {tag} need {num_bytes / GIB:.1f} GiB, {free / GIB:.1f} GiB are free "
                f"(the trainer holds {torch.cuda.memory_allocated() / GIB:.1f} GiB): lower "
                "rollout.gpu_memory_utilization, or offload parameters and optimizer"
            )

    def _give_memory_back(self) -> None:
        """What torch's allocator holds and nobody uses."""
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def begin(self, params: SamplingParams, *, longest_prompt: int, most: int) -> Served:
        """With a host the leader alone is told what has ended, otherwise every rank."""
        assert self._state is EngineState.AWAKE, f"begin in state {self._state}"
        if params.stop and not self.rollout.knows_stop_texts:
            raise ValueError("texts that end a response have to be in rollout.stop from the start")
        return Served(
            self.executor.begin(hash((params.seed, params.step, self.mesh.rollout_dp_rank))),
            self.rollout,
            params,
            vocab_size=self._num_ids,
            cache=self._memory.cache,
            seeded=self.config.trainer.deterministic and self.mesh.device.type == "cuda",
        )

    def release(self) -> None:
        """Give the memory back when the engine is idle. Collective.

        Does nothing after a failed wake, and nothing to an engine that has died in a generation.
        """
        if self._state is not EngineState.AWAKE:
            return
        self._state = EngineState.STALE
        if self.rollout.free_cache_engine:
            self._agree(lambda: self.executor.release([KV_CACHE, WEIGHTS]))
            self._state = EngineState.RELEASED

    def close(self) -> None:
        """End the engine and its processes. Not collective."""
        self._state = EngineState.CLOSED
        self.executor.close()

    def _patience(self) -> Patience:
        """The engine's own error, with the end of its log, comes before the run's that it hangs."""
        timeout_s, trainer = self.rollout.timeout_s, self.config.trainer
        hang = SHARE_OF_HANG * trainer.hang_timeout_s or math.inf
        # Short of the other ranks' patience, which wait in a collective meanwhile.
        call = min(timeout_s, trainer.comm_timeout_s / 2)
        return Patience(max(timeout_s, START_TIMEOUT_S), min(call, hang), min(timeout_s, hang))

    def _agree(self, step: Callable[[], T]) -> list[T]:
        """What a step returns on every rank; an error on one is raised on all. Collective."""
        return together(step, self.mesh.host_group, EngineError)

    def _raise(self, problems: Sequence[str]) -> None:
        """Raise on every rank what any has found. Collective."""
        raise_everywhere(problems, self.mesh.host_group, EngineError)
