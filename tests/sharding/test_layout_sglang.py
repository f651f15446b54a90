"""The layout tables against SGLang's own models and weight loaders, one TP rank at a time.

No engine and no process group: SGLang builds the layers of any rank when its parallel state says
so. This is the code of the CUDA engine (on a CPU engine heads are padded instead of repeated).
"""

import importlib
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from sharding.layout import tp_layout, view_2d
from tests.distributed import run_distributed
from tests.sharding.families import (
    FAMILY_NAMES,
    SHAPES,
    VOCABULARIES,
    apply_layout,
    full_parameters,
    small_config,
)

MODELS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3_text": ("gemma3_causal", "Gemma3ForCausalLM"),
}


@pytest.mark.sglang
def test_sglang_loads_the_same_slices_with_its_own_weight_loaders(tmp_path):
    assert MODELS.keys() == set(FAMILY_NAMES)
    (compared,) = run_distributed(compare_all, 1, tmp_path)
    assert set(compared) == set(FAMILY_NAMES)
    assert min(compared.values()) >= 3 * 15 * 9  # shapes x (rank, T) x parameters


def compare_all(rank: int, world_size: int, folder: Path) -> dict[str, int]:
    """Parameters compared, by family (in a process of its own: sglang changes what it touches)."""
    publish_arguments(folder)
    compared = dict.fromkeys(FAMILY_NAMES, 0)
    cases = product(FAMILY_NAMES, zip(SHAPES.values(), VOCABULARIES, strict=True))
    for family, (shape, vocabulary) in cases:
        tied = family in ("gemma2", "gemma3_text")  # SGLang's Gemma has no head of its own
        config = small_config(family, vocab_size=vocabulary, tie_word_embeddings=tied, **shape)
        full = full_parameters(config)
        for tp in (1, 2, 4, 8):
            for tp_rank in range(tp):
                compared[family] += compare(config, full, tp, tp_rank)
        refused(small_config(family, num_attention_heads=12, num_key_value_heads=6), tp=8)
        refused(small_config(family, num_attention_heads=12, num_key_value_heads=3), tp=2)
    return compared


def refused(config, *, tp: int) -> None:
    """SGLang cannot build what the table refuses."""
    shapes = {name: tuple(p.shape) for name, p in full_parameters(config).items()}
    with pytest.raises(ValueError, match="heads"):
        tp_layout(config.model_type, shapes, config.to_dict(), tp=tp, tp_rank=0, style="sglang")
    with as_rank(tp, 0), pytest.raises((AssertionError, ValueError)):
        sglang_model(config)


def publish_arguments(folder: Path) -> None:
    """SGLang's process-wide configuration, and stand-ins for kernels that nothing here calls."""
    if not torch.cuda.is_available():
        if find_spec("sgl_kernel") is None:
            sys.path.insert(0, str(Path(__file__).parents[2] / "launch" / "cpu_engine"))
        stand_in = ModuleType("vllm._custom_ops")
        stand_in.rotary_embedding = None  # type: ignore[attr-defined]
        sys.modules |= {"vllm": ModuleType("vllm"), "vllm._custom_ops": stand_in}
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    config = small_config("llama")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    arguments = {"model_path": str(folder), "device": "cpu", "skip_tokenizer_init": True}
    publish(ServerArgs(**arguments), role="scheduler")


@contextmanager
def as_rank(tp: int, tp_rank: int):
    """SGLang's parallel state of one TP rank."""
    from sglang.srt.runtime_context import get_parallel

    group = SimpleNamespace(rank_in_group=tp_rank, world_size=tp, rank=tp_rank)
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1, rank_in_group=0)
    state = {"pp_size": 1, "pp_rank": 0, "pp_group": alone}
    for name in ("tp", "attn_tp", "moe_tp"):
        state |= {f"{name}_size": tp, f"{name}_rank": tp_rank, f"{name}_group": group}
    for name in ("attn_dp", "attn_cp"):
        state |= {f"{name}_size": 1, f"{name}_rank": 0}
    with get_parallel().override(**state, moe_ep_size=1, moe_dp_size=1):
        yield


def sglang_model(config) -> nn.Module:
    """The model class of the engine, without its logits processor (which wants a real group)."""
    module_name, class_name = MODELS[config.model_type]
    for name in (module_name, "llama", "qwen2"):
        module = importlib.import_module(f"sglang.srt.models.{name}")
        module.LogitsProcessor = lambda *_, **__: None  # type: ignore[attr-defined]
    if config.model_type == "gemma2":
        config.hidden_act = config.hidden_activation  # in the config.json of every Gemma 2
    module = importlib.import_module(f"sglang.srt.models.{module_name}")
    return getattr(module, class_name)(config)


def compare(config, full, tp: int, tp_rank: int) -> int:
    """Load full tensors through SGLang, and slices through the layout: all must be equal."""
    with as_rank(tp, tp_rank):
        model = sglang_model(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        model.load_weights(full.items())  # type: ignore[operator]
    layout = tp_layout(
        config.model_type,
        {name: tuple(tensor.shape) for name, tensor in full.items()},
        config.to_dict(),
        tp=tp,
        tp_rank=tp_rank,
        style="sglang",
    )
    assert layout is not None
    ours, theirs = apply_layout(layout, full), dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        where = f"{config.model_type} {name} rank {tp_rank} of {tp}, vocabulary {config.vocab_size}"
        assert torch.equal(parameter.data.view(view_2d(parameter.shape)), ours[name]), where
    return len(theirs)
