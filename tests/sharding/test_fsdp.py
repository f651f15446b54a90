"""FSDP2 wrapping: gradients, names, precision and what stays gathered."""

from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from sharding.activations import block_mlps, checkpoint_activations, offload_activations
from sharding.adamw import HostAdamW
from sharding.fsdp import gradient_norm, shard_model, transformer_layers, without_gradients
from sharding.mesh import Mesh, ParallelDims, build_mesh, init_distributed
from tests.distributed import run_distributed
from tests.sharding.models import tiny_llama, token_loss, tokens_of

CPU = torch.device("cpu")


def _reference(world_size: int) -> dict[str, Tensor]:
    """Gradients of the mean loss over all tokens of all ranks, without sharding."""
    model = tiny_llama()
    total = sum(tokens_of(r).numel() - 1 for r in range(world_size))
    loss = torch.stack([token_loss(model, tokens_of(r)) for r in range(world_size)]).sum()
    (loss / total).backward()
    return {name: cast(Tensor, p.grad) for name, p in model.named_parameters()}


def _sharded(
    mesh: Mesh, *, checkpointing: bool = False, selective: bool = False, rows: int = 0, **options
) -> nn.Module:
    model = tiny_llama(device=mesh.device)
    model.train()
    if rows:
        block_mlps(model, rows)
    if checkpointing:
        checkpoint_activations(model, selective=selective)
        if not selective:
            offload_activations(model)
    precision = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
    shard_model(model, mesh, **{**precision, **options})
    return model


def _gradients(model: nn.Module, mesh: Mesh, world_size: int) -> dict[str, Tensor]:
    """Two micro-batches, the loss of each rank scaled as the ranks that FSDP averages over."""
    total = sum(tokens_of(r).numel() - 1 for r in range(world_size))
    tokens = tokens_of(mesh.rank).to(mesh.device)
    for _ in range(2):
        (token_loss(model, tokens) * world_size / total / 2).backward()
    grads = {n: cast(Tensor, p.grad).to(mesh.device) for n, p in model.named_parameters()}
    return {name: cast(DTensor, grad).full_tensor() for name, grad in grads.items()}


CASES = {
    "FULL_SHARD": ({}, {}),
    "FULL_SHARD, checkpointing": ({}, {"checkpointing": True}),
    "FULL_SHARD, selective": ({}, {"checkpointing": True, "selective": True}),
    "FULL_SHARD, MLPs in blocks": ({}, {"checkpointing": True, "rows": 2}),
    "FULL_SHARD, no prefetch": ({}, {"forward_prefetch": False, "backward_prefetch": False}),
    "SHARD_GRAD_OP": ({}, {"reshard_after_forward": False}),
    "inner units": ({}, {"min_num_params": 4000, "checkpointing": True}),
    "HYBRID_SHARD in rollout order": ({"rollout_tp": 2}, {}),
    "HYBRID_SHARD 2 x 2": ({"fsdp_size": 2, "rollout_tp": 2}, {}),
    "HYBRID_SHARD 2 x 2 with sp": ({"fsdp_size": 2, "sp": 2}, {"checkpointing": True}),
    "NO_SHARD": ({"fsdp_size": 1}, {}),
    "dim 1": ({}, {"shard_dim1": lambda name, p: "o_proj" in name or "down_proj" in name}),
    "host memory": ({}, {"offload_policy": True}),
}


def _check_gradients(rank: int, world_size: int, device: torch.device = CPU) -> dict[str, float]:
    expected = _reference(world_size)
    norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    worst = {}
    for case, (degrees, options) in CASES.items():
        dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, **degrees)
        if dims.problems():  # fewer GPUs than ranks on the CPU
            continue
        mesh = build_mesh(dims, device)
        model = _sharded(mesh, **options)
        found = {n: g.cpu() for n, g in _gradients(model, mesh, world_size).items()}
        torch.testing.assert_close(gradient_norm(model, device).cpu(), norm, msg=case)
        assert found.keys() == expected.keys(), case
        worst[case] = max(
            ((found[n] - g).abs().max() / g.abs().max()).item() for n, g in expected.items()
        )
    return worst


