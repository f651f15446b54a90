"""Models in the shapes of real ones, with random weights and a tokenizer as large: no downloads."""

from pathlib import Path
from typing import Any

import torch
import yaml

import train_ppo
from ppo.models.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, build_tiny_model, byte_names

ROOT = Path(train_ppo.__file__).parent
LONGEST = 1 << 17


def model_folder(name: str, base: Path, device: torch.device) -> Path:
    """An HF folder in the shape that configs/model_shapes.yaml has under `name`, or the tiny one.

    Weights are bfloat16, made on `device`; the head is as large as the tokenizer, so that every id
    has a probability, as with the real model.
    """
    folder = base / name.replace("/", "_")
    if (folder / "config.json").exists():
        return folder
    if name == "tiny":
        return build_tiny_model(folder)
    from transformers import AutoConfig, AutoModelForCausalLM

    text = (ROOT / "configs" / "model_shapes.yaml").read_text(encoding="utf-8")
    sizes: dict[str, Any] = yaml.safe_load(text)[name]
    config = AutoConfig.for_model(**sizes, max_position_embeddings=LONGEST, eos_token_id=257)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer_of(sizes["vocab_size"]).save_pretrained(folder)
    return folder


def tokenizer_of(vocab_size: int) -> Any:
    """Bytes, the special tokens of the tiny model, and words that no text holds."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*byte_names(), *SPECIAL_TOKENS]
    names += [f"<w{i}>" for i in range(len(names), vocab_size)]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL_TOKENS[0],
        unk_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        chat_template=CHAT_TEMPLATE,
    )
