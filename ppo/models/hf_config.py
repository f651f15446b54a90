"""transformers' configuration of a model's folder: of the causal LM in it.

Owns what keys of a configuration mean here, and that the language model alone is trained where a
folder holds a multimodal model (sharding/checkpoint/wrapped.py). Must not know weights.
"""

import logging
import re
import sys
from pathlib import Path
from typing import Any

from ppo.config import ModelConfig
from ppo.errors import InputError
from sharding.checkpoint.wrapped import text_config

logger = logging.getLogger(__name__)

_RANDOM_KEY = re.compile(r"dropout|pdrop$|layerdrop|jitter")


def vocabulary_of(path: str | Path, model_config: ModelConfig) -> int | None:
    """Token ids of a model, read from its configuration; None where that does not say."""
    text = load_hf_config(path, model_config).get_text_config()
    return getattr(text, "vocab_size", None)


def load_hf_config(path: str | Path, model_config: ModelConfig) -> Any:
    """transformers' configuration of a folder or hub name, with model.override_config applied; of a
    multimodal model that of its language model.

    What is drawn at random in training (dropout, skipped layers, noise of a router) has no effect:
    models stay in evaluation mode, so that the ratio of the first mini-batch is exactly 1.
    Raises InputError when there is no such model or a key to override does not exist.
    """
    whole = _load(path, model_config)
    config = text_config(whole) or whole
    if quantized := getattr(whole, "quantization_config", None):
        keys = quantized if isinstance(quantized, dict) else vars(quantized)
        raise InputError(
            f"{path}: its weights are quantised ({keys.get('quant_method')}), and training needs "
            "them whole: name the model that it was made of, or, if they are whole, take "
            "quantization_config out of config.json"
        )
    _override(config, path, model_config)
    for key, value in config.to_dict().items():
        if _RANDOM_KEY.search(key) and isinstance(value, float) and value > 0:
            logger.info(
                "%s: %s=%s has no effect: every pass is that of evaluation", path, key, value
            )
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False):
        logger.warning(
            "%s: output_router_logits: what balances its experts (router_aux_loss_coef=%s) is no "
            "part of the losses here, which never look at it",
            path,
            getattr(text, "router_aux_loss_coef", None),
        )
    if (getattr(text, "pad_token_id", None) or 0) >= getattr(text, "vocab_size", sys.maxsize):
        logger.info("%s: pad_token_id=%s is no id of the model", path, text.pad_token_id)
        text.pad_token_id = None  # else its embedding could not be built; nothing pads with it
    return config


def load_whole_config(path: str | Path, model_config: ModelConfig) -> Any | None:
    """transformers' configuration of a multimodal folder, its language model's as
    `load_hf_config`'s; None where the folder holds a causal LM. Errors as there."""
    whole = _load(path, model_config)
    if text_config(whole) is None:
        return None
    _override(whole.text_config, path, model_config)
    return whole


def _load(path: str | Path, model_config: ModelConfig) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=model_config.trust_remote_code)
    except Exception as error:  # no file, no JSON, values of another kind: each has its own
        hint = "set model.trust_remote_code: " if "trust_remote_code" in str(error) else ""
        reason = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise InputError(f"{path}: no configuration that loads: {hint}{reason}") from error


def _override(config: Any, path: str | Path, model_config: ModelConfig) -> None:
    for key, value in model_config.override_config.items():
        if not hasattr(config, key):
            raise InputError(f"model.override_config.{key}: {path} has no such key")
        setattr(config, key, value)
