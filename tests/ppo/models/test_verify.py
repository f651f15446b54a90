"""The start comparison: a model's forward here against transformers' own, on a small copy."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ppo.errors import InputError
from ppo.logprobs import LogitTransform
from ppo.models.build import build_causal_lm
from ppo.models.forward import Findings, plan_forward
from ppo.models.hf_config import load_hf_config
from ppo.models.small_copy import build_small_copy
from ppo.models.tiny import build_tiny_model
from ppo.models.verify import examine
from sharding.mesh import ParallelDims, build_mesh, init_distributed
from tests.ppo.models.families import EXTRA, families, outcomes
from tests.ppo.models.hf_models import (
    SHAPE,
    packed_inputs,
    padded_inputs,
    plain_scores,
    random_documents,
    save_model,
)
from tests.ppo.models.test_build import FLOAT32, model_config

CPU = torch.device("cpu")


def findings_of(config: PretrainedConfig, *, pack: bool = True, compare: bool = True) -> Findings:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    return examine(config, module, pack=pack, compare=compare)


def config_of(family: str, **extra: Any) -> PretrainedConfig:
    return AutoConfig.for_model(family, **EXTRA.get(family, {}) | extra)


class OddPositions(Qwen2ForCausalLM):
    """A model whose logits no code of ours knows: doubled at every other position."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:  # type: ignore
        output: Any = super().forward(input_ids, **kwargs)  # type: ignore
        factor = 1 + torch.arange(input_ids.shape[1]) % 2
        output.logits = output.logits * factor[:, None]
        return output


class OddConfig(Qwen2Config):
    model_type = "odd_positions"


