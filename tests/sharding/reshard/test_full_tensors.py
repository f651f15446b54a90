"""The generic path: whole tensors under the names that a checkpoint on disk has."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2MoeConfig

from sharding.fsdp import shard_model
from sharding.mesh import ParallelDims, build_mesh
from sharding.reshard.full_tensors import FullTensors
from tests.distributed import run_distributed

CPU = torch.device("cpu")


def mixture():
    """Experts that transformers keeps as one 3-D tensor, and a checkpoint as one each."""
    return Qwen2MoeConfig(
        vocab_size=101,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
    )


def unknown_to_the_tables():
    return GPT2Config(
        vocab_size=101,
        n_embd=16,
        n_layer=3,
        n_head=2,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )


def seeded(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def gather_both(rank: int, world_size: int, folder: Path) -> list[int]:
    num_batches = []
    for config in (mixture(), unknown_to_the_tables()):
        model = seeded(config)
        saved = load_file(folder / config.model_type / "model.safetensors")
        dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, rollout_tp=2)
        mesh = build_mesh(dims, CPU)
        shard_model(model, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32)
        gatherer = FullTensors(model, mesh, dtype=torch.float32, bucket_mib=0.012)
        for _ in range(2):
            batches = list(gatherer.batches())
            got = {name: tensor for batch in batches for name, tensor in batch}
            assert sum(map(len, batches)) == len(got)
            assert got.keys() == saved.keys(), got.keys() ^ saved.keys()
            for name, tensor in saved.items():
                assert torch.equal(got[name], tensor), name
        assert gatherer.stats.received_bytes == gatherer.stats.lower_bound_bytes
        num_batches.append(len(batches))
    return num_batches


@pytest.mark.distributed
def test_full_tensors_have_the_names_and_values_of_a_checkpoint(tmp_path):
    for config in (mixture(), unknown_to_the_tables()):
        seeded(config).save_pretrained(tmp_path / config.model_type)
    for num_batches in run_distributed(gather_both, 2, tmp_path):
        assert min(num_batches) > 2
