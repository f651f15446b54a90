"""Models between uses: what rests on the host afterwards, and what an exception leaves alone."""

import pytest
import torch
from torch import nn

from ppo.config import OptimConfig
from ppo.errors import StopRequested
from ppo.models.learner import Learner, make_optimizer
from sharding.offload import host_storages
from tests.fake_device import fake_device

CPU = torch.device("cpu")


def learner_at_rest() -> Learner:
    module = nn.Linear(3, 1)
    learner = Learner(
        name="actor",
        module=module,
        device=CPU,
        optimizer=make_optimizer(module, OptimConfig(), CPU),
        optim=OptimConfig(),
        grad_clip=1.0,
        total_steps=1,
        param_offload=True,
        optimizer_offload=True,
    )
    learner.rest()
    return learner


def backward(learner: Learner) -> None:
    learner.module(torch.ones(2, 3)).sum().backward()


def test_an_exception_in_an_update_moves_nothing_to_the_host():
    """It is out of memory, or the others are gone: what ends the run is written down at once."""
    with fake_device():
        learner = learner_at_rest()
        with learner.updating():
            backward(learner)
            learner.step()
        assert host_storages(learner.module) and host_storages(learner.optimizer)
        for where in (learner.updating(), learner.on_device()):
            with pytest.raises(torch.OutOfMemoryError), where:
                backward(learner)
                raise torch.OutOfMemoryError
            assert not host_storages(learner.module)
        assert not host_storages(learner.optimizer)


def test_a_stop_during_a_forward_pass_leaves_the_model_at_rest():
    """A validation is abandoned so, and the iteration goes on to its save."""
    with fake_device():
        learner = learner_at_rest()
        at_rest = host_storages(learner.module)
        with pytest.raises(StopRequested), learner.on_device():
            assert not host_storages(learner.module)
            raise StopRequested("STOP file")
        assert host_storages(learner.module) == at_rest
