"""The plan of the reshard: what every rank sends and receives, bucket by bucket.

Owns the cutting of a model into buckets and the byte counts. Pure data, equal on all ranks: no
tensor, no process group, no device. Must not know how a bucket travels (resharder.py).

On one level every bucket is one exchange inside the shard group. On two levels (the group spans
nodes) a cell first goes once to every node that needs it, between ranks at the same place of their
nodes, and then round inside the node.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sharding.layout import Layout, Region, Zero
from sharding.reshard.geometry import Cells, Kind, Piece, Source, Topology

MIB = 2**20


class Cut(NamedTuple):
    """Local rows [start, stop) of parameter number ``source`` on every holder."""

    source: int
    start: int
    stop: int


class PlannedBucket(NamedTuple):
    """What travels together; ``cross`` and ``inner`` say whether anything moves on that level."""

    kind: Kind
    cuts: tuple[Cut, ...]
    cross: bool
    inner: bool


class Stage(NamedTuple):
    """One collective of one rank: pieces in buffer order, elements per member of the group."""

    kind: Kind
    send: list[Piece]
    send_sizes: list[int]
    receive: list[Piece]
    receive_sizes: list[int]


class Entry(NamedTuple):
    """``flat[offset:][: rows * cols]`` belongs at [dst_row, dst_col] of ``target``'s 2-D view."""

    target: str
    dst_row: int
    dst_col: int
    rows: int
    cols: int
    offset: int


