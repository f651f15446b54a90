"""The embedded engine: generation in this process, by a Hugging Face model.

Owns the engine contract for it: weights from the reshard, time slices, memory, statistics. All
ranks of a rollout group (T = rollout_tp) call it with the same requests and take the same steps.

Communication: `wake` exchanges over the shard group, and agrees over the host group when it
verifies. With T > 1 every step of a generation reduces inside the model and broadcasts the tokens
over the rollout group, and each slice broadcasts its length over the rollout host group.
"""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppo.config import RolloutConfig
from ppo.engines.contract import (
    SLICE_S,
    Finished,
    Request,
    SamplingParams,
    check_requests,
)
from ppo.engines.embedded.generation import Generation, longest_row
from ppo.engines.embedded.model import CacheKind, LocalModel
from ppo.engines.embedded.stop_text import StopText
from ppo.engines.slices import StepCount
from ppo.model_shapes import CPU_SEQUENCES, MOST_SEQUENCES, AttentionShape, embedded_cache
from ppo.models.forward import num_ids_of
from sharding.mesh import Mesh
from sharding.progress import PROGRESS
from sharding.reshard.checksums import Checksums
from sharding.reshard.resharder import Resharder

_ALL = 10**9
"""room for everything"""


class TorchEngine:
    """An `Engine` (ppo/engines/contract.py) without processes of its own."""

    repeats = True

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        tokenizer: Any,
        rollout: RolloutConfig,
        *,
        cache: CacheKind = "own",
        trust_remote_code: bool = False,
    ):
        """Plan the reshard of `module`, which has its Hugging Face `config`. Collective.

        `tokenizer` decodes for stop texts; cache: what `choose_cache` says of the family.
        Raises ValueError where the model cannot be split over T ranks.
        """
        hf_config: Any = module.config
        self._mesh, self._tokenizer, self._rollout = mesh, tokenizer, rollout
        self.generates_together = mesh.dims.rollout_tp > 1
        held = MOST_SEQUENCES if mesh.device.type == "cuda" else CPU_SEQUENCES
        self.most_sequences = rollout.max_num_seqs or held
        self._shape = AttentionShape.of(hf_config)
        self._dtype = getattr(torch, rollout.dtype)
        self._model = LocalModel(
            hf_config,
            device=mesh.device,
            dtype=self._dtype,
            tp_mesh=mesh.rollout,
            num_ids=num_ids_of(module),
            buffers=dict(module.named_buffers()),
            cache=cache,
            trust_remote_code=trust_remote_code,
        )
        self._resharder = Resharder(
            module,
            mesh,
            style="hf",
            hf_config=hf_config,
            dtype=self._dtype,
            bucket_mib=rollout.reshard_bucket_mib,
        )
        self._generation: Generation | None = None
        self._awake, self._num_wakes = False, 0

    def start(self) -> Generator[None, None, None]:
        """Nothing has to start."""
        yield from ()

    def wake(
        self, loaded: Callable[[], None] = lambda: None
    ) -> Generator[None, None, dict[str, float]]:
        """Allocates the weights and fills them from the module, one bucket per slice."""
        assert not self._awake, "wake twice without release"
        due = self._rollout.verifies(self._num_wakes)
        sums = Checksums(self._resharder.layout) if due else None
        self._model.allocate()
        for bucket in self._resharder.buckets():
            self._model.fill(bucket)
            if sums is not None:
                sums.add(bucket)
            yield
        self._model.check_filled()
        metrics = self._resharder.stats.metrics()
        if sums is not None:
            yield from self._verify(sums)
        loaded()
        self._awake = True
        self._num_wakes += 1
        return metrics

    def begin(self, params: SamplingParams, *, longest_prompt: int, most: int) -> "Slices":
        """Every rank of the rollout group is told what has ended."""
        assert self._awake, "begin without wake"
        self._free_generation()
        generation = self._generation = Generation(
            self._model,
            params,
            longest_prompt=longest_prompt,
            max_rows=self._max_rows(longest_prompt, most, params),
            max_model_len=self._rollout.max_model_len,
            max_prefill_tokens=self._rollout.max_num_batched_tokens,
            stop_text=StopText(self._tokenizer),
            agree=self._broadcast_tokens if self._mesh.dims.rollout_tp > 1 else None,
            lag=1 if self._mesh.device.type == "cuda" else 0,
        )
        limits = {
            "max_model_len": self._rollout.max_model_len,
            "vocab_size": self._model.num_ids,
        }
        return Slices(generation, self._mesh, limits, close=self._free_generation)

    def release(self) -> None:
        """Frees weights and KV cache; harmless when nothing is held."""
        self._free_generation()
        self._model.free()
        self._awake = False
        if self._mesh.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Nothing outlives the process; gives the memory back."""
        self.release()

    def _verify(self, sums: Checksums) -> Generator[None, None, None]:
        """RuntimeError with both values where a parameter is not what was sent.

        All ranks send their weights once more when any of them needs the values.
        """
        wrong = sums.differing(self._model.parameters())
        wanted = torch.tensor(len(wrong))
        dist.all_reduce(wanted, dist.ReduceOp.MAX, group=self._mesh.host_group)
        if not wanted:
            return
        differences = []
        for bucket in self._resharder.buckets():
            differences += self._model.differences(bucket)
            yield
        if wrong:
            raise RuntimeError(
                f"weights of the engine are not the trainer's: {', '.join(wrong)}; "
                f"{'; '.join(differences[:8]) or 'no difference at the second look'}"
            )

    def _free_generation(self) -> None:
        if self._generation is not None:
            self._generation.cache.free()
            self._generation = None

    def _broadcast_tokens(self, tokens: Tensor) -> None:
        """Rank 0 of the group decides: kernels may round differently on another rank."""
        dist.broadcast(tokens, group=self._mesh.rollout_group, group_src=0)

    def _max_rows(self, longest_prompt: int, most: int, params: SamplingParams) -> int:
        """Rows of the KV cache: those that fit, at most max_num_seqs and the number of requests."""
        cuda = self._mesh.device.type == "cuda"
        free, total = 0, None
        if cuda:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self._mesh.device)
        longest = longest_row(longest_prompt, params, self._rollout.max_model_len)
        cache = embedded_cache(
            most,
            longest=longest,
            token_bytes=self._token_bytes(),
            state_bytes=self._shape.states.bytes_of(1),
            max_num_seqs=self._rollout.max_num_seqs,
            utilization=self._rollout.gpu_memory_utilization,
            device_bytes=total,
            free_bytes=free,
        )
        if not cuda or not most:
            return cache.sequences
        rows = torch.tensor(cache.sequences)
        dist.all_reduce(rows, dist.ReduceOp.MIN, group=self._mesh.rollout_host_group)
        if rows < 1:
            row_bytes = self._token_bytes() * longest + self._shape.states.bytes_of(1)
            raise RuntimeError(
                f"the KV cache of one row takes {row_bytes / 2**30:.2f} GiB, "
                f"and of {free / 2**30:.2f} GiB free rollout.gpu_memory_utilization = "
                f"{self._rollout.gpu_memory_utilization} leaves less"
            )
        return int(rows)

    def _token_bytes(self) -> int:
        """KV cache of one token on this rank."""
        return self._shape.kv_bytes_per_token(
            tp=self._mesh.dims.rollout_tp, itemsize=self._dtype.itemsize
        )


class Slices:
    """A generation of the embedded engine, advanced by slices of time."""

    def __init__(
        self,
        generation: Generation,
        mesh: Mesh,
        limits: dict[str, int],
        *,
        close: Callable[[], None],
    ) -> None:
        """limits: what `check_requests` holds requests against."""
        self._generation, self._mesh, self._limits, self._close = generation, mesh, limits, close
        self._slice, self._seconds = StepCount(mesh), 0.0

    @property
    def room(self) -> int:
        """Rows that are free, and some that may wait; the only engine takes all at once.

        Slices end by the clock: what is handed out between them decides which rows share a step,
        and so the last bits of log-probs, which would differ from run to run.
        """
        return _ALL if self._mesh.dims.rollout_dp == 1 else self._generation.room

    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests. Raises ValueError for one that does not fit."""
        check_requests(requests, **self._limits)
        self._generation.submit(requests)

    def advance(self, seconds: float = SLICE_S) -> list[Finished]:
        """One slice, at once over when nothing is left to do."""
        started = time.monotonic()
        for _ in range(self._slice.steps):
            if self._generation.done:
                break
            self._generation.step()
            PROGRESS.tick()
        else:
            self._slice.learn(time.monotonic() - started, seconds)
        self._seconds += time.monotonic() - started
        return self._generation.take_finished()

    def metrics(self) -> dict[str, float]:
        """rollout/* of what this engine has done."""
        generation = self._generation
        kv_tokens = generation.cache.rows * generation.cache.columns
        return {
            "rollout/tokens_per_s": generation.num_tokens / max(self._seconds, 1e-6),
            "rollout/num_running_mean": generation.num_decoded_rows
            / max(generation.num_decodes, 1),
            "rollout/cache_hit": generation.cache_hit,
            "rollout/kv_tokens": kv_tokens,
            "rollout/kv_util": generation.peak_tokens / max(kv_tokens, 1),
        }

    def close(self) -> None:
        """Drop what has not ended, and the KV cache."""
        self._close()
