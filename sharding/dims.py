"""The degrees of the training and the generation mesh, as pure data.

Owns the arithmetic that every other piece agrees on: which rank sits where on which axis, and which
combinations are possible. Imports neither torch nor a config, so that a preflight can use it.

Axes, outermost first: dp_replicate x dp_shard x sp for training, rollout_dp x rollout_tp for
generation. Ranks are counted in plain order on both. FSDP shards over the flattened
(dp_shard x sp) axis of F ranks; only the *order* of its shards is permuted (`shard_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Strategy = Literal["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"]


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Degrees of both meshes over `world_size` ranks.

    Any numbers may be given; `problems()` says which of them cannot work. The other properties
    assume that there are none.
    """

    world_size: int
    """all ranks"""
    ranks_per_node: int
    """ranks on each node; equal on all nodes"""
    fsdp_size: int = -1
    """ranks of one shard group (dp_shard x sp); -1 = open: a node's on several nodes, else all"""
    sp: int = 1
    """ranks that share one sequence (Ulysses)"""
    rollout_tp: int = 1
    """tensor-parallel ranks of one generation replica"""

    @property
    def shard_size(self) -> int:
        """F: ranks that FSDP shards over; `fsdp_size` with -1 replaced."""
        if self.fsdp_size != -1:
            return self.fsdp_size
        return self.ranks_per_node if self.nodes > 1 else self.world_size

    def resolve(self) -> ParallelDims:
        """The same degrees with `fsdp_size` spelled out."""
        return replace(self, fsdp_size=self.shard_size)

    @property
    def nodes(self) -> int:
        return max(1, self.world_size // self.ranks_per_node)

    @property
    def dp_replicate(self) -> int:
        """Copies of the sharded parameters."""
        return self.world_size // self.shard_size

    @property
    def dp_shard(self) -> int:
        """Ranks of a shard group that hold different sequences."""
        return self.shard_size // self.sp

    @property
    def dp(self) -> int:
        """Ranks, or sp groups of ranks, that hold different sequences."""
        return self.world_size // self.sp

    @property
    def rollout_dp(self) -> int:
        """Generation replicas."""
        return self.world_size // self.rollout_tp

    @property
    def strategy(self) -> Strategy:
        """What the degrees amount to; SHARD_GRAD_OP is FULL_SHARD that does not reshard."""
        if self.shard_size == self.world_size:
            return "FULL_SHARD"
        return "NO_SHARD" if self.shard_size == 1 else "HYBRID_SHARD"

    @property
    def num_communicators(self) -> int:
        """Device groups of more than one rank that a rank is in: shards, replicas, sp, a generation
        replica, and two of the reshard where a shard group spans nodes."""
        axes = (self.shard_size, self.dp_replicate, self.sp, self.rollout_tp)
        return sum(size > 1 for size in axes) + 2 * (self.shard_size > self.ranks_per_node)

    def summary(self) -> str:
        """Both meshes in a line."""
        return (
            f"{self.world_size} ranks on {self.nodes} nodes: dp_replicate {self.dp_replicate} x "
            f"dp_shard {self.dp_shard} x sp {self.sp} ({self.strategy}), "
            f"rollout_dp {self.rollout_dp} x tp {self.rollout_tp}"
        )

    def problems(self) -> list[str]:
        """Every impossible degree: its name and value first, the rule, then the possible values."""
        if self.world_size < 1 or self.ranks_per_node < 1:
            both = f"world_size {self.world_size} with ranks_per_node {self.ranks_per_node}"
            return [f"{both}: both must be at least 1"]
        checks = (self._node_problem, self._sp_problem, self._fsdp_problem, self._tp_problem)
        return [problem for check in checks if (problem := check()) is not None]

    def _node_problem(self) -> str | None:
        if self.world_size % self.ranks_per_node == 0:
            return None
        return (
            f"ranks_per_node {self.ranks_per_node}: must divide the {self.world_size} ranks "
            f"({_possible(divisors(self.world_size))})"
        )

    def _sp_problem(self) -> str | None:
        if self.sp >= 1 and self.world_size % self.sp == 0:
            return None
        return (
            f"sp {self.sp}: must divide the {self.world_size} ranks "
            f"({_possible(divisors(self.world_size))})"
        )

    def _fsdp_problem(self) -> str | None:
        if self._sp_problem() or (self.fsdp_size == -1 and self._node_problem()):
            return None  # it follows from the other
        size = self.shard_size
        if size >= 1 and self.world_size % size == 0 and size % self.sp == 0:
            return None
        multiple = f" and be a multiple of sp {self.sp}" if self.sp > 1 else ""
        sizes = [n for n in divisors(self.world_size) if n % self.sp == 0]
        return (
            f"fsdp_size {self.fsdp_size}: the ranks of a shard group ({size}) must divide the "
            f"{self.world_size} ranks{multiple} ({_possible(sizes)})"
        )

    def _tp_problem(self) -> str | None:
        if self.rollout_tp >= 1 and self.ranks_per_node % self.rollout_tp == 0:
            return None
        return (
            f"rollout_tp {self.rollout_tp}: must divide the {self.ranks_per_node} ranks of a "
            f"node ({_possible(divisors(self.ranks_per_node))})"
        )

    def shard_rows(self) -> list[list[int]]:
        """Global ranks in shard-index order, one row per replica group: [dp_replicate][F].

        Rank r, with rollout_tp rank t = r % T, gets shard index t * (F / T) + its position among
        the ranks with the same t: the rows that FSDP gives to it then lie inside the slice that TP
        rank t needs. Where T does not divide F the ranks keep their plain order.
        """
        size, tp = self.shard_size, self.rollout_tp
        plain = [range(first, first + size) for first in range(0, self.world_size, size)]
        if size % tp:
            return [list(row) for row in plain]
        return [[rank for t in range(tp) for rank in row[t::tp]] for row in plain]

    def sp_rows(self) -> list[list[int]]:
        """Global ranks that share sequences, one row per sp group: [dp][sp]."""
        return [list(range(r, r + self.sp)) for r in range(0, self.world_size, self.sp)]

    def dp_rows(self) -> list[list[int]]:
        """Global ranks that hold all sequences once, by slice of a sequence: [sp][dp]."""
        return [list(range(slice_, self.world_size, self.sp)) for slice_ in range(self.sp)]

    def node_rows(self) -> list[list[int]]:
        """Global ranks of each node: [nodes][ranks_per_node]."""
        size = self.ranks_per_node
        return [list(range(r, r + size)) for r in range(0, self.world_size, size)]

    def replicate_rows(self) -> list[list[int]]:
        """Global ranks that hold the same shard, by shard index: [F][dp_replicate]."""
        return [list(column) for column in zip(*self.shard_rows(), strict=True)]

    def rollout_rows(self) -> list[list[int]]:
        """Global ranks of each generation replica, adjacent: [rollout_dp][rollout_tp]."""
        tp = self.rollout_tp
        return [list(range(r, r + tp)) for r in range(0, self.world_size, tp)]


def divisors(number: int) -> list[int]:
    """All divisors in rising order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _possible(values: Iterable[int]) -> str:
    return "possible: " + ", ".join(map(str, values))