class RankBucket(NamedTuple):
    """One bucket as one rank sees it: two collectives at most, then ``entries``.

    The flat buffer has ``size`` elements: ``own``, then what ``inner`` receives.
    """

    cross: Stage | None
    inner: Stage | None
    own: list[Piece]
    entries: list[Entry]
    zeros: list[Zero]
    size: int


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """The whole exchange of one shard group. ``layouts`` by TP rank; ``cells`` by parameter."""

    sources: Sequence[Source]
    layouts: Sequence[Layout]
    topology: Topology
    itemsize: int
    bucket_bytes: int
    cells: Sequence[Cells]
    buckets: Sequence[PlannedBucket]
    _regions: Sequence[dict[str, list[Region]]] = field(repr=False)

    def rank_bucket(self, index: int, shard: int) -> RankBucket:
        """Bucket ``index`` from the view of shard index ``shard``."""
        bucket = self.buckets[index]
        inner, own = self._inner(bucket, shard)
        entries, offset = [], 0
        for piece in [*own, *(inner.receive if inner else ())]:
            entries.append(self._entry(piece, shard, offset))
            offset += piece.size
        layout = self.layouts[self.topology.tp_ranks[shard]]
        zeros = layout.zeros if index == 0 else []
        return RankBucket(self._cross(bucket, shard), inner, own, entries, zeros, offset)

    def _pieces(
        self, bucket: PlannedBucket, holder: int, needers: tuple[int, ...]
    ) -> Iterator[Piece]:
        for source, start, stop in bucket.cuts:
            yield from self.cells[source].pieces(source, (start, stop), holder, needers)

    def _block(self, bucket: PlannedBucket, member: int, needer: int) -> list[Piece]:
        """What ``member`` has for ``needer`` when the inner exchange starts."""
        topology = self.topology
        holders = [member]
        if topology.two_level:
            holders = [members[topology.places[member]] for members in topology.by_node]
        return [p for holder in holders for p in self._pieces(bucket, holder, (needer,))]

    def _cross(self, bucket: PlannedBucket, shard: int) -> Stage | None:
        if not bucket.cross:
            return None
        topology = self.topology
        peers = [members[topology.places[shard]] for members in topology.by_node]
        if bucket.kind == "all_gather":
            send = [list(self._pieces(bucket, shard, (shard,)))]
            receive = [list(self._pieces(bucket, peer, (shard,))) for peer in peers]
            return _stage("all_gather", send, receive)
        mine = topology.nodes[shard]
        by_node = [tuple(members) for members in topology.by_node]
        send, receive = [], []
        for node, peer in enumerate(peers):
            away = node != mine
            send.append(list(self._pieces(bucket, shard, by_node[node])) if away else [])
            receive.append(list(self._pieces(bucket, peer, by_node[mine])) if away else [])
        return _stage("all_to_all", send, receive)

    def _inner(self, bucket: PlannedBucket, shard: int) -> tuple[Stage | None, list[Piece]]:
        """The last exchange, and what the rank puts into its own flat buffer without it."""
        if not bucket.inner:
            return None, self._block(bucket, shard, shard)
        members = next(group for group in self.topology.inner if shard in group)
        receive = [self._block(bucket, member, shard) for member in members]
        if bucket.kind == "all_gather":
            return _stage("all_gather", [self._block(bucket, shard, shard)], receive), []
        send = [self._block(bucket, shard, m) if m != shard else [] for m in members]
        position = members.index(shard)
        own, receive[position] = receive[position], []
        return _stage("all_to_all", send, receive), own

    def _entry(self, piece: Piece, shard: int, offset: int) -> Entry:
        regions = self._regions[self.topology.tp_ranks[shard]][self.sources[piece.source].name]
        region = next(
            r
            for r in regions
            if r.src_row <= piece.row < r.src_row + r.rows
            and r.src_col <= piece.col < r.src_col + r.cols
        )
        row = region.dst_row + piece.row - region.src_row
        col = region.dst_col + piece.col - region.src_col
        return Entry(region.target, row, col, piece.rows, piece.cols, offset)

    @property
    def model_bytes(self) -> int:
        """Bytes of all parameters in the rollout dtype."""
        return self.itemsize * sum(source.rows * source.cols for source in self.sources)

    @property
    def full_gather_bytes(self) -> int:
        """Bytes a rank receives when every parameter is gathered whole: M (F - 1) / F."""
        return self.model_bytes * (self.topology.size - 1) // self.topology.size

    def received_bytes(self) -> np.ndarray:
        """[F] bytes that every rank receives, on both levels."""
        return self._sum(lambda c: c.size_of(c.fetched) + c.size_of(c.passed))

    def lower_bound_bytes(self) -> np.ndarray:
        """[F] bytes of every rank's slice that it does not hold itself."""
        shards = np.arange(self.topology.size)
        return self._sum(lambda c: c.size_of(c.needed & (c.holder[:, None] != shards)))

    def internode_bytes(self) -> np.ndarray:
        """[F] bytes that every rank receives from other nodes."""
        if self.topology.two_level:
            return self._sum(lambda c: c.size_of(c.fetched))
        nodes = np.array(self.topology.nodes)
        return self._sum(lambda c: c.size_of(c.needed & (nodes[c.holder][:, None] != nodes)))

    def internode_lower_bound_bytes(self) -> np.ndarray:
        """[nodes] bytes that a node's ranks need together and do not hold together."""
        nodes = np.array(self.topology.nodes)

        def missing(cells: Cells) -> np.ndarray:
            needed = [cells.needed[:, members].any(1) for members in self.topology.by_node]
            away = nodes[cells.holder][:, None] != np.arange(len(needed))
            return cells.size_of(np.stack(needed, 1) & away)

        return self._sum(missing)

    def _sum(self, count) -> np.ndarray:
        found = {id(cells): count(cells) for cells in {id(c): c for c in self.cells}.values()}
        return self.itemsize * np.sum([found[id(cells)] for cells in self.cells], 0)

    def summary(self) -> str:
        """The table that is printed once at the start."""
        received, bound = self.received_bytes(), self.lower_bound_bytes()
        full, worst = self.full_gather_bytes, int(received.max())
        rows = [
            ("model (rollout dtype)", f"{self.model_bytes / MIB:.1f} MiB"),
            ("shard ranks F x rollout TP x nodes", self._degrees()),
            (
                "received per rank, mean | max",
                f"{received.mean() / MIB:.2f} | {worst / MIB:.2f} MiB",
            ),
            ("lower bound per rank, mean | max", _mib_pair(bound)),
            ("full all-gather per rank", f"{full / MIB:.2f} MiB"),
            ("fewer bytes than full all-gather", f"{full / worst:.1f}x" if worst else "all"),
            ("across nodes per node, max", f"{self._node_bytes().max() / MIB:.2f} MiB"),
            ("  its lower bound", f"{self.internode_lower_bound_bytes().max() / MIB:.2f} MiB"),
            ("buckets (send + receive)", f"{len(self.buckets)} x {self.bucket_bytes / MIB:g} MiB"),
        ]
        width = max(len(name) for name, _ in rows)
        return "reshard plan\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)

    def _degrees(self) -> str:
        levels = "two levels" if self.topology.two_level else "one level"
        return (
            f"{self.topology.size} x {len(self.layouts)} x {len(self.topology.by_node)}, {levels}"
        )

    def _node_bytes(self) -> np.ndarray:
        by_rank = self.internode_bytes()
        return np.array([by_rank[members].sum() for members in self.topology.by_node])


