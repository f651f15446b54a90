"""Where a model's counts are found: its config.json, the Hub cache, or a table.

Owns the places and their order. Must not know what the keys mean.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ppo.model_shapes.parse import parse_shape
from ppo.model_shapes.shape import ModelShape

SHAPES_FILE = Path(__file__).resolve().parents[2] / "configs" / "model_shapes.yaml"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SUFFIXES = ("-instruct", "-it", "-pt", "-base", "-chat")
# what ppo/models/tiny.py builds, with torch: a test compares
TINY: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
UNREADABLE = (ValueError, TypeError, ArithmeticError, AttributeError, RecursionError)
"""what a config.json raises that is none of a model"""


def find_shape(path: str, file: Path | None = None) -> tuple[ModelShape, str] | None:
    """The shape of `model.path` and where it was found; None if nowhere.

    Looks at `file`, a config.json that is given for it, else at `tiny`, the folder's config.json,
    the Hugging Face cache, and by the last part of the path at configs/model_shapes.yaml. Raises
    ValueError for a config.json that is none of a model.
    """
    if path == "tiny" and file is None:
        return parse_shape(TINY), "built in"
    found = file or config_json(path)
    if found is not None:
        try:
            return parse_shape(json.loads(found.read_text(encoding="utf-8"))), str(found)
        except UNREADABLE as error:
            raise ValueError(f"{found} does not describe a language model: {error}") from error
    table = _published()
    if path in table:
        return parse_shape(table[path]), f"configs/{SHAPES_FILE.name}"
    for name, config in table.items():
        if _last_part(name) == _last_part(path):
            return parse_shape(config), f"configs/{SHAPES_FILE.name}, as {name}"
    return None


@cache
def _published() -> dict[str, dict[str, Any]]:
    """The models of configs/model_shapes.yaml."""
    return yaml.load(SHAPES_FILE.read_bytes(), Loader=_LOADER)


def _last_part(path: str) -> str:
    """The name of a model, without its organisation or folder and without "-Instruct"."""
    name = path.rstrip("/").rpartition("/")[2].lower()
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def config_json(path: str) -> Path | None:
    """The config.json of a folder or of a repository in the Hugging Face cache."""
    return file_of_model(path, "config.json")


def file_of_model(path: str, name: str) -> Path | None:
    """A file of a folder or of a repository in the Hugging Face cache; None where it is not."""
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.is_file() else None
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache  # half a second, only for Hub names
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, name)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
