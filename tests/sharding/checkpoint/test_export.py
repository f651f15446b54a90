"""Checkpoints as Hugging Face folders: they load with transformers and compute the same."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from sharding.checkpoint import Checkpointer, CheckpointError, export, export_hf
from sharding.checkpoint import __main__ as export_command
from sharding.fsdp import shard_model
from sharding.mesh import ParallelDims, build_mesh, init_distributed
from tests.peak_memory import PeakTracker
from tests.sharding.models import tiny_llama

TOKENS = torch.tensor([[1, 5, 9, 2]])
ONE = ParallelDims(world_size=1, ranks_per_node=1)


def _save(
    folder: Path, models: dict[str, Any], *, steps: Sequence[int] = (1,), **options: Any
) -> dict[str, torch.Tensor]:
    """Shard, save as steps of a run's folder, and return the outputs of before."""
    outputs = {name: _output(model) for name, model in models.items()}
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(ONE, torch.device("cpu"))
        for model in models.values():
            shard_model(model, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32)
        with Checkpointer(folder / "checkpoints", mesh, **options) as checkpointer:
            for step in steps:
                checkpointer.save(step, models, {}, {})
    return outputs


@torch.no_grad()
def _output(model: nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=TOKENS).logits


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_model_computes_the_same_with_its_head_tied_or_not(tmp_path, tied):
    generation = GenerationConfig(eos_token_id=[3, 7])
    outputs = _save(tmp_path, {"actor": tiny_llama(tied=tied)}, assets=[generation])
    out = export_hf(tmp_path, tmp_path / "hf")
    load: Any = AutoModelForCausalLM.from_pretrained
    model, report = load(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(_output(model), outputs["actor"])
    assert model.generation_config.eos_token_id == [3, 7]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    with pytest.raises(CheckpointError, match="not empty"):
        export_hf(tmp_path, out)
    with pytest.raises(CheckpointError, match="holds no model critic"):
        export_hf(tmp_path, tmp_path / "other", model="critic")


def test_a_value_model_is_exported_durably_as_a_classifier_with_one_label(tmp_path, monkeypatch):
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        pad_token_id=0,
    )
    config.num_labels = 1
    outputs = _save(tmp_path, {"critic": LlamaForSequenceClassification(config)})
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.fstat(fd).st_ino), fsync(fd)))
    out = export_hf(tmp_path, tmp_path / "hf", model="critic")
    # a machine that stops now has all of it: files, their names, and the name of the folder
    assert {path.stat().st_ino for path in (tmp_path, out, *out.rglob("*"))} <= synced
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert torch.equal(_output(model), outputs["critic"])


def _mixture(num_layers: int) -> Qwen2MoeForCausalLM:
    config = Qwen2MoeConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    return Qwen2MoeForCausalLM(config)


def test_fused_experts_are_exported_under_the_names_of_the_original_checkpoint(tmp_path):
    outputs = _save(tmp_path, {"actor": _mixture(2)})
    out = export_hf(tmp_path, tmp_path / "hf")
    header = (out / "model.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    names = json.loads(header[8 : 8 + size])
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in names
    assert torch.equal(_output(AutoModelForCausalLM.from_pretrained(out)), outputs["actor"])


def test_a_model_is_exported_file_by_file_and_never_whole_in_memory(tmp_path, monkeypatch):
    model = _mixture(6)
    num_bytes = sum(p.nbytes for p in model.parameters())
    _save(tmp_path, {"actor": model})
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    monkeypatch.setattr(export, "FILE_BYTES", 2 * layer)
    with PeakTracker(torch.device("cpu")) as tracker:
        out = export_hf(tmp_path, tmp_path / "hf", dtype=torch.float32)
    # a file of two layers, another copy of it where names are converted, the tensor that is read
    assert tracker.peak_bytes < 5 * layer < num_bytes
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == sorted({*index["weight_map"].values()}) and len(files) >= 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == num_bytes
    again = AutoModelForCausalLM.from_pretrained(out)
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(getattr(a, "full_tensor", lambda a=a: a)(), b), name


def test_the_command_exports_in_another_dtype_and_reports_errors(tmp_path, monkeypatch, capsys):
    outputs = _save(tmp_path, {"actor": tiny_llama()})
    out = tmp_path / "hf"
    command = ["checkpoint", "export", str(tmp_path), str(out), "--dtype", "bfloat16"]
    monkeypatch.setattr(sys, "argv", command)
    export_command.main()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    torch.testing.assert_close(_output(model).float(), outputs["actor"], atol=2e-2, rtol=0)
    with pytest.raises(SystemExit) as end:
        export_command.main()
    assert end.value.code == 2
    assert "not empty" in capsys.readouterr().err


def test_what_is_damaged_is_not_exported_and_an_older_checkpoint_is_where_a_run_is_meant(
    tmp_path, caplog
):
    outputs = _save(tmp_path, {"actor": tiny_llama()}, steps=(1, 2))
    newer = tmp_path / "checkpoints" / "step_00000002"
    [data] = (newer / "tensors").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[5000] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="wrong checksum in MiB 0"):
        export_hf(newer, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    out = export_hf(tmp_path, tmp_path / "hf")
    assert "wrong checksum" in caplog.text
    assert torch.equal(_output(AutoModelForCausalLM.from_pretrained(out)), outputs["actor"])


def test_a_save_can_hold_the_exported_model_too(tmp_path):
    outputs = _save(tmp_path, {"actor": tiny_llama()}, hf_models=["actor"], async_save=True)
    step = tmp_path / "checkpoints" / "step_00000001"
    assert "hf_actor/model.safetensors" in json.loads((step / "manifest.json").read_text())["files"]
    model = AutoModelForCausalLM.from_pretrained(step / "hf_actor")
    assert torch.equal(_output(model), outputs["actor"])
