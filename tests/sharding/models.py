"""Small random transformers for the tests of sharding/."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 67  # does not divide evenly over 2 or 4 ranks


def tiny_llama(
    *, tied: bool = False, seed: int = 0, device: torch.device | None = None
) -> LlamaForCausalLM:
    """Three layers, hidden 32, float32, the same on every rank; `device` is where it is put."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config)
    return model if device is None else model.to(device)


def tokens_of(rank: int) -> Tensor:
    """Rank r holds one sequence of 3 + 4 r tokens."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, VOCAB, (1, 3 + 4 * rank), generator=generator)


def token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits.float()
    return F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum")
