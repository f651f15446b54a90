"""Adapters merged into shards: W + s B A of the rectangles that this rank holds.

Owns bringing the small matrices to where they are needed, and the sum, in float32. B is sharded by
rows as W is, so that most of it is there already; A, which every row needs, is gathered once a
reshard. No full weight exists anywhere. Must not know buckets or plans.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sharding.adapters import A, B, adapters_of
from sharding.fsdp import local_shard
from sharding.mesh import Mesh
from sharding.reshard.exchange import all_gather_flat
from sharding.reshard.geometry import Rect


class Merged:
    """What adapters add to this rank's shards, valid until the next training step."""

    def __init__(self) -> None:
        self.received_bytes = 0
        """of adapters, from other ranks"""
        self.held_bytes = 0
        """of what was gathered"""
        self._scale = 1.0
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}

    def take(
        self, module: nn.Module, names: Sequence[str], held: Sequence[Rect], mesh: Mesh
    ) -> None:
        """The adapters of a module, if it has any. Collective over the shard group then.

        names, held: of each parameter, by its number; the rectangle that this rank holds.
        """
        adapters = adapters_of(module)
        if adapters is None:
            return
        self._scale = adapters.scale
        numbers = {name: number for number, name in enumerate(names)}
        get, layers = module.get_parameter, adapters.layers
        whole = self._gather([get(f"{name}.{A}") for name in layers], mesh)
        lows = dict(zip(layers, whole, strict=True))
        apart = [name for name in layers if not _is_row_sharded(get(f"{name}.weight"))]
        whole = self._gather([get(f"{name}.{B}") for name in apart], mesh)
        ups = dict(zip(apart, whole, strict=True))
        for name in layers:
            number = numbers[f"{name}.weight"]
            _, col, _, cols = held[number]
            up = ups[name] if name in ups else local_shard(get(f"{name}.{B}")).to(mesh.device)
            self._parts[number] = up, lows[name][:, col : col + cols]

    def __contains__(self, number: int) -> bool:
        """Whether a parameter, by its number, has an adapter."""
        return number in self._parts

    def add(self, number: int, weight: Tensor, row: int, col: int) -> Tensor:
        """float32 W + s B A of a rectangle `weight` whose corner is [row, col] of the shard."""
        up, low = self._parts[number]
        rows, cols = weight.shape
        delta = up[row : row + rows] @ low[:, col : col + cols]
        return delta.mul_(self._scale).add_(weight)

    def _gather(self, sharded: Sequence[Tensor], mesh: Mesh) -> list[Tensor]:
        """Whole float32 tensors [n, m] on the device of such as are sharded by rows, by one
        collective."""
        if mesh.dims.shard_size == 1 or not sharded:
            return [local_shard(tensor).to(mesh.device) for tensor in sharded]
        size = mesh.dims.shard_size
        rows = [-(-tensor.shape[0] // size) for tensor in sharded]
        sizes = [n * tensor.shape[1] for n, tensor in zip(rows, sharded, strict=True)]
        mine = torch.zeros(sum(sizes), device=mesh.device)
        for block, tensor in zip(mine.split(sizes), sharded, strict=True):
            local = local_shard(tensor)
            block[: local.numel()] = local.reshape(-1)
        everyone = mine.new_empty(size, len(mine))
        all_gather_flat(everyone.view(-1), mine, group=mesh.shard_group)
        self.received_bytes += (size - 1) * mine.numel() * mine.element_size()
        self.held_bytes += everyone.numel() * everyone.element_size()
        return [
            block.reshape(size * n, -1)[: tensor.shape[0]]
            for block, n, tensor in zip(everyone.split(sizes, 1), rows, sharded, strict=True)
        ]


def _is_row_sharded(weight: Tensor) -> bool:
    return not isinstance(weight, DTensor) or weight.placements[-1].is_shard(0)
