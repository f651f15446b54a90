"""Loading of weights: what is filled, and what a folder that does not fit says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ppo.models.weights import (
    HostCopy,
    SafetensorsFolder,
    WeightsError,
    load_weights,
    materialize,
    remember_names,
)
from sharding.mesh import init_distributed
from sharding.names import non_persistent_buffers
from tests.ppo.models.hf_models import FAMILIES, save_model

CPU = torch.device("cpu")


def load(folder: Path, *, dtype=torch.float32, group: Any = None, **kwargs: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    def whole() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder)

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    remember_names(module)
    materialize(module, param_device=CPU, device=CPU)
    load_weights(module, folder, source=HostCopy(whole, group), **kwargs)
    return module


def rewrite(folder: Path, change: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_and_computed_buffers_equal_from_pretrained(name, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / name, name)
    module, want = load(folder), AutoModelForCausalLM.from_pretrained(folder)
    for a, b in ((module.named_parameters(), want.named_parameters()),):
        for (key, tensor), (other, expected) in zip(a, b, strict=True):
            assert key == other and torch.equal(tensor, expected), key
    buffers = dict(want.named_buffers())
    assert non_persistent_buffers(module).keys() == buffers.keys() and buffers
    for key, buffer in non_persistent_buffers(module).items():
        assert torch.equal(buffer, buffers[key]), key


def test_dtype_is_the_models_not_the_files(tmp_path):
    folder = save_model(tmp_path / "qwen2", "qwen2")
    stored = load_file(folder / "model.safetensors")
    module = load(folder, dtype=torch.bfloat16)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, stored[name].bfloat16()), name


def test_a_tied_head_may_be_the_only_copy(tmp_path):
    def only_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    folder = rewrite(save_model(tmp_path / "qwen2", "qwen2"), only_head)
    module = load(folder)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert torch.equal(
        module.lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"]
    )


def test_tied_parameters_with_different_values_are_refused(tmp_path):
    def untie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    folder = rewrite(save_model(tmp_path / "qwen2", "qwen2"), untie)
    with pytest.raises(WeightsError, match="tie_word_embeddings=false"):
        load(folder)


def test_every_key_that_does_not_fit_is_named_with_its_file(tmp_path):
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.extra.weight"] = torch.zeros(2)
        tensors["lm_head.weight"] = torch.zeros(3, 32)
        tensors["model.rotary_emb.inv_freq"] = torch.zeros(4)  # old checkpoints have it

    folder = rewrite(save_model(tmp_path / "llama", "llama"), spoil)
    with pytest.raises(WeightsError) as caught:
        load(folder)
    lines = str(caught.value).splitlines()[1:]
    file = folder / "model.safetensors"
    assert sorted(line.strip() for line in lines) == sorted(
        [
            f"{folder}: model.norm.weight: missing",
            f"{file}: model.extra.weight: not a parameter of LlamaForCausalLM",
            f"{file}: lm_head.weight: shape [3, 32], the model needs [96, 32]",
        ]
    )


def test_optional_names_become_zero_and_ignored_keys_may_be_there(tmp_path):
    def swap(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["old.weight"] = torch.zeros(2)

    folder = rewrite(save_model(tmp_path / "llama", "llama"), swap)
    module = load(folder, optional=["model.norm.weight"], ignored=[r"^old\."])
    assert not module.model.norm.weight.any()


def test_a_truncated_or_absent_file_is_named(tmp_path):
    folder = save_model(tmp_path / "llama", "llama", max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first = folder / sorted(set(index["weight_map"].values()))[0]
    data = first.read_bytes()
    first.write_bytes(data[: len(data) // 2])
    with pytest.raises(WeightsError, match=first.name):
        load(folder)
    first.unlink()
    with pytest.raises(WeightsError, match=first.name):
        load(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"weight_map": {"a": ', "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b'{"metadata": {}}', "has no weight_map"),
        (b'["model-1.safetensors"]', "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
        (b'{"weight_map": {"a": 1}}', "names 1, which is no file"),
        (b'{"weight_map": {"a": "../b.safetensors"}}', "which is no file of its folder"),
    ],
)
def test_an_index_that_is_cut_or_odd_is_one_error(tmp_path, text, words):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(WeightsError, match=rf"model\.safetensors\.index\.json: .*{words}"):
        SafetensorsFolder(tmp_path)


def test_a_key_that_the_index_puts_into_the_wrong_file_is_named(tmp_path):
    folder = save_model(tmp_path / "llama", "llama", max_shard_size="20KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = index["weight_map"]
    files["model.norm.weight"] = next(f for f in files.values() if f != files["model.norm.weight"])
    path.write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        load(folder)


def test_converted_names_and_folders_without_safetensors_load_through_the_host(tmp_path, caplog):
    from transformers import AutoModelForCausalLM

    moe = save_model(
        tmp_path / "moe",
        "qwen2_moe",
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    binary = save_model(tmp_path / "binary", "llama")
    torch.save(load_file(binary / "model.safetensors"), binary / "pytorch_model.bin")
    (binary / "model.safetensors").unlink()
    with init_distributed(CPU), caplog.at_level("INFO", "ppo.models.weights"):
        for folder in (moe, binary):
            module = load(folder, group=torch.distributed.group.WORLD)
            want = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
            for name, parameter in module.named_parameters():
                assert torch.equal(parameter, want[name]), name
    assert "names are converted on loading" in caplog.text
    assert "the folder has no safetensors" in caplog.text


def test_buffers_that_only_the_constructor_computes_come_from_the_host_model(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = save_model(
        tmp_path / "neo", "gpt_neo", num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
    )
    with init_distributed(CPU):
        module = load(folder, group=torch.distributed.group.WORLD)
    buffers = dict(AutoModelForCausalLM.from_pretrained(folder).named_buffers())
    assert any(b.dtype == torch.bool for b in buffers.values())
    for name, buffer in non_persistent_buffers(module).items():
        assert torch.equal(buffer, buffers[name]), name
