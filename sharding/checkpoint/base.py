"""The frozen model under adapters: a fingerprint by which a checkpoint knows it again.

Owns the sum over weights that does not depend on how they are sharded. Must not know files.
"""

from collections.abc import Mapping
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sharding.layout import view_2d
from sharding.mesh import Mesh
from sharding.reshard.checksums import checksum


def fingerprint(parameters: Mapping[str, Tensor], mesh: Mesh | None = None) -> str:
    """Eight hex digits of all values, names and dtypes; the same for any sharding.

    mesh: of a sharded model. Collective over a shard group then.
    """
    device = torch.device("cpu") if mesh is None else mesh.device
    sums = torch.stack([_local_checksum(p, device) for p in parameters.values()])
    if mesh is not None and mesh.dims.shard_size > 1:
        dist.all_reduce(sums, group=mesh.shard_group)  # modulo 2^64, as the checksum is
    pairs = zip(parameters.items(), sums.tolist(), strict=True)
    lines = sorted(f"{name} {p.dtype} {total}" for (name, p), total in pairs)
    return f"{crc32(chr(10).join(lines).encode()):08x}"


def _local_checksum(parameter: Tensor, device: torch.device) -> Tensor:
    """This rank's part of a parameter's checksum: of what it alone holds in its shard group."""
    if not isinstance(parameter, DTensor):
        return checksum(parameter.to(device))
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    row, col = offset if len(offset) == 2 else (offset[0], 0)
    width = view_2d(parameter.shape)[1]
    return checksum(parameter.to_local().to(device), row=row, col=col, width=width)
