"""Who holds and who needs which rectangle of a parameter: the geometry of the reshard.

Owns the intersection of "what each rank holds" (FSDP2 chunks) with "what each rank needs" (regions
of a layout) inside one shard group. Pure arithmetic on integers: no tensor, no process group, no
device. Must not know buckets, dtypes or bytes (sharding/reshard/plan.py).

Vocabulary: the F ranks of a shard group are called by their shard index s. A *cell* is a largest
rectangle of a parameter that has one holder and one set of ranks that need it. A *cut* is an
interval of local rows, the same on every holder, so that all holders send at the same time. A
*piece* is a cell inside a cut: what actually travels. Sizes are in elements.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from sharding.layout import Region, chunk

Kind = Literal["all_gather", "all_to_all"]
Rect = tuple[int, int, int, int]
"""(row, col, rows, cols)"""


class Source(NamedTuple):
    """One parameter as FSDP2 shards it: its 2-D view and the dim that is cut over the ranks."""

    name: str
    rows: int
    cols: int
    shard_dim: int

    def held(self, shard: int, num_shards: int) -> tuple[int, int, int, int]:
        """(row, col, rows, cols) of the rectangle that shard index ``shard`` holds."""
        if self.shard_dim == 0:
            start, length = chunk(self.rows, num_shards, shard)
            return start, 0, length, self.cols
        start, length = chunk(self.cols, num_shards, shard)
        return 0, start, self.rows, length

    def local_rows(self, num_shards: int) -> int:
        """Rows of the largest shard."""
        return self.held(0, num_shards)[2]


class Piece(NamedTuple):
    """A rectangle of parameter number ``source`` (its 2-D view) that travels as one block."""

    source: int
    row: int
    col: int
    rows: int
    cols: int

    @property
    def size(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class Topology:
    """One shard group: per shard index the TP rank, the node, and the place inside the node."""

    tp_ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Sequence[int], *, tp: int, ranks_per_node: int) -> "Topology":
        """``ranks``: global ranks in shard-index order (a row of ParallelDims.shard_rows)."""
        node_ids = sorted({rank // ranks_per_node for rank in ranks})
        members = {n: sorted(r for r in ranks if r // ranks_per_node == n) for n in node_ids}
        return cls(
            tuple(rank % tp for rank in ranks),
            tuple(node_ids.index(rank // ranks_per_node) for rank in ranks),
            tuple(members[rank // ranks_per_node].index(rank) for rank in ranks),
        )

    @property
    def size(self) -> int:
        return len(self.nodes)

    @cached_property
    def by_node(self) -> list[list[int]]:
        """Shard indices of every node, by place."""
        order = sorted(range(self.size), key=lambda s: self.places[s])
        return [[s for s in order if self.nodes[s] == n] for n in range(max(self.nodes) + 1)]

    @cached_property
    def two_level(self) -> bool:
        """Several nodes with equally many ranks each: shards cross the network once per node."""
        return len(self.by_node) > 1 and len({len(members) for members in self.by_node}) == 1

    @cached_property
    def inner(self) -> list[list[int]]:
        """Groups of the last exchange: the nodes, or one group of everybody."""
        return self.by_node if self.two_level else [list(range(self.size))]


class Cells:
    """All cells of one parameter as arrays; parameters of the same shape and needs share them.

    ``row, col, rows, cols``: the rectangles; ``holder``: shard index; ``local``: first row counted
    from the holder's first row; ``needed`` [cells, F]: which shard index needs the cell.
    """

    def __init__(self, source: Source, needs: Sequence[Sequence[Region]], topology: Topology):
        self.topology = topology
        self.local_rows = source.local_rows(topology.size)
        held = [source.held(s, topology.size) for s in range(topology.size)]
        wanted = [[(r.src_row, r.src_col, r.rows, r.cols) for r in need] for need in needs]
        everything = [*held, *(rect for rects in wanted for rect in rects)]
        row_edges = _edges([(rect[0], rect[2]) for rect in everything], source.rows)
        col_edges = _edges([(rect[1], rect[3]) for rect in everything], source.cols)
        i, j = np.divmod(np.arange((len(row_edges) - 1) * (len(col_edges) - 1)), len(col_edges) - 1)
        self.row, self.rows = row_edges[i], row_edges[i + 1] - row_edges[i]
        self.col, self.cols = col_edges[j], col_edges[j + 1] - col_edges[j]
        self.holder = np.stack([self._inside([rect]) for rect in held], 1).argmax(1)
        self.local = self.row - np.array([rect[0] for rect in held])[self.holder]
        by_tp = np.stack([self._inside(rects) for rects in wanted], 1)
        self.needed = by_tp[:, list(topology.tp_ranks)]
        self._even = len({rect[2:] for rect in held}) == 1
        self._found: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}

    def _inside(self, rects: Sequence[Rect]) -> np.ndarray:
        mask = np.zeros(len(self.row), bool)
        for row, col, rows, cols in rects:
            in_rows = (self.row >= row) & (self.row + self.rows <= row + rows)
            mask |= in_rows & (self.col >= col) & (self.col + self.cols <= col + cols)
        return mask

    @cached_property
    def kind(self) -> Kind:
        """all_gather where all ranks need everything and hold equally much, else all_to_all."""
        everywhere = self._even and bool(self.needed.all()) and self.topology.size > 1
        return "all_gather" if everywhere else "all_to_all"

    def relay(self, members: Sequence[int]) -> np.ndarray:
        """Who of an inner group has each cell at its exchange: on two levels the holder's peer."""
        if not self.topology.two_level:
            return self.holder
        return np.array(members)[np.array(self.topology.places)[self.holder]]

    @cached_property
    def fetched(self) -> np.ndarray:
        """[cells, F] cells that come over the network to the rank that relays them in its node."""
        out = np.zeros(self.needed.shape, bool)
        for members in self.topology.by_node if self.topology.two_level else ():
            relay = self.relay(members)
            wanted = self.needed[:, members].any(1) & (relay != self.holder)
            out[np.flatnonzero(wanted), relay[wanted]] = True
        return out

    @cached_property
    def passed(self) -> np.ndarray:
        """[cells, F] cells that a rank receives in the last exchange."""
        out = self.needed.copy()
        for members in self.topology.inner:
            out[np.arange(len(out)), self.relay(members)] = False
        return out

    @cached_property
    def load(self) -> np.ndarray:
        """[cells, F] how often a cell lies in a rank's buffers: sent, relayed, handed over."""
        cells = np.arange(len(self.row))
        load = self.needed.astype(np.int64)
        gathered = self.kind == "all_gather"
        if gathered:  # one block to send, and on two levels one to relay
            load[cells, self.holder] += 1
            if self.topology.two_level:
                for members in self.topology.by_node:
                    load[cells, self.relay(members)] += 1
            return load
        load += self.fetched
        load[cells, self.holder] += self.fetched.sum(1)
        for members in self.topology.inner:
            load[cells, self.relay(members)] += self.passed[:, members].sum(1)
        return load

    def size_of(self, mask: np.ndarray) -> np.ndarray:
        """[columns] elements of the cells that a mask [cells, columns] picks."""
        return (self.rows * self.cols) @ mask.astype(np.int64)

    def load_of(self, start: int, stop: int) -> np.ndarray:
        """[F] elements in the buffers of every rank for the cut of local rows [start, stop)."""
        low, high = np.maximum(self.local, start), np.minimum(self.local + self.rows, stop)
        return (np.maximum(high - low, 0) * self.cols) @ self.load

    def pieces(
        self, source: int, cut: tuple[int, int], holder: int, needers: tuple[int, ...]
    ) -> Iterator[Piece]:
        """Pieces of a cut that ``holder`` holds and any of ``needers`` needs, in a fixed order."""
        found = self._found.get((holder, needers))
        if found is None:
            mask = (self.holder == holder) & self.needed[:, list(needers)].any(1)
            found = self._found[holder, needers] = np.flatnonzero(mask)
        local = self.local[found]
        low = np.maximum(local, cut[0])
        rows = np.minimum(local + self.rows[found], cut[1]) - low
        row = self.row[found] + low - local
        for k in np.flatnonzero(rows > 0):
            cell = found[k]
            yield Piece(
                source, int(row[k]), int(self.col[cell]), int(rows[k]), int(self.cols[cell])
            )


def _edges(spans: Sequence[tuple[int, int]], size: int) -> np.ndarray:
    """Sorted distinct ends of (start, length) spans inside [0, size]."""
    return np.unique([0, size, *(e for start, length in spans for e in (start, start + length))])
