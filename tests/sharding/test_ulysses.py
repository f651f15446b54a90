"""Ulysses on 4 ranks: exact exchange, and packed sharded training equal to plain transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ppo.config import FsdpConfig, MixedPrecisionConfig, ModelConfig
from ppo.models.build import build_causal_lm, build_value_model
from sharding.mesh import Mesh, ParallelDims, build_mesh
from sharding.ulysses import gather_heads, kv_repeats, scatter_heads, ulysses_problems
from tests.distributed import run_distributed
from tests.ppo.models.hf_models import (
    packed_inputs,
    padded_inputs,
    plain_scores,
    random_documents,
    save_model,
)

LENGTHS = [5, 1, 17, 9, 12, 3, 8, 10]  # 65 tokens: no multiple of 2 or 4
TEMPERATURE = 0.9
CASES = [  # (sp, fsdp_size, checkpointing, packed)
    (1, 4, False, True),
    (1, 2, True, False),
    (2, 4, True, True),
    (2, 2, False, True),
    (4, 4, False, True),
]


def test_kv_heads_are_repeated_no_more_than_needed():
    assert kv_repeats(num_heads=8, num_kv_heads=8, sp=4) == 1
    assert kv_repeats(num_heads=8, num_kv_heads=2, sp=2) == 1
    assert kv_repeats(num_heads=8, num_kv_heads=2, sp=4) == 2
    assert kv_repeats(num_heads=12, num_kv_heads=6, sp=4) == 2
    assert kv_repeats(num_heads=12, num_kv_heads=3, sp=2) == 2


def test_heads_that_do_not_divide_are_a_problem_that_lists_the_possible_degrees():
    assert ulysses_problems(num_heads=14, sp=7) == []
    (problem,) = ulysses_problems(num_heads=14, sp=4)
    assert "14 attention heads" in problem and "[1, 2, 7, 14]" in problem


def attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full attention, so that a wrong head or token anywhere shows."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    weights = torch.einsum("ihd,jhd->hij", q, k).softmax(-1)
    return torch.einsum("hij,jhe->ihe", weights, v)


def assert_exchange_is_exact(group: dist.ProcessGroup, heads: int, kv_heads: int) -> None:
    g = torch.Generator().manual_seed(0)
    sp, rank, n = dist.get_world_size(group), dist.get_rank(group), 3
    whole = [
        torch.randn(sp * n, h, d, dtype=torch.float64, generator=g, requires_grad=True)
        for h, d in ((heads, 4), (kv_heads, 4), (kv_heads, 5))
    ]
    mine = [t.detach().chunk(sp)[rank].requires_grad_() for t in whole]
    q, k, v = scatter_heads(mine[0], mine[1], mine[2], group)
    assert q.shape == (sp * n, heads // sp, 4)
    got = gather_heads(attend_all(q, k, v), group)
    want = attend_all(*whole)
    up = torch.randn(want.shape, dtype=torch.float64, generator=g)
    torch.testing.assert_close(got, want.chunk(sp)[rank])
    (got * up.chunk(sp)[rank]).sum().backward()
    (want * up).sum().backward()
    for part, t in zip(mine, whole, strict=True):
        assert t.grad is not None
        torch.testing.assert_close(part.grad, t.grad.chunk(sp)[rank])


def build(kind: Any, path: Path, mesh: Mesh, checkpointing: bool) -> Any:
    return kind(
        path,
        mesh,
        model_config=ModelConfig(path=str(path), tokenizer_path=str(path)),
        fsdp_config=FsdpConfig(mixed_precision=MixedPrecisionConfig(param_dtype="float32")),
        checkpointing=checkpointing,
        forward_only=False,
        dtype=torch.float32,
    )


def assert_gradients(module: Any, reference: Any) -> None:
    names = dict(module.named_parameters())
    for name, parameter in reference.named_parameters():
        if name not in names:  # the reference's own head under a critic
            continue
        difference = (names[name].grad.full_tensor() - parameter.grad).abs().max()
        assert difference <= 1e-5 * parameter.grad.abs().max(), (name, difference)


def assert_training_equals_plain(path: Path, mesh: Mesh, checkpointing: bool, packed: bool) -> None:
    from transformers import AutoModelForCausalLM

    documents = random_documents(LENGTHS)
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    logprobs, entropy = plain_scores(reference, documents, TEMPERATURE)
    want = (logprobs - 0.3 * entropy).sum() / len(logprobs)
    want.backward()

    module = build(build_causal_lm, path, mesh, checkpointing)
    dims = mesh.dims
    # Longest documents on the first ranks: very uneven rows, one rank has almost nothing.
    order = sorted(documents, key=len, reverse=True)
    share = -(-len(order) // dims.dp)
    mine = order[mesh.dp_rank * share :][:share]
    inputs = (
        packed_inputs(mine, sp=dims.sp, sp_rank=mesh.sp_rank) if packed else padded_inputs(mine)
    )
    scores = module(**inputs, temperature=TEMPERATURE, with_entropy=True)
    loss = (scores.logprobs - 0.3 * scores.entropy).sum() / len(logprobs)
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, want.detach(), rtol=1e-5, atol=1e-6)
    (loss * dims.world_size).backward()  # FSDP averages over all ranks, sp included
    assert_gradients(module, reference)


def assert_critic_equals_plain(path: Path, mesh: Mesh) -> None:
    from transformers import AutoModelForSequenceClassification

    documents = random_documents(LENGTHS)
    reference: Any = AutoModelForSequenceClassification.from_pretrained(path)
    hidden = torch.cat([reference.model(d[None]).last_hidden_state[0, :-1] for d in documents])
    (reference.score(hidden).square().sum()).backward()
    critic = build(build_value_model, path, mesh, False)
    share = -(-len(documents) // mesh.dims.dp)
    mine = documents[mesh.dp_rank * share :][:share]
    inputs = packed_inputs(mine, sp=mesh.dims.sp, sp_rank=mesh.sp_rank)
    del inputs["labels"]
    (critic(**inputs).square().sum() * mesh.dims.world_size).backward()
    assert_gradients(critic, reference)


def check_all(rank: int, world_size: int, folders: dict[str, Path]) -> None:
    for sp, fsdp_size, checkpointing, packed in CASES:
        dims = ParallelDims(world_size=4, ranks_per_node=4, fsdp_size=fsdp_size, sp=sp)
        mesh = build_mesh(dims, torch.device("cpu"))
        for heads, kv_heads in ((4, 4), (4, 2), (4, 1), (12, 6)):
            assert_exchange_is_exact(mesh.sp_group, heads, kv_heads)
        for name in ("qwen2", "gemma2", "gemma3_text"):
            assert_training_equals_plain(folders[name], mesh, checkpointing, packed)
        assert_critic_equals_plain(folders["critic"], mesh)
        if sp == 4:
            with pytest.raises(ValueError, match=r"6 attention heads do not divide by 4"):
                build(build_causal_lm, folders["six_heads"], mesh, False)
            with pytest.raises(ValueError, match="use_remove_padding"):
                module = build(build_causal_lm, folders["qwen2"], mesh, False)
                ids = torch.zeros(1, 4, dtype=torch.long)
                module(input_ids=ids, position_ids=ids, positions=ids[0, :0], labels=ids[0, :0])


@pytest.mark.distributed
def test_any_sp_and_sharding_trains_as_plain_transformers_without_packing(tmp_path):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folders = {n: save_model(tmp_path / n, n) for n in ("qwen2", "gemma2", "gemma3_text")}
    folders["six_heads"] = save_model(
        tmp_path / "six", "qwen2", num_attention_heads=6, num_key_value_heads=2
    )
    config = AutoConfig.from_pretrained(folders["qwen2"], num_labels=1, pad_token_id=0)
    folders["critic"] = tmp_path / "critic"
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folders["critic"])
    run_distributed(check_all, 4, folders)
