"""Offload: same tensors before and after, readable on the host in between, device memory freed."""

import threading
from concurrent.futures import Future
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sharding import host_memory
from sharding.adamw import NarrowAdamW
from sharding.fsdp import shard_model
from sharding.mesh import Mesh, ParallelDims, build_mesh, init_distributed
from sharding.offload import (
    _PLACES,
    _module_tensors,
    _optimizer_tensors,
    _Place,
    forget_state,
    home_device,
    host_storages,
    lend,
    new_state,
    offload_module,
    offload_optimizer,
    reload_module,
    reload_optimizer,
)
from tests.distributed import run_distributed
from tests.fake_device import fake_device
from tests.sharding.models import VOCAB, tiny_llama

CPU = torch.device("cpu")


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    tokens = torch.randint(0, VOCAB, (2, 9), generator=generator).to(device)
    logits = model(input_ids=tokens).logits
    F.cross_entropy(logits.view(-1, VOCAB), tokens.view(-1)).backward()
    optimizer.step()


def _locals(model: nn.Module) -> list[Tensor]:
    return [cast(DTensor, p).to_local().detach().clone() for p in model.parameters()]


def _train_with_rests(rank: int, world_size: int) -> None:
    """The mechanism itself on host tensors: vocabulary shards are uneven, so FSDP2 pads them."""
    mesh = build_mesh(ParallelDims(world_size=world_size, ranks_per_node=world_size), CPU)
    for state_dtype in (torch.float32, torch.bfloat16):
        _train_with_rests_of(mesh, state_dtype)


def _train_with_rests_of(mesh: Mesh, state_dtype: torch.dtype) -> None:
    results = []
    for rests in (False, True):
        model = tiny_llama()
        shard_model(model, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32)
        optimizer = NarrowAdamW(model.parameters(), state_dtype=state_dtype, lr=1e-2)
        places = (_Place(), _Place())
        for step in range(4):
            _train(model, optimizer, step)
            if rests:
                before, objects = _locals(model), [id(p) for p in model.parameters()]
                places[0].park([*_module_tensors(model)])
                places[1].park([*_optimizer_tensors(optimizer)])
                for place in places:
                    assert all(p.on_device.untyped_storage().nbytes() == 0 for p in place.parked)
                for value, resting in zip(before, _locals(model), strict=True):
                    assert torch.equal(value, resting)  # readable: checkpoints and the reshard do
                for parameter in model.parameters():
                    shard = cast(DTensor, parameter.detach())
                    shard.to_local().mul_(1)  # writable: a checkpoint is loaded
                for place in places:
                    place.restore()
                    assert not place.parked
                assert [id(p) for p in model.parameters()] == objects
            optimizer.zero_grad()
        results.append(_locals(model))
    for undisturbed, rested in zip(*results, strict=True):
        assert torch.equal(undisturbed, rested)


@pytest.mark.distributed
def test_training_is_bitwise_the_same_when_everything_rests_between_the_steps():
    run_distributed(_train_with_rests, 2)


def test_a_resting_parameter_knows_its_device():
    model = nn.Linear(2, 2)
    offload_module(model)
    assert home_device(model, model.weight) == CPU
    place = _PLACES[model]
    place.park([model.weight])
    place.parked[0] = place.parked[0]._replace(on_device=torch.empty(2, 2, device="meta"))
    assert home_device(model, model.weight) == torch.device("meta")


def test_what_is_written_while_it_rests_comes_back_with_it():
    weight = torch.arange(6.0).view(2, 3)[:, 1:]  # a view with an offset and strides
    alias, place = weight.view_as(weight), _Place()
    place.park([weight])
    weight.add_(10)
    place.restore()
    assert alias.tolist() == [[11.0, 12.0], [14.0, 15.0]]
    host = place._hosts[weight]
    place.park([weight])
    assert place.parked[0].host is host  # host memory is used again


def test_what_was_not_changed_on_the_device_goes_to_rest_without_a_copy():
    """Of two tensors of one size each has its own values again, though none are copied."""
    tensors, place = [torch.full((5,), value) for value in (1.0, 2.0)], _Place()
    place.park(tensors)
    place.restore()
    tensors.reverse()
    fresh = torch.full((5,), 3.0)
    with torch.no_grad():
        tensors[0].fill_(9.0)  # against the rule, which shows that it is not copied
    place.park([*tensors, fresh], changed=False)
    assert [tensor[0].item() for tensor in (*tensors, fresh)] == [2.0, 1.0, 3.0]
    place.restore()
    with torch.no_grad():
        tensors[0].fill_(9.0)
    place.park([*tensors, fresh])
    assert [tensor[0].item() for tensor in (*tensors, fresh)] == [9.0, 1.0, 3.0]


def test_state_that_is_made_at_rest_is_zero_and_never_on_the_device_together():
    with fake_device():
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight])
        [here] = new_state(optimizer, [torch.ones(3)])  # it does not rest
        assert here.tolist() == [1.0, 1.0, 1.0]
        offload_optimizer(optimizer)
        made: list[Tensor] = []

        def makers():
            for _ in range(3):
                assert all(tensor.untyped_storage().nbytes() == 0 for tensor in made)
                made.append(torch.ones(3))
                yield made[-1]

        state = new_state(optimizer, makers())
        assert [tensor.tolist() for tensor in state] == [[0.0, 0.0, 0.0]] * 3
        optimizer.state[weight] = dict(zip("abc", state, strict=True))
        state[1].fill_(2.0)
        reload_optimizer(optimizer, CPU)
        assert [tensor[0].item() for tensor in state] == [0.0, 2.0, 0.0]
        assert not host_storages(optimizer)


