"""Run the plan of the reshard: FSDP shards become tensor-parallel slices, bucket by bucket.

Owns the buffers, the packing, and the overlap of exchange and loading. Must not know engines: it
hands out one flat tensor per bucket with a table of what lies where.

Order of communication, the same on every rank of a shard group: for every bucket the network
exchange (only where the group spans nodes), then the exchange inside the node. Bucket k + 1 is on
its way while the consumer loads bucket k; its buffers are those of bucket k - 1.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sharding.layout import Layout, Style, Zero, tp_layouts
from sharding.mesh import Mesh
from sharding.progress import PROGRESS
from sharding.reshard.exchange import ReshardStats, make_links, topology_of
from sharding.reshard.geometry import Piece
from sharding.reshard.plan import MIB, Entry, RankBucket, Stage, make_plan
from sharding.reshard.shards import Shards, named_shards, sent_shapes, source_of

logger = logging.getLogger(__name__)


class Bucket(NamedTuple):
    """``flat`` [n] in the rollout dtype; valid until the next bucket is asked for."""

    flat: Tensor
    entries: list[Entry]
    zeros: list[Zero]

    def views(self) -> Iterator[tuple[Entry, Tensor]]:
        """Every entry with its block of ``flat`` as [rows, cols]."""
        for entry in self.entries:
            block = self.flat[entry.offset : entry.offset + entry.rows * entry.cols]
            yield entry, block.view(entry.rows, entry.cols)


class Resharder:
    """Streams the parameters of an FSDP2 module to this rank as its tensor-parallel slice.

    Construction and ``buckets`` are collective: all ranks of the job construct, all ranks of a
    shard group iterate to the end. ``layout`` tells which targets this rank gets and which rows are
    zero; ``plan.summary()`` is the table for the log. Raises ValueError where the architecture has
    no layout (use FullTensors), where the engine cannot split the model, or where
    a bucket is too small for one row.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        style: Style,
        hf_config: Any,
        dtype: torch.dtype,
        bucket_mib: float,
        rows: Mapping[str, int] | None = None,
    ):
        """rows: of parameters of which only so many first rows are sent, by name."""
        config = hf_config if isinstance(hf_config, Mapping) else hf_config.to_dict()
        shapes = sent_shapes(module, rows or {})
        layouts = tp_layouts(shapes, config, tp=mesh.dims.rollout_tp, style=style)
        if layouts is None:
            raise ValueError(f"no {style} layout for {config['model_type']}: use FullTensors")
        self._init(module, mesh, layouts, dtype, bucket_mib)

    @classmethod
    def from_layouts(
        cls,
        module: nn.Module,
        mesh: Mesh,
        layouts: Sequence[Layout],
        *,
        dtype: torch.dtype,
        bucket_mib: float,
    ) -> "Resharder":
        """With one layout per TP rank instead of an architecture's table."""
        self = cls.__new__(cls)
        self._init(module, mesh, layouts, dtype, bucket_mib)
        return self

    def _init(
        self,
        module: nn.Module,
        mesh: Mesh,
        layouts: Sequence[Layout],
        dtype: torch.dtype,
        bucket_mib: float,
    ) -> None:
        self._module, self._mesh, self._device, self._dtype = module, mesh, mesh.device, dtype
        topology = topology_of(mesh.dims.shard_rows()[mesh.replicate_rank], mesh.dims)
        self._shard = mesh.shard_index
        sources = [source_of(name, parameter) for name, parameter in named_shards(module)]
        self.layout = layouts[mesh.rank % mesh.dims.rollout_tp]
        self.plan = make_plan(
            sources,
            layouts,
            topology,
            itemsize=dtype.itemsize,
            bucket_bytes=int(bucket_mib * MIB),
        )
        logger.info("%s", self.plan.summary())
        self._held = [source.held(self._shard, topology.size) for source in sources]
        self._buckets = [
            self.plan.rank_bucket(index, self._shard) for index in range(len(self.plan.buckets))
        ]
        self._capacity = max((_buffer_size(bucket) for bucket in self._buckets), default=0)
        self._cross, self._inner = make_links(mesh)
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.stats = self._new_stats()

    def buckets(self) -> Iterator[Bucket]:
        """All buckets in order. Collective over the shard group; two in flight.

        The consumer must have read a bucket (its device work enqueued on the current stream, or
        finished where another process reads) when it asks for the next one.
        """
        self.stats = self._new_stats()
        shards = Shards(self._module, self._held, self._mesh)
        self.stats.adapter_bytes = shards.merged.received_bytes
        slots = [
            torch.empty(self._capacity, dtype=self._dtype, device=self._device)
            for _ in range(min(2, len(self._buckets)))
        ]
        try:
            flight = self._start(0, slots, shards)
            for index, bucket in enumerate(self._buckets):
                self._finish(flight)
                flight = self._start(index + 1, slots, shards)
                PROGRESS.tick()
                yield Bucket(slots[index % 2][: bucket.size], bucket.entries, bucket.zeros)
        finally:
            self._release(slots)

    def _start(self, index: int, slots: list[Tensor], shards: Shards) -> "_Flight | None":
        """Pack a bucket and start its exchange; on CUDA all of it goes to the side stream."""
        if index >= len(self._buckets):
            return None
        steps = self._exchange(self._buckets[index], slots[index % 2], shards)
        if self._side is None:
            return _Flight(steps, next(steps, None))
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for work in steps:
                work.wait()  # the stream waits, not the host
        return None

    def _finish(self, flight: "_Flight | None") -> None:
        """Make the bucket that was started last ready for the current stream."""
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)
        while flight is not None and flight.work is not None:
            flight.work.wait()
            flight.work = next(flight.steps, None)

    def _exchange(self, bucket: RankBucket, slot: Tensor, shards: Shards) -> Iterator[dist.Work]:
        """The collectives of one bucket; each is yielded running, to be waited for."""
        flat, slot = slot[: bucket.size], slot[bucket.size :]
        relayed: dict[Piece, Tensor] = {}
        transit = slot[:0]
        if bucket.cross is not None:
            send, transit, slot = slot.split(_stage_sizes(bucket.cross, slot))
            self._pack(shards, send, bucket.cross.send, relayed)
            assert self._cross is not None
            yield self._cross.start(bucket.cross, transit, send, self.stats)
            blocks = transit.split([piece.size for piece in bucket.cross.receive])
            relayed = dict(zip(bucket.cross.receive, blocks, strict=True))
        own = sum(piece.size for piece in bucket.own)
        self._pack(shards, flat[:own], bucket.own, relayed)
        if bucket.inner is not None:
            send = transit
            if not _relays_as_is(bucket):
                send = slot[: sum(bucket.inner.send_sizes)]
                self._pack(shards, send, bucket.inner.send, relayed)
            yield self._inner.start(bucket.inner, flat[own:], send, self.stats)

    def _pack(
        self, shards: Shards, out: Tensor, pieces: Sequence[Piece], relayed: dict[Piece, Tensor]
    ) -> None:
        staged = shards.pack(out, pieces, relayed)
        buffers = min(2, len(self._buckets)) * self._capacity * self._dtype.itemsize
        extra = buffers + staged + shards.merged.held_bytes
        self.stats.peak_extra_bytes = max(self.stats.peak_extra_bytes, extra)

    def _new_stats(self) -> ReshardStats:
        topology = self.plan.topology
        node = topology.nodes[self._shard]
        bound = int(self.plan.internode_lower_bound_bytes()[node])
        return ReshardStats(
            lower_bound_bytes=int(self.plan.lower_bound_bytes()[self._shard]),
            internode_lower_bound_bytes=bound / len(topology.by_node[node]),
            num_buckets=len(self._buckets),
        )

    def _release(self, slots: list[Tensor]) -> None:
        """Give the buffers back, also those that another process had opened by handle."""
        slots.clear()
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


@dataclass
class _Flight:
    """An exchange that has been started on the host, and the collective that is running."""

    steps: Iterator[dist.Work]
    work: dist.Work | None


def _relays_as_is(bucket: RankBucket) -> bool:
    """On two levels an all-gather passes on exactly what the network brought."""
    stages = (bucket.cross, bucket.inner)
    return all(stage is not None and stage.kind == "all_gather" for stage in stages)


def _buffer_size(bucket: RankBucket) -> int:
    """Elements of all buffers of a bucket: handed over, sent, relayed."""
    size = bucket.size
    if bucket.cross is not None:
        size += sum(bucket.cross.send_sizes) + sum(bucket.cross.receive_sizes)
    if bucket.inner is not None and not _relays_as_is(bucket):
        size += sum(bucket.inner.send_sizes)
    return size


def _stage_sizes(stage: Stage, slot: Tensor) -> list[int]:
    send, receive = sum(stage.send_sizes), sum(stage.receive_sizes)
    return [send, receive, slot.numel() - send - receive]
