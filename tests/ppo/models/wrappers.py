"""Tiny random multimodal checkpoints, as transformers writes them and as they were published."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ppo.models.tiny import build_tiny_tokenizer
from tests.ppo.models.hf_models import SHAPE

# SGLang on a CPU wants multiples of 32 and 64.
TEXT: dict[str, Any] = SHAPE | {
    **{"vocab_size": 512, "intermediate_size": 64, "initializer_range": 0.15},
}
SIGLIP: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
}
MROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 1.0,
        "rope_theta": 1e4,
    },
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT
        | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
    },
    "qwen3_5": {"text_config": TEXT | HYBRID, "vision_config": QWEN_VISION},
    "qwen3_5_moe": {"text_config": TEXT | HYBRID | EXPERTS, "vision_config": QWEN_VISION},
    "qwen2_5_vl": {
        "text_config": TEXT | MROPE,
        "vision_config": QWEN_VISION | {"fullatt_block_indexes": [0]},
    },
    "qwen3_vl": {"text_config": TEXT | MROPE, "vision_config": QWEN_VISION},
    "qwen3_vl_moe": {"text_config": TEXT | MROPE | EXPERTS, "vision_config": QWEN_VISION},
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": SIGLIP | {"model_type": "pixtral", "head_dim": 8},
        "tie_word_embeddings": False,
    },
    "llama4": {
        "text_config": TEXT
        | {
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "layer_types": ["full_attention"] * 2,
            "no_rope_layers": [1, 0],
        },
        "vision_config": SIGLIP
        | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    },
    "gemma4": {
        "text_config": TEXT
        | {
            "global_head_dim": 8,
            "num_global_key_value_heads": 2,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 512,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": SIGLIP | {"head_dim": 8, "num_key_value_heads": 2},
        "audio_config": None,
    },
}


def save_wrapper(folder: Path, name: str, *, seed: int = 0, **extra: Any) -> Path:
    """A random float32 checkpoint with a tokenizer."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    ids = {key: 500 + i for i, key in enumerate(("image_token_id", "video_token_id"))}
    config = AutoConfig.for_model(name, **ids | WRAPPERS[name] | extra)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
        for tensor in model.state_dict().values():
            if tensor.ndim < 2:  # norms, biases, buffers that are weights
                tensor.add_(0.2 * torch.randn(tensor.shape))
    model.save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    return folder


def rename(folder: Path, old: str, new: str) -> Path:
    """The beginning of the names in the file, as other versions of transformers wrote them."""
    path = folder / "model.safetensors"
    tensors = {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def config_keys(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
