"""What a checkpoint holds of an optimizer becomes its state, all of it and nothing else."""

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from sharding.checkpoint.tensors import optimizer_targets, optimizer_tensors
from sharding.offload import host_storages, offload_optimizer, reload_optimizer
from tests.fake_device import fake_device
from tests.sharding.test_offload import host_bytes

CPU = torch.device("cpu")


def test_moments_that_a_checkpoint_lacks_are_dropped_with_their_host_memory():
    """It was saved before the first update, or before a parameter had a gradient."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    models, optimizers = {"actor": model}, {"actor": optimizer}
    properties = TensorProperties(torch.float32)
    of_bias = {
        f"optimizer.actor.bias.{name}": TensorStorageMetadata(properties, torch.Size(size), [])
        for name, size in (("step", ()), ("exp_avg", (64,)), ("exp_avg_sq", (64,)))
    }
    taken = []
    with fake_device():
        for saved in ({}, of_bias, {}):
            reload_optimizer(optimizer, CPU)
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            offload_optimizer(optimizer)
            taken.append(host_bytes(optimizer))
            table = optimizer_targets(models, optimizers, Metadata(dict(saved)))
            assert table.keys() == saved.keys() == optimizer_tensors(models, optimizers).keys()
            assert not any(tensor.any() for tensor in table.values())
            assert bool(host_storages(optimizer)) == bool(saved)
    assert taken[0] == taken[1] > 2 * 4 * 64 * 65