def make_plan(
    sources: Sequence[Source],
    layouts: Sequence[Layout],
    topology: Topology,
    *,
    itemsize: int,
    bucket_bytes: int,
) -> ReshardPlan:
    """Plan the exchange of one shard group; ``layouts[t]`` is what TP rank t needs.

    Send and receive buffers of a bucket, relay included, take at most ``bucket_bytes`` on every
    rank. Raises ValueError where one row of a parameter does not fit.
    """
    regions = [_by_source(layout) for layout in layouts]
    shared: dict[tuple, Cells] = {}
    cells = []
    for source in sources:
        needs = [by_source.get(source.name, []) for by_source in regions]
        key = (source[1:], tuple(tuple(r[1:5] for r in need) for need in needs))
        if key not in shared:
            shared[key] = Cells(source, needs, topology)
        cells.append(shared[key])
    buckets = [
        bucket
        for kind in ("all_gather", "all_to_all")
        for bucket in _fill(sources, cells, kind, bucket_bytes // itemsize)
    ]
    return ReshardPlan(
        sources=sources,
        layouts=layouts,
        topology=topology,
        itemsize=itemsize,
        bucket_bytes=bucket_bytes,
        cells=cells,
        buckets=buckets,
        _regions=regions,
    )


def _fill(
    sources: Sequence[Source], cells: Sequence[Cells], kind: Kind, limit: int
) -> Iterator[PlannedBucket]:
    """Fill buckets to the limit in parameter order, cutting parameters by local rows."""
    cuts: list[Cut] = []
    load = np.zeros(1, np.int64)
    for index, cell in enumerate(cells):
        start, stop = 0, cell.local_rows if cell.kind == kind else 0
        while start < stop:
            end = _last_fitting(cell, start, stop, limit - load)
            if end > start:
                cuts.append(Cut(index, start, end))
                load = load + cell.load_of(start, end)
            elif not cuts:
                row = cell.load_of(start, start + 1).max()
                raise ValueError(
                    f"a reshard bucket of {limit} elements is smaller than one row of "
                    f"{sources[index].name} with its copies, {row} elements"
                )
            if end < stop:
                yield _bucket(kind, cuts, cells)
                cuts, load = [], np.zeros(1, np.int64)
            start = end
    if cuts:
        yield _bucket(kind, cuts, cells)


def _last_fitting(cell: Cells, start: int, stop: int, room: np.ndarray) -> int:
    """The largest end for which the cut [start, end) fits on every rank; ``start`` if none does."""
    low, high = start, stop + 1
    while high - low > 1:
        middle = stop if low == start and high > stop else (low + high) // 2
        fits = bool((cell.load_of(start, middle) <= room).all())
        low, high = (middle, high) if fits else (low, middle)
    return low


def _bucket(kind: Kind, cuts: Sequence[Cut], cells: Sequence[Cells]) -> PlannedBucket:
    used = [cells[cut.source] for cut in cuts]
    return PlannedBucket(
        kind,
        tuple(cuts),
        any(cell.fetched.any() for cell in used),
        any(cell.passed.any() for cell in used),
    )


def _stage(kind: Kind, send: list[list[Piece]], receive: list[list[Piece]]) -> Stage:
    return Stage(
        kind,
        [piece for block in send for piece in block],
        [sum(piece.size for piece in block) for block in send],
        [piece for block in receive for piece in block],
        [sum(piece.size for piece in block) for block in receive],
    )


def _by_source(layout: Layout) -> dict[str, list[Region]]:
    out: dict[str, list[Region]] = {}
    for region in layout.regions:
        out.setdefault(region.source, []).append(region)
    return out


def _mib_pair(values: np.ndarray) -> str:
    return f"{values.mean() / MIB:.2f} | {values.max() / MIB:.2f} MiB"