def test_what_a_reader_has_is_changed_on_the_device_and_copied_back_when_it_is_done():
    with fake_device():
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        offload_module(model)
        seen, reader = model.weight.detach(), Future()
        assert seen.untyped_storage().data_ptr() in host_storages(model)
        lend(model, reader)
        for _ in range(2):  # forward passes: nothing to wait for
            reload_module(model, CPU)
            offload_module(model, changed=False)
        reload_module(model, CPU)
        nn.init.zeros_(model.weight)
        update = threading.Thread(target=offload_module, args=(model,))
        update.start()
        update.join(0.1)
        assert update.is_alive() and seen.tolist() == [[1.0, 1.0]]
        reader.set_exception(OSError("the disk is full"))
        update.join()
        assert model.weight.tolist() == seen.tolist() == [[0.0, 0.0]]


def host_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Host memory that is kept for its state."""
    blocks = _PLACES[optimizer]._blocks._blocks.values()
    return sum(len(block) for of_a_kind in blocks for block, _ in of_a_kind)


def test_state_that_is_forgotten_gives_its_host_memory_back_and_new_state_rests_there_too():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    taken = []
    with fake_device():
        for _ in range(3):
            reload_optimizer(optimizer, CPU)
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            offload_optimizer(optimizer)
            taken.append(host_bytes(optimizer))
            forget_state(optimizer)
            new_state(optimizer, [torch.ones(3)])
            assert len(host_storages(optimizer)) == 1
            forget_state(optimizer)
    assert taken[0] == taken[1] == taken[2] > 2 * 4 * 64 * 65


def test_gradients_do_not_go_to_the_host():
    """One that is a view of what FSDP2 has reduced would take host memory for all of that."""
    with fake_device():
        model, reduced = nn.Linear(2, 1, bias=False), torch.ones(100)
        model.weight.grad = reduced[:2].view(1, 2)
        offload_module(model)
        left = reduced.untyped_storage().nbytes(), [p.num_bytes for p in _PLACES[model].parked]
        assert left == (400, [8])


def test_host_memory_is_taken_in_blocks_and_used_again(monkeypatch):
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 2048)
    tensors, place = [torch.full((n,), float(n)) for n in (100, 3, 700, 250)], _Place()
    copies = [tensor.clone() for tensor in tensors]
    for _ in range(2):
        place.park(tensors)
        hosts = [parked.host for parked in place.parked]
        assert all(torch.equal(t, copy) for t, copy in zip(tensors, copies, strict=True))
        assert [host.storage_offset() for host in hosts] == [0, 512, 0, 1024]
        # 400, 12 and 1000 bytes share a block, 2800 bytes are more than one
        assert [host.untyped_storage().nbytes() for host in hosts] == [2048, 2048, 4096, 2048]
        place.restore()
        assert all(torch.equal(t, copy) for t, copy in zip(tensors, copies, strict=True))
    assert [place._hosts[tensor] for tensor in tensors] == hosts


def test_tensors_of_the_host_are_left_alone():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    storages = [t.data_ptr() for t in (*model.parameters(), *_optimizer_tensors(optimizer))]
    offload_module(model)
    offload_optimizer(optimizer)
    assert model.weight.untyped_storage().nbytes() == 36
    reload_module(model, CPU)
    reload_optimizer(optimizer, CPU)
    assert storages == [t.data_ptr() for t in (*model.parameters(), *_optimizer_tensors(optimizer))]


@pytest.mark.gpu
def test_device_memory_is_free_while_a_module_and_its_optimizer_rest():
    with torch.device("cuda"):
        model = nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = model.weight.detach().clone()
    used = torch.cuda.memory_allocated()
    offload_module(model)
    offload_optimizer(optimizer)
    step = 512  # the allocator's smallest block: the fused optimizer counts on the device
    assert used - torch.cuda.memory_allocated() == 3 * 4 * 1024**2 + step
    assert model.weight.device.type == "cpu"
    assert model.weight.is_pinned()
    reload_module(model, torch.device("cuda", 0))
    reload_optimizer(optimizer, torch.device("cuda", 0))
    assert torch.equal(model.weight, expected)
    optimizer.step()


@pytest.mark.gpu
def test_a_sharded_model_trains_the_same_on_a_gpu_when_it_rests_on_the_host_between_steps():
    device, results = torch.device("cuda", 0), []
    with init_distributed(device):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), device)
        for rests in (False, True):
            model = tiny_llama(device=device)
            shard_model(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)
            for step in range(4):
                _train(model, optimizer, step)
                optimizer.zero_grad(set_to_none=True)
                if rests:
                    before = _locals(model)
                    offload_module(model)
                    offload_optimizer(optimizer)
                    for value, resting in zip(before, _locals(model), strict=True):
                        assert resting.device == CPU
                        assert torch.equal(value.cpu(), resting)
                    state = [*_module_tensors(model), *_optimizer_tensors(optimizer)]
                    assert all(t.device == CPU and t.is_pinned() for t in state)
                    reload_module(model, device)
                    reload_optimizer(optimizer, device)
                    state = [*_module_tensors(model), *_optimizer_tensors(optimizer)]
                    assert {t.device for t in state} == {device}  # the fused counter too
            results.append(_locals(model))
    for undisturbed, rested in zip(*results, strict=True):
        torch.testing.assert_close(undisturbed, rested)