class Bent(Qwen2ForCausalLM):
    """Logits that are no scaled and capped product."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        output.logits = torch.asinh(output.logits)
        return output


class BentConfig(Qwen2Config):
    model_type = "bent"


for _config, _model in ((OddConfig, OddPositions), (BentConfig, Bent)):
    _model.config_class = _config
    AutoConfig.register(_config.model_type, _config)
    AutoModelForCausalLM.register(_config, _model)


def test_a_forward_that_is_not_transformers_own_is_refused_by_name_and_size():
    config = OddConfig(**SHAPE)
    with pytest.raises(InputError, match=r"odd_positions: .* differ .* by [0-9.]+ nats: .*") as e:
        findings_of(config)
    assert "model.verify_forward=false" in str(e.value)
    assert findings_of(config, compare=False).obstacle is None


def test_logits_that_are_no_scaled_product_are_refused():
    with pytest.raises(InputError, match=r"bent: .* no scaled and capped product"):
        findings_of(BentConfig(**SHAPE))


@pytest.mark.parametrize(
    ("family", "extra", "scale", "softcap"),
    [
        ("granite", {"logits_scaling": 8.0}, 1 / 8, None),
        ("hyperclovax", {"logits_scaling": 8.0}, 8.0, None),
        ("cohere", {"logit_scale": 0.25}, 0.25, None),
        ("falcon_h1", {"lm_head_multiplier": 0.25}, 0.25, None),
        ("inkling_text", {"logits_mup_width_multiplier": 24.0}, 1 / 24, None),
        # A scale that follows from a width is the model's, not its small copy's.
        ("minicpm3", {"hidden_size": 2560, "dim_model_base": 256}, 0.1, None),
        ("gemma2", {"final_logit_softcapping": 20.0}, 1.0, 20.0),
        ("recurrent_gemma", {"logits_soft_cap": 20.0}, 1.0, 20.0),
        ("xlstm", {"output_logit_soft_cap": 20.0}, 1.0, 20.0),
        ("llama", {}, 1.0, None),
    ],
)
def test_the_scale_and_cap_of_logits_are_asked_of_transformers_own_code(
    family, extra, scale, softcap
):
    layers = {"xlstm": {"num_blocks": 2}, "recurrent_gemma": {}}
    small = layers.get(family, {"num_hidden_layers": 2})
    found = findings_of(config_of(family, **small, **extra), compare=False).transform
    assert found.scale == pytest.approx(scale, rel=1e-6)
    assert found.softcap == pytest.approx(softcap)


def test_a_window_that_only_the_mask_knows_keeps_documents_from_being_packed():
    reason = findings_of(config_of("phimoe", sliding_window=2047)).obstacle
    assert reason is not None and "differ" in reason
    # One that no sequence is longer than has no effect.
    config = config_of("phimoe", sliding_window=4096, max_position_embeddings=4096)
    assert findings_of(config).obstacle is None


def test_why_a_class_is_padded_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr("ppo.models.forward._SAID", set())
    with init_distributed(CPU):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), CPU)
        for _ in ("actor", "critic"):
            with torch.device("meta"):
                module = AutoModelForCausalLM.from_config(config_of("nemotron", **SHAPE))
            plan_forward(
                module,
                mesh,
                Findings(LogitTransform(), "of a mask"),
                num_ids=None,
                attn_implementation="auto",
                use_remove_padding=True,
            )
    assert (
        caplog.text.count("NemotronForCausalLM: sequences are padded, not packed: of a mask") == 1
    )


@pytest.mark.parametrize("family", ["nemotron", "doge"])
def test_attention_that_passes_nothing_on_is_padded_with_one_reason(family):
    reason = findings_of(config_of(family)).obstacle
    assert reason is not None and reason.startswith("packed, its forward fails (InputError: ")


def test_a_model_that_sees_later_tokens_is_refused():
    with pytest.raises(InputError, match=r"gemma3_text: .* change with the tokens that follow"):
        findings_of(config_of("gemma3_text", use_bidirectional_attention=True))


def test_a_model_whose_backward_pass_fails_outside_of_training_mode_is_refused():
    with pytest.raises(InputError, match=r"reformer: its forward here fails \(AssertionError: If"):
        findings_of(config_of("reformer", attn_layers=["local"] * 2))


def test_the_comparison_of_the_tiny_model_takes_less_than_two_seconds(tmp_path):
    folder = build_tiny_model(tmp_path / "tiny")
    config = load_hf_config(folder, model_config(folder))
    started = time.process_time()
    assert findings_of(config) == Findings(LogitTransform(1.0, None), None)
    assert time.process_time() - started < 2


def test_a_copy_is_small_the_same_each_time_and_leaves_random_numbers_alone():
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=94, hidden_size=4096)
    state = torch.get_rng_state()
    first, second = (build_small_copy(config).state_dict() for _ in range(2))
    assert sum(tensor.numel() for tensor in first.values()) < 3e7
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert (config.num_hidden_layers, config.hidden_size) == (94, 4096)


def test_layers_are_cut_where_they_are_counted_otherwise_and_the_last_ones_share_keys():
    gemma = AutoConfig.for_model(
        "gemma4_text",
        **SHAPE | {"num_hidden_layers": 18, "global_head_dim": 16},
        num_kv_shared_layers=12,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=96,
    )
    small = build_small_copy(gemma)
    # layers 6 and 11 are the first of their kind that take keys and values of others
    assert (small.config.num_hidden_layers, small.config.num_kv_shared_layers) == (12, 6)
    assert small(input_ids=torch.arange(5)[None]).logits.isfinite().all()
    longcat = AutoConfig.for_model(  # two attentions in a layer
        "longcat_flash",
        **{"hidden_size": 256, "num_layers": 4, "num_attention_heads": 4, "vocab_size": 96},
        **{"ffn_hidden_size": 256, "expert_ffn_hidden_size": 64, "n_routed_experts": 32},
        **{"q_lora_rank": 64, "kv_lora_rank": 64, "zero_expert_num": 256},
    )
    small = build_small_copy(longcat)
    assert (small.config.num_layers, small.config.zero_expert_num) == (2, 12)
    assert small(input_ids=torch.arange(5)[None]).logits.isfinite().all()


def test_a_copy_has_the_frequencies_of_its_narrow_heads():
    factors = {"short_factor": [1.0 + i for i in range(48)], "long_factor": [2.0] * 48}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    config = AutoConfig.for_model(  # Phi-4-mini's heads
        "phi3",
        **SHAPE | {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128},
        partial_rotary_factor=0.75,
        rope_parameters=rope,
        original_max_position_embeddings=4096,
    )
    assert findings_of(config).obstacle is None
    small = build_small_copy(config).config
    assert small.rope_parameters["short_factor"] == [1.0, 17.0, 33.0]


def test_a_tower_beside_the_text_model_keeps_heads_that_divide_its_width():
    vision = {"num_hidden_layers": 1, "hidden_size": 1200, "num_attention_heads": 16}
    config = AutoConfig.for_model(
        "phi4_multimodal", num_hidden_layers=2, vision_config=vision, audio_config={"num_blocks": 1}
    )
    small = build_small_copy(config).config
    assert (small.vision_config.hidden_size, small.vision_config.num_attention_heads) == (150, 2)
    assert (small.hidden_size, small.num_attention_heads) == (384, 32)


def test_families_whose_logits_or_windows_were_ignored_score_as_transformers_does(tmp_path):
    documents = random_documents([5, 1, 17, 9])
    with init_distributed(CPU):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), CPU)
        cases: list[tuple[str, dict[str, Any]]] = [
            ("hyperclovax", {"logits_scaling": 8.0}),
            ("phimoe", {"sliding_window": 4, "num_local_experts": 4}),
            ("nemotron", {}),
            ("phi", {}),  # a head with a bias
        ]
        for family, extra in cases:
            folder = save_model(tmp_path / family, family, **extra)
            module = build_causal_lm(
                folder,
                mesh,
                model_config=model_config(folder),
                fsdp_config=FLOAT32,
                checkpointing=False,
                forward_only=True,
                dtype=torch.float32,
            )
            plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
            want, _ = plain_scores(plain, documents, 0.8)
            inputs = packed_inputs if family in ("hyperclovax", "phi") else padded_inputs
            with torch.no_grad():
                got = module(**inputs(documents), temperature=0.8).logprobs
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


REFUSED = {
    # encoders, most of which see the tokens that follow
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "modernbert-decoder", "prophetnet", "rembert", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl"),
    *("xlnet", "xmod"),
    *("cpmant", "gemma3n", "reformer", "zamba"),
}
NOT_BUILT = {"gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}


HYBRIDS = {
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe", "minimax"),
    *("nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "zamba2"),
}


@pytest.mark.full
def test_every_family_of_transformers_is_right_or_refused():
    found = {outcome.family: outcome for outcome in outcomes(families())}
    refused = {family for family, outcome in found.items() if outcome.kind == "refused"}
    assert refused == REFUSED
    assert all(found[family].reason.startswith(family) for family in REFUSED)
    assert {f for f, outcome in found.items() if outcome.kind == "not built"} == NOT_BUILT
    assert all(found[family].kind == "packed" for family in HYBRIDS)
