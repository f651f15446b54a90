"""Every causal LM family of transformers, as the start of a run sees it: packed, padded or refused.

    python -m tests.ppo.models.families [FAMILY ...]

Each family's default configuration, of whatever size, is examined (ppo/models/verify.py): a small
copy of it goes through transformers' own forward and through ours. Prints one line per family and
the counts; takes some minutes on one core. tests/ppo/models/test_verify.py holds the outcome.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ppo.errors import InputError
from ppo.models.verify import examine

QWEN4_INDEXER: dict[str, Any] = {
    "num_hidden_layers": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
# What the default configuration lacks, or sets to what no published model has.
EXTRA: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [24, 20, 20],
            }
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 5e5}},
    "deepseek_v2": {"num_experts_per_tok": 2, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_head": 64, "mamba_n_heads": 16, "lm_head_multiplier": 0.0195},
    "granite": {"logits_scaling": 8.0},
    "granitemoehybrid": {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2},
    "hyperclovax": {"logits_scaling": 8.0},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "phimoe": {"sliding_window": 2047},
    "qwen4_exp": {"text_config": QWEN4_INDEXER},
    "qwen4_exp_text": QWEN4_INDEXER,
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"]},
}


class Outcome(NamedTuple):
    """What a run with this family would do."""

    family: str
    kind: str
    """packed | padded | refused | not built (by transformers, from these values)"""
    reason: str
    seconds: float


def families() -> list[str]:
    """Model types that AutoModelForCausalLM knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def outcomes(names: Iterable[str]) -> Iterator[Outcome]:
    """Examine one family after the other."""
    for name in names:
        started = time.process_time()
        kind, reason = _outcome(name)
        yield Outcome(name, kind, reason, time.process_time() - started)


def _outcome(name: str) -> tuple[str, str]:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(name, **EXTRA.get(name, {}))
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever the code of a family raises
        return "not built", f"{type(error).__name__}: {error}"
    try:
        findings = examine(config, module, pack=True, compare=True)
    except InputError as error:
        return "refused", str(error)
    return ("packed", "") if findings.obstacle is None else ("padded", findings.obstacle)


def main() -> None:
    """Print the table."""
    counts: dict[str, int] = {}
    for outcome in outcomes(sys.argv[1:] or families()):
        counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
        reason = " ".join(outcome.reason.split())[:200]
        print(
            f"{outcome.family:24} {outcome.kind:9} {outcome.seconds:5.1f} s  {reason}", flush=True
        )
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))


if __name__ == "__main__":
    main()
