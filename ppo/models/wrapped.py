"""A multimodal folder of which the language model alone is trained.

Owns that this language model, by itself, is what the whole is for text (asked of a small copy), how
a module says where it is from, and a folder of it for engines that read one. The rest of the whole
is never loaded. Names and configuration are in sharding/checkpoint/wrapped.py. Must not know ranks.
"""

import logging
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ppo.config import ModelConfig
from ppo.errors import InputError
from ppo.files import new_folder
from ppo.models.folder import SMALL_FILES
from ppo.models.hf_config import load_whole_config
from ppo.models.small_copy import NoSmallCopy, NotSmall, build_small_copy
from ppo.models.weights import INDEX
from sharding.checkpoint.wrapped import Wrapper, prefix_of, text_config, text_name, whole_class

logger = logging.getLogger(__name__)

TOKENS = 12
"""of the text that is compared"""
TOLERANCE = 3e-3
"""largest difference of log-probs, in their standard deviations"""
_CHECKED: set[str] = set()
"""configurations that this process has compared"""


class Whole(NamedTuple):
    """The multimodal model around a language model."""

    config: Any
    module: Any
    """on meta, for its names"""
    wrapper: Wrapper


def open_whole(path: Path, model_config: ModelConfig) -> Whole | None:
    """The multimodal model of a folder, without memory; None where it holds a causal LM.

    Raises InputError where transformers cannot build it.
    """
    config = load_whole_config(path, model_config)
    if config is None:
        return None
    kind: Any = whole_class(config)
    try:
        with torch.device("meta"):
            module = kind._from_config(config, dtype=torch.get_default_dtype())
        prefix = prefix_of(module)
    except Exception as error:  # whatever the code of a family raises
        raise InputError(f"{path}: its multimodal model cannot be built: {error}") from error
    logger.info("%s: of %s the language model alone is read", path, type(module).__name__)
    return Whole(
        config, module, Wrapper(str(path.resolve()), prefix, dict(model_config.override_config))
    )


@torch.no_grad()
def check_language_model(config: Any) -> None:
    """Compare a small copy of the whole with the causal LM that is trained; one core, no device.

    config: transformers' configuration of the whole.
    Raises InputError that names the family: log-probs of text differ, or it cannot be compared.
    """
    question = f"{type(config)} {config.to_json_string(use_diff=False)}"
    if question in _CHECKED:
        return
    family = f"{config.model_type}: of multimodal models the language model alone is trained"
    hint = "model.verify_forward=false starts all the same"
    try:
        difference = _difference(config)
    except NotSmall as error:  # a tower of fixed sizes, as Gemma 3n has
        logger.warning("%s; it is not compared with the whole: %s", family, error)
        difference = None
    except Exception as error:  # whatever the code of a family raises
        raise InputError(
            f"{family}; it cannot be compared with the whole: {error}; {hint}"
        ) from error
    if difference is not None:
        raise InputError(f"{family}; by itself it gives other log-probs ({difference}); {hint}")
    _CHECKED.add(question)


def _difference(config: Any) -> str | None:
    from transformers import AutoModelForCausalLM

    small = build_small_copy(config, kind=whole_class(config))
    text = text_config(small.config)
    inside = AutoModelForCausalLM.from_config(text, dtype=torch.float32).eval()
    theirs = {text_name(name): tensor for name, tensor in small.state_dict().items()}
    for name, tensor in inside.state_dict().items():
        if name not in theirs:
            raise NoSmallCopy(f"the whole has no {name}")
        tensor.copy_(theirs[name])
    number = small.get_input_embeddings().weight.shape[0] // 2  # special ids are the last ones
    ids = torch.randint(number, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    found = []
    for module in (small, inside):
        module.set_attn_implementation("eager")
        found.append(module(input_ids=ids, use_cache=False).logits.float().log_softmax(-1))
    difference = (found[0] - found[1]).abs().max()
    return None if difference <= TOLERANCE * found[0].std() else f"{difference:.3g} nats"


def language_model_folder(folder: Path, config: Any, out: Path) -> Path:
    """Write `out` anew, for an engine that reads no weights: the configuration of the language
    model, and the small files of the whole. Returns it. For one rank.
    """
    if out.is_dir():  # of an earlier start, perhaps of another model
        shutil.rmtree(out)
    with new_folder(out) as beside:
        for path in {path for pattern in SMALL_FILES for path in folder.glob(pattern)}:
            if path.name not in ("config.json", INDEX):
                (beside / path.name).symlink_to(path.resolve())
        (beside / "config.json").write_text(config.to_json_string(), encoding="utf-8")
    return out
