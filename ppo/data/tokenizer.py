"""The tokenizer of a run: loaded, with a chat template and a padding token, or a clear error."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ppo.data.rows import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


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
        DataError: there is no tokenizer, or it has no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError(path, f"holds no tokenizer that loads: {error}") from error
    if custom_chat_template is not None:
        tokenizer.chat_template = custom_chat_template
    if not tokenizer.chat_template:
        raise DataError(
            path,
            "the tokenizer has no chat template; use an instruction-tuned model's, or set "
            f"{template_key} (for prompts as plain text: "
            "\"{% for m in messages %}{{ m['content'] }}{% endfor %}\")",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer has no padding token: %s is used", tokenizer.pad_token)
    return tokenizer
