"""Models built on meta, sharded and loaded, against transformers' from_pretrained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from ppo.config import FsdpConfig, MixedPrecisionConfig, ModelConfig
from ppo.errors import InputError
from ppo.models.build import build_causal_lm, build_value_model, is_packable
from ppo.models.forward import packing_obstacle
from ppo.models.hf_config import load_hf_config
from sharding.checkpoint import Checkpointer, export_hf
from sharding.checkpoint.wrapped import text_name
from sharding.mesh import ParallelDims, build_mesh, init_distributed
from sharding.reshard.full_tensors import FullTensors
from tests.distributed import run_distributed
from tests.ppo.models.hf_models import (
    FAMILIES,
    SHAPE,
    packed_inputs,
    padded_inputs,
    plain_scores,
    random_documents,
    save_model,
)

FLOAT32 = FsdpConfig(mixed_precision=MixedPrecisionConfig(param_dtype="float32"))
LENGTHS = [5, 1, 17, 9, 2, 12]
TEMPERATURE = 0.8


def model_config(path: Path, **kwargs: Any) -> ModelConfig:
    return ModelConfig(path=str(path), tokenizer_path=str(path), **kwargs)


def build(kind, path: Path, mesh, *, config: dict[str, Any] | None = None, **kwargs) -> nn.Module:
    options = {
        "fsdp_config": FLOAT32,
        "checkpointing": False,
        "forward_only": False,
        "dtype": torch.float32,
    }
    return kind(path, mesh, model_config=model_config(path, **config or {}), **options | kwargs)


def full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def assert_scores_and_gradients_are_those_of_transformers(path: Path, mesh) -> None:
    from transformers import AutoModelForCausalLM

    documents = random_documents(LENGTHS)
    ref = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    want, want_entropy = plain_scores(ref, documents, TEMPERATURE)
    up = torch.linspace(-1, 1, len(want))
    (want * up + 0.1 * want_entropy).sum().backward()
    for checkpointing, inputs in (
        (False, packed_inputs(documents)),
        (True, packed_inputs(documents)),
        (False, padded_inputs(documents)),
    ):
        module = build(build_causal_lm, path, mesh, checkpointing=checkpointing)
        assert is_packable(module)
        got = module(**inputs, temperature=TEMPERATURE, with_entropy=True)
        torch.testing.assert_close(got.logprobs, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.entropy, want_entropy, rtol=1e-5, atol=1e-5)
        (got.logprobs * up + 0.1 * got.entropy).sum().backward()  # equal on all ranks: mean = own
        names = dict(module.named_parameters())
        assert names.keys() == dict(ref.named_parameters()).keys()
        for name, parameter in ref.named_parameters():
            assert parameter.grad is not None
            scale = parameter.grad.abs().max()
            difference = (full(names[name].grad) - parameter.grad).abs().max()  # type: ignore
            assert difference <= 1e-5 * scale, (name, difference, scale)


def assert_frozen_bfloat16_model_scores_without_gradients(path: Path, mesh) -> None:
    module = build(
        build_causal_lm,
        path,
        mesh,
        fsdp_config=FsdpConfig(),
        forward_only=True,
        dtype=torch.bfloat16,
    )
    with torch.no_grad():
        scores = module(**packed_inputs(random_documents(LENGTHS)))
    assert scores.logprobs.dtype == torch.float32 and scores.logprobs.isfinite().all()
    assert not any(p.requires_grad for p in module.parameters())
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def assert_log_probs_repeat_bitwise(path: Path, mesh) -> None:
    """Else the ratio of the first mini-batch would not be exactly 1."""
    inputs = packed_inputs(random_documents(LENGTHS))
    for fsdp in (FLOAT32, FsdpConfig()):
        module = build(build_causal_lm, path, mesh, fsdp_config=fsdp, checkpointing=True)
        with torch.no_grad():
            old = module(**inputs, temperature=TEMPERATURE, with_entropy=True)
        new = module(**inputs, temperature=TEMPERATURE)
        assert torch.equal(new.logprobs, old.logprobs)
        new.logprobs.sum().backward()


def assert_critic_starts_at_zero_and_takes_a_stored_head(path: Path, own: Path, mesh) -> None:
    inputs = packed_inputs(random_documents(LENGTHS))
    del inputs["labels"]
    critic = build(build_value_model, path, mesh)
    names = dict(critic.named_parameters())
    assert "score.weight" in names and "lm_head.weight" not in names
    values = critic(**inputs)
    assert values.shape == inputs["positions"].shape and not values.any()
    values.sum().backward()
    assert full(names["score.weight"].grad).any()  # type: ignore

    stored = build(build_value_model, own, mesh)
    reward_model = _stored_value_model(own)
    hidden = torch.cat(
        [reward_model.model(d[None]).last_hidden_state[0, :-1] for d in random_documents(LENGTHS)]
    )
    torch.testing.assert_close(
        stored(**inputs), reward_model.score(hidden)[:, 0], rtol=1e-5, atol=1e-5
    )


def _stored_value_model(path: Path):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(path)


def assert_a_model_that_is_not_packed_scores_padded_rows(path: Path, mesh) -> None:
    from transformers import AutoModelForCausalLM

    documents = random_documents(LENGTHS)
    ref = AutoModelForCausalLM.from_pretrained(path)
    want, _ = plain_scores(ref, documents, TEMPERATURE)
    padded = {"attn_implementation": "eager"}
    module = build(build_causal_lm, path, mesh, checkpointing=True, config=padded)
    assert not is_packable(module)
    got = module(**padded_inputs(documents), temperature=TEMPERATURE)
    torch.testing.assert_close(got.logprobs, want, rtol=1e-5, atol=1e-5)
    got.logprobs.sum().backward()
    with pytest.raises(ValueError, match="padded rows only"):
        module(**packed_inputs(documents))


def assert_no_scored_token_still_runs_backward(path: Path, mesh) -> None:
    module = build(build_causal_lm, path, mesh)
    inputs = packed_inputs(random_documents([4]))
    inputs |= {"positions": inputs["positions"][:0], "labels": inputs["labels"][:0]}
    scores = module(**inputs)
    assert scores.logprobs.shape == (0,)
    (scores.logprobs.sum() * 0.0).backward()
    assert all(p.grad is not None and not full(p.grad).any() for p in module.parameters())


def check_all(rank: int, world_size: int, folders: dict[str, Path]) -> None:
    mesh = build_mesh(
        ParallelDims(world_size=world_size, ranks_per_node=world_size), torch.device("cpu")
    )
    for name in FAMILIES:
        assert_scores_and_gradients_are_those_of_transformers(folders[name], mesh)
    # Its names in the files are not the model's: loaded through rank 0's host copy.
    assert_scores_and_gradients_are_those_of_transformers(folders["mixtral"], mesh)
    assert_log_probs_repeat_bitwise(folders["gemma3_text"], mesh)
    assert_frozen_bfloat16_model_scores_without_gradients(folders["gemma2"], mesh)
    assert_critic_starts_at_zero_and_takes_a_stored_head(folders["qwen2"], folders["critic"], mesh)
    assert_no_scored_token_still_runs_backward(folders["qwen2"], mesh)
    assert_a_model_that_is_not_packed_scores_padded_rows(folders["lfm2"], mesh)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    root = tmp_path_factory.mktemp("models")
    made = {name: save_model(root / name, name) for name in FAMILIES}
    # Several files with an index, and shapes that two ranks cannot share evenly.
    made["llama"] = save_model(root / "files", "llama", max_shard_size="20KB", intermediate_size=45)
    made["mixtral"] = save_model(root / "mixtral", "mixtral", num_local_experts=3)
    layers = ["conv", "full_attention"]
    made["lfm2"] = save_model(root / "lfm2", "lfm2", layer_types=layers, block_multiple_of=8)
    config = AutoConfig.from_pretrained(made["qwen2"], num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(root / "critic")
    return made | {"critic": root / "critic"}


@pytest.mark.distributed
def test_sharded_models_score_as_transformers_does(folders):
    run_distributed(check_all, 2, folders)


GEMMA3 = {
    "text_config": SHAPE | FAMILIES["gemma3_text"],
    "vision_config": {
        **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    },
    "image_token_index": 90,
    "mm_tokens_per_image": 4,
}


@pytest.mark.parametrize(
    ("family", "extra"),
    [("gpt_neox", {"rotary_pct": 0.5, "attention_dropout": 0.0}), ("gemma3", GEMMA3)],
)
def test_names_that_transformers_looks_up_by_class_survive_sharding(tmp_path, family, extra):
    """FSDP renames classes: actor and critic load, and engines get the names of the files."""
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / family, family, **extra)
    documents = random_documents([5, 9])
    want, _ = plain_scores(
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), documents, 0.8
    )
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
        actor = build(build_causal_lm, folder, mesh, forward_only=True)
        inputs = packed_inputs(documents)
        with torch.no_grad():
            got = actor(**inputs, temperature=0.8).logprobs
            critic = build(build_value_model, folder, mesh, forward_only=True)
            del inputs["labels"]
            assert critic(**inputs).shape == got.shape
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        tensors = FullTensors(actor, mesh, dtype=torch.float32, bucket_mib=8)
        sent = {name: tensor for batch in tensors.batches() for name, tensor in batch}
    stored = load_file(folder / "model.safetensors")
    if family == "gemma3":  # the language model alone is trained, and sent as one
        stored = {n: t for name, t in stored.items() if (n := text_name(name)) is not None}
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize(
    "family",
    [
        "granite",
        "afmoe",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("cohere", "ernie4_5")),
    ],
)
def test_a_critic_of_a_family_without_a_classifier_is_exported_and_judges(tmp_path, family):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    noise: dict[str, Any] = experts if family == "afmoe" else {}
    folder = save_model(tmp_path / family, family, **noise, attention_dropout=0.5)
    inputs = packed_inputs(random_documents([5, 9]))
    del inputs["labels"]
    with init_distributed(torch.device("cpu")), torch.no_grad():
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
        critic: Any = build(build_value_model, folder, mesh)
        for parameter in critic.parameters():
            parameter.add_(0.1)
        want = critic(**inputs)
        with Checkpointer(tmp_path / "run" / "checkpoints", mesh) as checkpoints:
            checkpoints.save(1, {"critic": critic}, {}, {})
        out = export_hf(tmp_path / "run", tmp_path / "out", model="critic")
        again: Any = build(build_value_model, out, mesh, needs_head=True)
        assert want.abs().max() > 0.1 and torch.equal(again(**inputs), want)
    keys = json.loads((out / "config.json").read_text())
    assert keys["attention_dropout"] == 0.5
    assert keys["architectures"][0].endswith("ForSequenceClassification")


def test_a_tied_model_that_is_stored_under_either_name_makes_an_actor_and_a_critic(tmp_path):
    folder = save_model(tmp_path / "qwen2", "qwen2")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    inputs = packed_inputs(random_documents([5, 9]))
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
        for names in (["model.embed_tokens.weight"], ["lm_head.weight"]):
            stored = tensors | dict.fromkeys(names, embedding)
            save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
            actor = build(build_causal_lm, folder, mesh)
            critic = build(build_value_model, folder, mesh)
            for module in (actor, critic):
                found = dict(module.named_parameters())["model.embed_tokens.weight"]
                assert torch.equal(full(found), embedding), names
            assert not critic(**{k: v for k, v in inputs.items() if k != "labels"}).any()
        other = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 1}
        save_file(tensors | other, folder / "model.safetensors", metadata={"format": "pt"})
        for kind in (build_causal_lm, build_value_model):
            with pytest.raises(InputError, match="tie_word_embeddings=false"):
                build(kind, folder, mesh)


def test_a_padding_id_outside_of_the_vocabulary_is_left_out(tmp_path):
    folder = save_model(tmp_path / "qwen2", "qwen2")
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": 96}
    (folder / "config.json").write_text(json.dumps(config))
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
        module = build(build_causal_lm, folder, mesh)
        scores = module(**packed_inputs(random_documents([5, 9])))
    assert scores.logprobs.isfinite().all()


@pytest.mark.parametrize(
    ("model_type", "extra", "reason"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "not causal"),
        ("mamba", {}, "layers of type linear_attention"),
        ("rwkv", {}, "state from token to token"),
        ("gpt_oss", {"num_local_experts": 2}, None),
        ("bloom", {}, "AttentionInterface"),
        ("llama", {}, None),
        ("mistral", {}, None),
        ("qwen2_moe", {}, None),
    ],
)
def test_the_reason_against_packing_is_named(model_type, extra, reason):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE | extra))
    obstacle = packing_obstacle(module, compared=False)
    assert obstacle is None if reason is None else reason in str(obstacle)


def test_override_config_refuses_a_key_that_the_model_lacks(tmp_path):
    folder = save_model(tmp_path / "llama", "llama")
    config = load_hf_config(folder, model_config(folder, override_config={"rms_norm_eps": 0.5}))
    assert config.rms_norm_eps == 0.5
    with pytest.raises(ValueError, match=r"model.override_config.rms_norm: .* no such key"):
        load_hf_config(folder, model_config(folder, override_config={"rms_norm": 0.5}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{nope", "not a valid JSON"),
        ('{"model_type": "nope"}', "model type `nope`"),
        ('{"model_type": "qwen2", "hidden_size": "64"}', "hidden_size"),
        ('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}', "set model.trust_remote"),
    ],
)
def test_a_configuration_that_does_not_load_is_wrong_input(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=f"{tmp_path}: no configuration that loads: .*{words}"):
        load_hf_config(tmp_path, model_config(tmp_path))


def test_numbers_in_weights_that_are_not_finite_are_wrong_input(tmp_path):
    folder = save_model(tmp_path / "qwen2", "qwen2")
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
        for number in (torch.nan, torch.inf):
            tensors = load_file(folder / "model.safetensors")
            tensors["model.norm.weight"][1] = number
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            with pytest.raises(InputError, match=r"model\.norm\.weight holds numbers that are not"):
                build(build_causal_lm, folder, mesh)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"model_type": "qwen2", "quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"its weights are quantised \(gptq\)",
        ),
        ({"model_type": "bert"}, "is no decoder: bert reads a text"),
        ({"model_type": "qwen2", "num_attention_heads": 0}, "no model can be built by its config"),
    ],
)
def test_a_configuration_of_no_decoder_is_wrong_input(tmp_path, keys, words):
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
        with pytest.raises(InputError, match=f"{tmp_path}: {words}"):
            build(build_causal_lm, tmp_path, mesh)


def test_what_is_random_in_training_has_no_effect(tmp_path, caplog):
    noise = {"router_jitter_noise": 0.5, "attention_dropout": 0.5, "num_local_experts": 4}
    noise |= {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    folder = save_model(tmp_path / "mixtral", "mixtral", **noise)
    documents = random_documents([9, 14])
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
        module = build(build_causal_lm, folder, mesh)
        got = module(**packed_inputs(documents)).logprobs
    want, _ = plain_scores(AutoModelForCausalLM.from_pretrained(folder), documents, 1.0)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert got.requires_grad
    assert "router_aux_loss_coef=0.02) is no part of the losses" in caplog.text
