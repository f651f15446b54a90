"""The `tiny` model and the `tiny` data: everything a run needs, made from a seed.

Owns the model folder (a random Qwen2 with a byte-level tokenizer and a chat template) and the
copy task. Its scorer is ppo/rewards/scorers/tiny.py. Must not know how a run uses either.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ppo.errors import InputError
from ppo.files import new_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


VOCAB_SIZE = 512
NUM_STOPS = 32
"""ids that end a response: so many that random weights give ragged lengths, 15 tokens on average"""
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>"]
"""ids 256, 257, ...; the first pads (transformers' Qwen2 tokenizer insists on its name)"""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tiny_model(folder: Path, seed: int = 0, *, classifier: bool = False) -> Path:
    """Write the HF folder of the tiny model unless it is there; returns `folder`.

    classifier: a sequence classification model with one label instead of a causal LM.

    Every rank may call it at once: the first that is ready puts its folder there, all are equal.
    Raises InputError when the folder holds something else.
    """
    marker = folder / "tiny.json"
    wanted = {"seed": seed} | ({"classifier": True} if classifier else {})
    if folder.exists():
        found = json.loads(marker.read_text()) if marker.is_file() else None
        if found != wanted:
            kind = "classifier" if classifier else "model"
            raise InputError(f"{folder} is not the tiny {kind} of seed {seed}: it holds {found}")
        return folder
    with new_folder(folder) as beside:
        _save_model(beside, seed, classifier)
        build_tiny_tokenizer().save_pretrained(beside)
        (beside / marker.name).write_text(json.dumps(wanted))
    return folder


def _save_model(folder: Path, seed: int, classifier: bool) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import (
        GenerationConfig,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
    )

    kind = Qwen2ForSequenceClassification if classifier else Qwen2ForCausalLM
    eos = 256 + SPECIAL_TOKENS.index("<|im_end|>")
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
        pad_token_id=256,
        bos_token_id=None,
        eos_token_id=eos,
        dtype="float32",
        architectures=[kind.__name__],
    )
    if classifier:
        config.num_labels = 1
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = kind(config).float()
    tensors = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}  # tied
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    stops = [eos, *range(VOCAB_SIZE - NUM_STOPS + 1, VOCAB_SIZE)]
    GenerationConfig(eos_token_id=stops, pad_token_id=256).save_pretrained(folder)


def build_tiny_tokenizer() -> "PreTrainedTokenizerBase":
    """A tokenizer whose first 256 ids are the bytes; the other ids are special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab=byte_names(), merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{i}|>" for i in range(256 + len(SPECIAL_TOKENS), VOCAB_SIZE)]
    core.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS + reserved]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )


def byte_names() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else 256, 257, ..."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {chr(byte): byte for byte in printable}
    return names | {chr(256 + i): byte for i, byte in enumerate(others)}
