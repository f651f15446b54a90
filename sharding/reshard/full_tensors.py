"""Full tensors under checkpoint names: the way into an engine that has no layout table.

Owns the assembly of whole parameters from the buckets of the reshard and their conversion to the
names of a checkpoint. Must not know engines.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from sharding.layout import whole_layout
from sharding.mesh import Mesh
from sharding.names import layer_of, persistent_buffers
from sharding.reshard.exchange import ReshardStats
from sharding.reshard.resharder import Resharder
from sharding.reshard.shards import sent_shapes

NamedTensors = list[tuple[str, Tensor]]


class FullTensors:
    """Gathers an FSDP2 module whole on every rank, some layers at a time.

    Construction and ``batches`` are collective as those of Resharder. A batch ends with the first
    layer that fills ``bucket_mib``, so that conversions that join or split the tensors of a layer
    (experts of a mixture) see all of them; the memory is two buckets, one batch and one layer.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        bucket_mib: float,
        rows: Mapping[str, int] | None = None,
    ):
        """rows: of parameters of which only so many first rows are sent, by name."""
        self._module, self._dtype, self._device = module, dtype, mesh.device
        self._shapes = sent_shapes(module, rows or {})
        self._batch_bytes = int(bucket_mib * 2**20)
        layouts = [whole_layout(self._shapes)] * mesh.dims.rollout_tp
        self._resharder = Resharder.from_layouts(
            module, mesh, layouts, dtype=dtype, bucket_mib=bucket_mib
        )

    @property
    def stats(self) -> ReshardStats:
        """Bytes of the last pass."""
        return self._resharder.stats

    def batches(self) -> Iterator[NamedTensors]:
        """Batches of (checkpoint name, tensor), which the consumer alone keeps alive.

        The tensors of a batch have one dtype: the rollout's, but for buffers of the checkpoint,
        which come last and as they are.
        """
        batch: dict[str, Tensor] = {}
        layer = size = 0
        for name, tensor in self._whole():
            if layer_of(name) != layer and size >= self._batch_bytes:
                yield self._converted(_taken(batch))
                size = 0
            layer = layer_of(name)
            batch[name] = tensor
            size += tensor.numel() * tensor.element_size()
            del tensor
        if batch:
            yield self._converted(_taken(batch))
        yield from map(self._converted, self._buffers())

    def _buffers(self) -> Iterator[dict[str, Tensor]]:
        """Every rank holds them whole; of one dtype at a time."""
        buffers = persistent_buffers(self._module)
        for dtype in sorted({b.dtype for b in buffers.values()}, key=str):
            yield {name: b.clone() for name, b in buffers.items() if b.dtype == dtype}

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters one after the other as their last element arrives."""
        open_: dict[str, Tensor] = {}
        missing: dict[str, int] = {}
        for bucket in self._resharder.buckets():
            for entry, block in bucket.views():
                name = entry.target
                if name not in open_:
                    shape = self._shapes[name]
                    open_[name] = torch.empty(shape, dtype=self._dtype, device=self._device)
                    missing[name] = open_[name].numel()
                view = open_[name].view(self._resharder.layout.targets[name])
                rows = slice(entry.dst_row, entry.dst_row + entry.rows)
                view[rows, entry.dst_col : entry.dst_col + entry.cols].copy_(block)
                missing[name] -= block.numel()
            for name in [name for name in open_ if missing[name] == 0]:
                yield name, open_.pop(name)

    def _converted(self, batch: dict[str, Tensor]) -> NamedTensors:
        """Checkpoint names and shapes; live names stay where transformers has no conversion."""
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion

        if isinstance(self._module, PreTrainedModel):
            batch = revert_weight_conversion(self._module, batch)
        return list(batch.items())


def _taken(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a batch holds, which is empty then."""
    held = dict(batch)
    batch.clear()
    return held
