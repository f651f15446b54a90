"""The trainer's side of a weight update: buckets of the reshard become payloads for SGLang.

One flat tensor per rank and bucket travels as a handle (CUDA IPC; shared memory on a CPU), with the
table of what lies where; ppo/engines/sglang/loader.py reads it. Every rank of a rollout group sends
for its own tensor-parallel slice, the leader submits the list. Must not know generation.

Communication: the buckets are collective over the shard group; each payload is one gather and one
barrier over the rollout group's host group. A rank that has failed takes part to the end, so that
nobody waits for it.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from sharding.layout import tp_layout
from sharding.mesh import Mesh
from sharding.reshard.checksums import Checksums
from sharding.reshard.full_tensors import FullTensors
from sharding.reshard.resharder import Resharder
from sharding.reshard.shards import named_shards, sent_shapes

RESULT_BYTES = 4096
MOST_PROBLEMS = 5
Ask = Callable[[str, dict[str, Any]], Any]
"""Asks the leader's engine: verb and arguments."""


class Parcel(NamedTuple):
    """What a worker gets at once: ``flat`` with a table of what lies where."""

    entries: list[list]
    zeros: list[list]
    flat: Tensor


class WeightSync:
    """Streams an FSDP2 module into the engine of this rank's rollout group, and checks it.

    Architectures that sharding/layout.py does not know are sent whole under their checkpoint names,
    for the engine's own loader to slice. Construction is collective over all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        num_ids: int,
        dtype: torch.dtype,
        bucket_mib: float,
    ):
        """num_ids: rows of embedding and head that the engine has."""
        self.mesh = mesh
        self.differing: list[str] = []
        """what the last checked run found to differ in this rank's slice"""
        options: dict[str, Any] = {
            "dtype": dtype,
            "bucket_mib": _fit_shared_memory(bucket_mib, mesh),
            "rows": vocabulary_rows(module, num_ids),
        }
        hf_config: Any = module.config
        shapes = sent_shapes(module, options["rows"])
        tp, config = mesh.dims.rollout_tp, hf_config.to_dict()
        known = tp_layout(config["model_type"], shapes, config, tp=tp, tp_rank=0, style="sglang")
        self.slices = self.whole = None
        if known is not None:
            self.slices = Resharder(module, mesh, style="sglang", hf_config=config, **options)
        else:
            self.whole = FullTensors(module, mesh, **options)

    def run(self, ask: Ask | None, *, action: str, checked: bool = False) -> list[str]:
        """Send all weights to be loaded (``action`` "load") or compared ("verify").

        ``ask`` is None on ranks that do not lead their group. ``checked`` compares checksums after
        loading and fills ``differing``; there are none on the generic path. Returns what went wrong
        on this rank.
        """
        with _shareable_memory(self.mesh.device):
            return self._run(ask, action, checked)

    def _run(self, ask: Ask | None, action: str, checked: bool) -> list[str]:
        problems: list[str] = []
        asker = _Asker(ask, problems)
        result = torch.zeros(RESULT_BYTES, dtype=torch.uint8, device=self.mesh.device)
        sums = Checksums(self.slices.layout) if checked and self.slices else None
        style = "slices" if self.slices else "full"
        asker("begin_update")
        for stage, parcel in self._stages(Parcel([], [], result), sums):
            instruction = {
                "action": action,
                "stage": stage,
                "style": style,
                "entries": parcel.entries,
                "zeros": parcel.zeros,
                "checksums": sums.expected() if sums is not None and stage == "end" else {},
            }
            flat = parcel.flat if parcel.entries else result  # nothing to share has no handle
            payload = serialize([(json.dumps(instruction), flat), ("result", result)])
            asker("update", payloads=self._gathered(payload))
            dist.barrier(self.mesh.rollout_host_group)  # the engine has read everybody's payload
            answer = _answer(result)
            result.zero_()
            if answer is None and not problems:
                problems.append("SGLang's worker has not answered into this rank's memory")
            answer = answer or {"error": "", "differing": []}
            if (text := answer["error"]) and len(problems) < MOST_PROBLEMS:
                problems.append(f"SGLang cannot {action} weights: {text}")
            self.differing = answer["differing"]
        asker("end_update")
        return problems

    def _stages(self, nothing: Parcel, sums: Checksums | None) -> Iterator[tuple[str, Parcel]]:
        yield "begin", nothing
        for parcel in self._sliced(sums) if self.slices else self._whole():
            yield "bucket", parcel
        yield "end", nothing

    def _sliced(self, sums: Checksums | None) -> Iterator[Parcel]:
        assert self.slices is not None
        for bucket in self.slices.buckets():
            if sums is not None:
                sums.add(bucket)
            entries = [list(entry) for entry in bucket.entries]
            yield Parcel(entries, [list(zero) for zero in bucket.zeros], bucket.flat)

    def _whole(self) -> Iterator[Parcel]:
        assert self.whole is not None
        for named in self.whole.batches():
            flat = torch.cat([tensor.reshape(-1) for _, tensor in named])
            entries, offset = [], 0
            for name, tensor in named:
                entries.append([name, list(tensor.shape), offset])
                offset += tensor.numel()
            yield Parcel(entries, [], flat)

    def _gathered(self, payload: bytes) -> list[bytes]:
        """Payloads of the group in tensor-parallel order, on its leader."""
        group = self.mesh.rollout_host_group
        leads = self.mesh.rollout_tp_rank == 0
        payloads = [b""] * self.mesh.dims.rollout_tp if leads else None
        dist.gather_object(payload, payloads, group=group, group_dst=0)
        return payloads or []

    def stats(self) -> dict[str, float]:
        """reshard/* of the last run on this rank."""
        return (self.slices or self.whole).stats.metrics()  # type: ignore[union-attr]


