"""Reading one checkpoint on one rank: whether it holds what is asked for, and this rank's part.

Owns the order of a load, without any collective: what a rank reads depends on no other. Must not
know which checkpoints there are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sharding.checkpoint import files as files
from sharding.checkpoint import tensors as tensors
from sharding.checkpoint.adapters import check_base
from sharding.checkpoint.damage import block_checksums
from sharding.checkpoint.files import CheckpointError
from sharding.checkpoint.storage import SafeReader, read_tensors
from sharding.fsdp import reshard


def read_checkpoint(
    path: Path,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    train_state: Mapping[str, Any],
    *,
    rank: int,
    world_size: int,
) -> None:
    """Fill models and optimizers in place, and the random number generators of this rank.

    Those are restored with optimizers, on a world of the size that has saved them.

    Raises:
        DamagedCheckpoint: what is read is not as it was written.
        CheckpointError: it does not hold what is asked for.
    """
    for module in models.values():
        reshard(module)
    rng: dict[str, Tensor] = {}
    try:
        reader = SafeReader(path / files.TENSORS, block_checksums(path))
        metadata = reader.read_metadata()
        if optimizers and train_state["world_size"] == world_size:
            rng = tensors.rng_tensors(rank)
            rng = {name: t for name, t in rng.items() if name in metadata.state_dict_metadata}
        table = {**tensors.model_tensors(models), **rng}
        check_base(path, models)
        tensors.check_names(table, metadata)
        tensors.check_groups(models, optimizers, train_state["optimizers"])
        table |= tensors.optimizer_targets(models, optimizers, metadata)
        read_tensors(table, reader)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error
    if rng:
        tensors.restore_rng(rank, rng)
