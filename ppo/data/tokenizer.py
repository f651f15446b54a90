"""The tokenizer of a run: loaded, with a chat template and a padding token, or a clear error.

Also how a conversation becomes text and token ids, which prompts and the reward model share, and
the text of each token.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo.data.rows import DataError
from ppo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

LONGEST_CHARACTER = 4
"""bytes, and so tokens at most, of a character in UTF-8"""
PROBE = "Hello, world: 12 + 30 = 42"


def load_tokenizer(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    custom_chat_template: str | None = None,
    template_key: str = "model.custom_chat_template",
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of an HF folder or hub name.

    Args:
        custom_chat_template: Jinja text that replaces the tokenizer's own.
        template_key: the key that it comes from, for the message.

    Raises:
        DataError: there is no tokenizer, or it has no chat template, or no token to pad with.
    """
    tokenizer = read_tokenizer(path, trust_remote_code=trust_remote_code)
    if custom_chat_template is not None:
        tokenizer.chat_template = custom_chat_template
    if not tokenizer.chat_template:
        raise DataError(
            path,
            "the tokenizer has no chat template; use an instruction-tuned model's, or set "
            f"{template_key} (for prompts as plain text: "
            "\"{% for m in messages %}{{ m['content'] }}{% endfor %}\")",
        )
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise DataError(path, "the tokenizer has neither a padding nor an end-of-sequence token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer has no padding token: %s is used", tokenizer.pad_token)
    return tokenizer


def read_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder or hub name as it is. Raises DataError where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError(path, f"holds no tokenizer that loads: {error}") from error
    if not _can_read(tokenizer):
        raise DataError(
            path,
            "its tokenizer makes no known token of plain text: its vocabulary is missing; does the "
            "folder have tokenizer.json (or tokenizer.model, or vocab.json and merges.txt)?",
        )
    return tokenizer


def token_difference(own: Mapping[str, int], other: Mapping[str, int], num_ids: int) -> str | None:
    """Where another vocabulary does not give the ids below `num_ids` the tokens of this one.

    Ids that this one does not name are left out: vocabularies may be padded differently.
    """
    theirs = {index: token for token, index in other.items()}
    differing = [
        (index, token)
        for token, index in own.items()
        if index < num_ids and theirs.get(index) != token
    ]
    if not differing:
        return None
    index, token = min(differing)
    found = repr(theirs[index]) if index in theirs else "no token"
    return f"{len(differing)} of {num_ids} ids differ: {index} is {token!r} here and {found} there"


def _can_read(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether anything of a text survives: transformers makes an empty tokenizer of no files."""
    ids = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    return any(token != tokenizer.unk_token_id for token in ids)  # pyright: ignore


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict[str, str]] | str,
    **options: Any,
) -> str:
    """A conversation, or plain text as one user message, as its chat template writes it.

    Args:
        options: passed on to apply_chat_template.

    Raises:
        InputError: the template refuses it, fails, or makes nothing of it.
    """
    from jinja2 import TemplateError

    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    try:
        text = tokenizer.apply_chat_template(messages, **{**options, "tokenize": False})
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        # a template is a program: what it does with a message can fail in any of these ways
        raise InputError(f"the chat template refuses it: {error}") from error
    assert isinstance(text, str)
    if not text:
        raise InputError("the chat template makes an empty text of it")
    return text


def token_ids(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered conversations, whose special tokens the template has written.

    Lengths are checked by who asks: the tokenizer's own warning is switched off.
    """
    if not texts:  # transformers raises IndexError
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)
    return encoded["input_ids"]  # pyright: ignore[reportReturnType]


def token_texts(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> list[str]:
    """The text of each token, special ones by name; together they are the whole text.

    A character of several tokens stands with the last of them, the others are empty.
    """
    texts: list[str] = []
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        assert isinstance(text, str)
        if text.endswith("\ufffd") and len(waiting) < LONGEST_CHARACTER:
            texts.append("")
            continue
        name = tokenizer.convert_ids_to_tokens(waiting[0])
        if isinstance(name, str) and name.startswith("\u2581") and not text.startswith(" "):
            text = " " + text  # decoders of sentencepiece drop the space before a word
        texts.append(text)
        waiting = []
    if waiting:
        texts[-1] = str(tokenizer.decode(waiting))
    return texts
