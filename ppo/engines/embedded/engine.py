"""The embedded engine: generation in this process, by a Hugging Face model.

Owns the engine contract for it: weights from the reshard, time slices, memory, statistics. All
ranks of a rollout group (T = rollout_tp) call it with the same requests and take the same steps.

Communication: `wake` exchanges over the shard group, and agrees over the host group when it
verifies. With T > 1 every step of `generate` reduces inside the model and broadcasts the tokens
over the rollout group, and each slice broadcasts its length over the rollout host group.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from ppo.engines.contract import Completion, Request, SamplingParams, check_requests
from ppo.engines.embedded.generation import Generation, longest_row
from ppo.engines.embedded.model import LocalModel
from ppo.engines.embedded.stop_text import StopText
from ppo.model_shapes import AttentionShape
from sharding.mesh import Mesh
from sharding.reshard.checksums import Checksums
from sharding.reshard.resharder import Resharder

_SLICE_S = 0.5


class TorchEngine:
    """An `Engine` (ppo/engines/contract.py) without processes of its own.

    ValueError where the model cannot be cached, or split over T ranks.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        mesh: Mesh,
        tokenizer: Any,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        reshard_bucket_mib: float,
        gpu_memory_utilization: float,
        verify_weights: int = 0,
        trust_remote_code: bool = False,
    ):
        """
        Args:
            tokenizer: decodes for stop texts.
            max_num_batched_tokens: limit of one padded prefill.
            gpu_memory_utilization: share of the device up to which the KV cache may fill it.
            verify_weights: checks every so many wakes, from the first, that the weights arrived
                as they were sent; 0 = never.
        """
        self._hf_config, self._mesh, self._tokenizer = hf_config, mesh, tokenizer
        self._dtype, self._bucket_mib = dtype, reshard_bucket_mib
        self._max_model_len, self._max_num_seqs = max_model_len, max_num_seqs
        self._max_prefill_tokens = max_num_batched_tokens
        self._memory_utilization, self._verify_every = gpu_memory_utilization, verify_weights
        self._model = LocalModel(
            hf_config,
            device=mesh.device,
            dtype=dtype,
            tp_mesh=mesh.rollout,
            trust_remote_code=trust_remote_code,
        )
        self._resharder: tuple[nn.Module, Resharder] | None = None
        self._generation: Generation | None = None
        self._awake, self._num_wakes = False, 0
        self.completions: list[Completion] = []
        self.stats: dict[str, float] = {}

    def start(self) -> Iterator[None]:
        """Nothing has to start."""
        yield from ()

    def wake(self, module: nn.Module, loaded: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Allocates the weights and fills them from `module`, one bucket per slice."""
        assert not self._awake, "wake twice without release"
        resharder = self._resharder_of(module)
        due = self._verify_every > 0 and self._num_wakes % self._verify_every == 0
        sums = Checksums(resharder.layout) if due else None
        self._model.allocate()
        for bucket in resharder.buckets():
            self._model.fill(bucket)
            if sums is not None:
                sums.add(bucket)
            yield
        self._model.check_filled()
        self.stats = resharder.stats.metrics()
        if sums is not None:
            yield from self._verify(resharder, sums)
        loaded()
        self._awake = True
        self._num_wakes += 1

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[float]:
        """Fills `completions` in the order of `requests`; yields the share that is done."""
        assert self._awake, "generate without wake"
        check_requests(
            requests,
            max_model_len=self._max_model_len,
            vocab_size=self._hf_config.get_text_config().vocab_size,
        )
        self.completions = []
        started = time.monotonic()
        generation = self._generation = Generation(
            self._model,
            requests,
            params,
            max_rows=self._max_rows(requests, params),
            max_model_len=self._max_model_len,
            max_prefill_tokens=self._max_prefill_tokens,
            stop_text=StopText(self._tokenizer, params.stop),
            agree=self._broadcast_tokens if self._mesh.dims.rollout_tp > 1 else None,
            lag=1 if self._mesh.device.type == "cuda" else 0,
        )
        num_steps = 1
        while not generation.done:
            slice_started = time.monotonic()
            for _ in range(num_steps):
                if not generation.done:
                    generation.step()
            num_steps = self._next_slice(num_steps, time.monotonic() - slice_started)
            yield generation.share_done
        self.completions = generation.completions()
        self._log_generation(generation, time.monotonic() - started)
        self._free_generation()

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
        self._resharder = None

    def _resharder_of(self, module: nn.Module) -> Resharder:
        """Made once for a module: its plan does not change."""
        if self._resharder is None or self._resharder[0] is not module:
            resharder = Resharder(
                module,
                self._mesh,
                style="hf",
                hf_config=self._hf_config,
                dtype=self._dtype,
                bucket_mib=self._bucket_mib,
            )
            self._resharder = (module, resharder)
        return self._resharder[1]

    def _verify(self, resharder: Resharder, sums: Checksums) -> Iterator[None]:
        """RuntimeError with both values where a parameter is not what was sent.

        All ranks send their weights once more when any of them needs the values.
        """
        wrong = sums.differing(self._model.parameters())
        wanted = torch.tensor(len(wrong))
        dist.all_reduce(wanted, dist.ReduceOp.MAX, group=self._mesh.host_group)
        if not wanted:
            return
        differences = []
        for bucket in resharder.buckets():
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

    def _next_slice(self, num_steps: int, elapsed_s: float) -> int:
        """Steps that take about half a second, the same on every rank of the rollout group."""
        wanted = int(num_steps * _SLICE_S / max(elapsed_s, 1e-6))
        steps = torch.tensor(min(max(wanted, 1), 2 * num_steps))
        if self._mesh.dims.rollout_tp > 1:
            dist.broadcast(steps, group=self._mesh.rollout_host_group, group_src=0)
        return int(steps)

    def _max_rows(self, requests: Sequence[Request], params: SamplingParams) -> int:
        """Rows whose KV cache fits, at most max_num_seqs and the number of requests."""
        rows = min(self._max_num_seqs, len(requests))
        if self._mesh.device.type != "cuda" or not requests:
            return rows
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._mesh.device)
        budget = free - (1 - self._memory_utilization) * total
        row_bytes = self._token_bytes() * longest_row(requests, params, self._max_model_len)
        fitting = torch.tensor(int(budget // row_bytes))
        dist.all_reduce(fitting, dist.ReduceOp.MIN, group=self._mesh.rollout_host_group)
        if fitting < 1:
            raise RuntimeError(
                f"the KV cache of one row takes {row_bytes / 2**30:.2f} GiB, and "
                f"rollout.gpu_memory_utilization = {self._memory_utilization} leaves "
                f"{budget / 2**30:.2f} GiB of {free / 2**30:.2f} GiB free"
            )
        return min(rows, int(fitting))

    def _token_bytes(self) -> int:
        """KV cache of one token on this rank."""
        return AttentionShape.of(self._hf_config).kv_bytes_per_token(
            tp=self._mesh.dims.rollout_tp, itemsize=self._dtype.itemsize
        )

    def _log_generation(self, generation: Generation, elapsed_s: float) -> None:
        kv_tokens = generation.cache.rows * generation.cache.columns
        self.stats = self.stats | {
            "rollout/tokens_per_s": generation.num_tokens / max(elapsed_s, 1e-6),
            "rollout/num_running_mean": generation.num_decoded_rows
            / max(generation.num_decodes, 1),
            "rollout/cache_hit": generation.cache_hit,
            "rollout/kv_tokens": kv_tokens,
            "rollout/kv_util": generation.peak_tokens / max(kv_tokens, 1),
        }
