"""This rank's shards of an FSDP2 module, as rectangles that can be packed into a flat buffer.

Owns what is read from FSDP: names, placements, local tensors. Must not know who needs a shard.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from sharding.adapters import model_parameters
from sharding.fsdp import local_shard, reshard
from sharding.layout import view_2d
from sharding.mesh import Mesh
from sharding.reshard.geometry import Piece, Rect, Source
from sharding.reshard.merge import Merged


def named_shards(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters under their Hugging Face names; tied ones once, adapters merged into theirs."""
    return list(model_parameters(module).items())


def sent_shapes(module: nn.Module, rows: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter as an engine gets it: its first `rows` where they are given."""
    return {
        name: (rows.get(name, parameter.shape[0]), *parameter.shape[1:]) if parameter.ndim else ()
        for name, parameter in named_shards(module)
    }


def source_of(name: str, parameter: Tensor) -> Source:
    """How FSDP2 shards a parameter: the dim of the last (shard) axis; plain tensors are whole."""
    dim = 0
    if isinstance(parameter, DTensor):
        placement = parameter.placements[-1]
        assert isinstance(placement, Shard), (name, parameter.placements)
        dim = placement.dim
        assert dim == 0 or (dim == 1 and parameter.ndim == 2), (name, parameter.placements)
    return Source(name, *view_2d(parameter.shape), dim)


class Shards:
    """The local tensors [rows, cols] of all parameters, valid until the next training step.

    FSDP units that are still gathered are freed first. ``held``: the rectangle of each parameter
    that the plan expects here. ``mesh``: given, adapters are merged into what is packed; collective
    over the shard group then.
    """

    def __init__(self, module: nn.Module, held: Sequence[Rect], mesh: Mesh | None = None):
        reshard(module)
        self._held = held
        self._local: list[Tensor] = []
        named = named_shards(module)
        self.merged = Merged()
        if mesh is not None:
            self.merged.take(module, [name for name, _ in named], held, mesh)
        for (name, parameter), (_, _, rows, cols) in zip(named, held, strict=True):
            local = local_shard(parameter)
            assert local.numel() == rows * cols, (name, tuple(local.shape), rows, cols)
            self._local.append(local.reshape(rows, cols))

    def pack(self, out: Tensor, pieces: Sequence[Piece], relayed: Mapping[Piece, Tensor]) -> int:
        """Copy pieces one after the other into ``out``, cast to its dtype, without a host sync.

        Pieces that came over the network are in ``relayed``. Shards that are offloaded to the host
        come to the device one parameter at a time. Returns the bytes of the largest temporary
        tensor: such a copy, or a float32 sum with an adapter.
        """
        blocks = out.split([piece.size for piece in pieces]) if pieces else ()
        ready: list[tuple[Tensor, Tensor]] = []
        largest = 0
        offloaded: dict[int, list[tuple[Piece, Tensor]]] = {}
        for piece, flat in zip(pieces, blocks, strict=True):
            block = flat.view(piece.rows, piece.cols)
            if piece in relayed:
                ready.append((block, relayed[piece].view(piece.rows, piece.cols)))
            elif self._local[piece.source].device != out.device:
                offloaded.setdefault(piece.source, []).append((piece, block))
            elif piece.source in self.merged:
                block.copy_(self._merge(piece, self._rectangle(piece)))
                largest = max(largest, piece.size * 4)
            else:
                ready.append((block, self._rectangle(piece)))
        if ready:
            _copy(*zip(*ready, strict=True))
        return max([largest, *(self._copy_staged(group) for group in offloaded.values())])

    def _rectangle(self, piece: Piece) -> Tensor:
        row, col = self._place(piece)
        return self._local[piece.source][row : row + piece.rows, col : col + piece.cols]

    def _merge(self, piece: Piece, weight: Tensor) -> Tensor:
        """What the engine gets for a rectangle of a parameter, before it is cast."""
        if piece.source not in self.merged:
            return weight
        return self.merged.add(piece.source, weight, *self._place(piece))

    def _place(self, piece: Piece) -> tuple[int, int]:
        row, col = self._held[piece.source][:2]
        return piece.row - row, piece.col - col

    def _copy_staged(self, group: Sequence[tuple[Piece, Tensor]]) -> int:
        """Bring the local rows that a group of one parameter's pieces spans to the device."""
        places = [self._place(piece) for piece, _ in group]
        first = min(row for row, _ in places)
        last = max(row + piece.rows for (row, _), (piece, _) in zip(places, group, strict=True))
        rows = self._local[group[0][0].source][first:last]
        staged = rows.to(group[0][1].device, non_blocking=True)
        for (row, col), (piece, block) in zip(places, group, strict=True):
            weight = staged[row - first : row - first + piece.rows, col : col + piece.cols]
            block.copy_(self._merge(piece, weight))
        merged = 4 * staged.numel() if group[0][0].source in self.merged else 0
        return staged.numel() * staged.element_size() + merged


def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]