class _Asker:
    """Asks the engine on the leader until it fails; ``problems`` gets the reason."""

    def __init__(self, ask: Ask | None, problems: list[str]) -> None:
        self.ask, self.problems = ask, problems

    def __call__(self, verb: str, **arguments: Any) -> None:
        if self.ask is None:
            return
        try:
            self.ask(verb, arguments)
        except RuntimeError as error:
            self.problems.append(str(error))
            self.ask = None


def vocabulary_rows(module: Any, num_ids: int) -> dict[str, int]:
    """Names of embedding and head with the rows that are sent, where they have more."""
    parts = (module.get_input_embeddings(), module.get_output_embeddings())
    tensors = [t for part in parts for t in (part.weight, getattr(part, "bias", None))]
    whole = {id(tensor) for tensor in tensors if tensor is not None and len(tensor) > num_ids}
    return {name: num_ids for name, p in named_shards(module) if id(p) in whole}


def _answer(result: Tensor) -> dict[str, Any] | None:
    """What the worker has written; None where it was given a copy, or nothing at all."""
    written = bytes(result.tolist()).rstrip(b"\0")
    return json.loads(written) if written else None


def serialize(named_tensors: list[tuple[str, Tensor]]) -> bytes:
    """Pickle with handles instead of data, for another process of this node.

    The stream is waited for first: a reader in another process cannot wait for it. CPU handles are
    file names, because file descriptors travel only between a process and its own child.
    """
    if named_tensors[0][1].is_cuda:
        torch.cuda.current_stream().synchronize()
    with _sharing_strategy("file_system"), io.BytesIO() as buffer:
        ForkingPickler(buffer).dump(named_tensors)
        return buffer.getvalue()


@contextmanager
def _shareable_memory(device: torch.device) -> Iterator[None]:
    """No expandable segments meanwhile: another process may not be able to open them."""
    settings = torch._C._accelerator_getAllocatorSettings()
    options = [option for option in settings.split(",") if option]
    kept = [option for option in options if not option.startswith("expandable_segments")]
    if device.type != "cuda" or kept == options:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(",".join([*kept, "expandable_segments:False"]))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


@contextmanager
def _sharing_strategy(name: str) -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(name)
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def _fit_shared_memory(bucket_mib: float, mesh: Mesh) -> float:
    """On a CPU the buckets of a node's ranks lie in /dev/shm, which containers keep small."""
    if mesh.device.type != "cpu":
        return bucket_mib
    share = shutil.disk_usage("/dev/shm").free / mesh.dims.ranks_per_node / 2 / 1024**2
    fitting = torch.tensor(min(bucket_mib, share), dtype=torch.float64)
    dist.all_reduce(fitting, dist.ReduceOp.MIN, group=mesh.host_group)
    return fitting.item()