def _check_behaviour(rank: int, world_size: int) -> None:
    mesh = build_mesh(ParallelDims(world_size=world_size, ranks_per_node=world_size), CPU)
    names = list(tiny_llama().state_dict())
    model = _sharded(mesh, checkpointing=True)
    assert list(model.state_dict()) == names

    with pytest.raises(KeyboardInterrupt), without_gradients(model):
        raise KeyboardInterrupt  # before the first forward pass
    # a forward pass without gradients leaves nothing gathered, and no record of it behind
    with without_gradients(model):
        model(input_ids=tokens_of(rank))
        assert not isinstance(model.get_parameter("lm_head.weight"), DTensor)  # the root stays
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert not model._get_fsdp_state()._comm_ctx.post_forward_order  # pyright: ignore

    frozen = _sharded(mesh, forward_only=True)
    with torch.no_grad():
        frozen(input_ids=tokens_of(rank))
    assert all(isinstance(p, DTensor) for p in frozen.parameters())  # the root reshards by itself

    seen = []
    half = _sharded(mesh, param_dtype=torch.bfloat16)
    down = half.get_submodule("model.layers.1.mlp.down_proj")
    down.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, m.weight.dtype)))
    half(input_ids=tokens_of(rank)).logits.float().sum().backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert {p.grad.dtype for p in half.parameters()} == {torch.float32}  # pyright: ignore

    aligned = _sharded(mesh, shard_dim1=lambda name, p: "o_proj" in name or "norm" in name)
    placements = {n: cast(DTensor, p).placements for n, p in aligned.named_parameters()}
    assert placements["model.layers.0.self_attn.o_proj.weight"] == (Shard(1),)
    assert placements["model.norm.weight"] == (Shard(0),)  # one dim only: falls back

    with torch.device("meta"):
        empty = tiny_llama()
    shard_model(empty, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32)
    assert all(isinstance(p, DTensor) and p.is_meta for p in empty.parameters())


def _check_steps_on_the_host(rank: int, world_size: int) -> None:
    """Gradients that leave as they are reduced give the step of those that stay."""
    dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, fsdp_size=2)
    mesh = build_mesh(dims, CPU)
    plain, model = _sharded(mesh), _sharded(mesh)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    mine = HostAdamW(model, state_dtype=torch.float32, lr=0.1)
    for _ in range(2):
        for module in (plain, model):
            for last in (False, True):
                cast(FSDPModule, module).set_requires_all_reduce(last)
                token_loss(module, tokens_of(rank)).backward()
        norm = gradient_norm(plain, CPU)
        assert torch.equal(gradient_norm(model, CPU, mine.gradients()), norm)
        nn.utils.clip_grads_with_norm_(plain.parameters(), 1.0, norm)
        mine.scale(1.0, norm)
        for optimizer in (theirs, mine):
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(cast(DTensor, p).to_local(), cast(DTensor, q).to_local())


def _check_all(rank: int, world_size: int) -> dict[str, float]:
    _check_behaviour(rank, world_size)
    _check_steps_on_the_host(rank, world_size)
    return _check_gradients(rank, world_size)


@pytest.mark.distributed
def test_sharded_gradients_equal_unsharded_ones_with_uneven_token_counts_in_every_strategy():
    for worst in run_distributed(_check_all, 4):
        assert max(worst.values()) < 1e-5, worst


def test_layers_are_found_by_the_classes_that_the_model_declares():
    model = tiny_llama()
    assert transformer_layers(model) == list(model.model.layers)
    undeclared = nn.Module()  # as BioGPT
    undeclared.adapters = nn.ModuleList([nn.Linear(1, 1)] * 3)
    undeclared.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert transformer_layers(undeclared) == list(undeclared.layers)
    with pytest.raises(ValueError, match="Linear: no ModuleList"):
        transformer_layers(nn.Linear(2, 2))


def _check_gpu(rank: int, world_size: int) -> dict[str, float]:
    return _check_gradients(rank, world_size, torch.device("cuda", rank))


@pytest.mark.gpu
@pytest.mark.distributed
def test_sharded_gradients_equal_unsharded_ones_over_nccl():
    world_size = next(n for n in (4, 2, 1) if n <= torch.cuda.device_count())
    for worst in run_distributed(_check_gpu, world_size, device_type="cuda", timeout_s=120):
        assert worst and max(worst.values()) < 1e-4, worst


def test_units_prefetch_their_neighbours():
    # read back from FSDP2's state: the public setters have no getters
    with init_distributed(CPU):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), CPU)
        model = _sharded(mesh)
        units = [model, *transformer_layers(model)]
        states = [cast(FSDPModule, unit)._get_fsdp_state() for unit in units]
        root, *layers = states
        assert [s._states_to_forward_prefetch for s in states[:-1]] == [[s] for s in layers]
        assert root._states_to_backward_prefetch == [layers[-1]]
        assert layers[2]._states_to_backward_prefetch == [layers[1]]
        assert layers[0]._states_to_backward_prefetch == [layers[0]]  # nothing before it
