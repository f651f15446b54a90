"""Tiny random checkpoints of every family, and scores of them by plain transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Windows are shorter than the documents of the tests, query_pre_attn_scalar is not head_dim.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    "gemma3_text": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    },
}


def save_model(
    folder: Path, model_type: str, *, max_shard_size: str = "50GB", seed: int = 0, **extra: Any
) -> Path:
    """A random float32 checkpoint with weights large enough to make attention matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type, **SHAPE | FAMILIES.get(model_type, {}) | {"initializer_range": 0.15} | extra
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def add_spare_rows(folder: Path, number: int) -> Path:
    """Give a tied model more ids than its tokenizer has, each more likely than any other."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.embed_tokens.weight"
    rows = tensors[name]
    spare = rows[:number].mean(0) + 3 * rows[:number]
    tensors[name] = torch.cat([rows, spare])
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = len(rows) + number
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_documents(lengths: list[int], seed: int = 3) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=g) for n in lengths]


def plain_scores(model: Any, documents: list[Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of every next token and entropy, document by document, from transformers' logits."""
    logprobs, entropies = [], []
    for ids in [d for d in documents if len(d) > 1]:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / temperature
        dist = torch.distributions.Categorical(logits=logits)
        logprobs.append(dist.log_prob(ids[1:]))
        entropies.append(dist.entropy())
    return torch.cat(logprobs), torch.cat(entropies)


def packed_inputs(documents: list[Tensor], *, sp: int = 1, sp_rank: int = 0) -> dict[str, Tensor]:
    """One row of documents, every next token scored; this rank's slice of it under sp."""
    pad = -sum(len(d) for d in documents) % sp
    padded = [*documents, *([torch.zeros(pad, dtype=torch.long)] if pad else [])]
    ids = torch.cat(padded)
    starts = torch.tensor([0] + [len(d) for d in padded]).cumsum(0)
    places = torch.cat(
        [torch.arange(len(d) - 1) + s for d, s in zip(documents, starts.tolist(), strict=False)]
    )
    size = len(ids) // sp
    mine = places[(places >= size * sp_rank) & (places < size * (sp_rank + 1))]
    part = slice(size * sp_rank, size * (sp_rank + 1))
    return {
        "input_ids": ids[part][None],
        "position_ids": torch.cat([torch.arange(len(d)) for d in padded])[part][None],
        "cu_seqlens": starts,
        "positions": mine - size * sp_rank,
        "labels": ids[mine + 1],
    }


def padded_inputs(documents: list[Tensor]) -> dict[str, Tensor]:
    """Right-padded rows, every next token scored."""
    width = max(len(d) for d in documents)
    mask = torch.arange(width) < torch.tensor([len(d) for d in documents])[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.long)
    ids[mask] = torch.cat(documents)
    places = [torch.arange(len(d) - 1) + i * width for i, d in enumerate(documents)]
    return {
        "input_ids": ids,
        "position_ids": torch.arange(width).expand(len(documents), -1) * mask,
        "attention_mask": mask.long(),
        "positions": torch.cat(places),
        "labels": torch.cat([d[1:] for d in documents]),
    }
