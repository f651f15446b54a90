"""A trained language model, back in the multimodal folder that it is from.

Owns which tensors of that folder are replaced, under the names that they have there; everything
else is copied as it is. Must not know how tensors lie in a checkpoint of ours.
"""

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sharding.checkpoint.files import CheckpointError
from sharding.checkpoint.wrapped import Wrapper, text_name, whole_class
from sharding.progress import PROGRESS

logger = logging.getLogger(__name__)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# of configuration, tokenizer and processor
SMALL_FILES = ("*.json", "*.txt", "*.model*", "*.spm", "*.tiktoken", "*.jinja", "*.py")
_DTYPES = ("dtype", "torch_dtype")


def write_whole(
    wrapper: Wrapper,
    parts: Iterable[dict[str, Tensor]],
    out: Path,
    *,
    ties: Iterable[Sequence[str]] = (),
    base: Path | None = None,
) -> None:
    """The multimodal model with these tensors of its language model, into an existing folder.

    parts: whole layers under the names of the causal LM; a file of weights each.
    ties: names of one tensor, of which `parts` has the first.
    base: where the folder lies now; None = where it did in training.
    Raises CheckpointError when it is not there, or is of another model.
    """
    folder = base or Path(wrapper.folder)
    files, whole = _files_of(folder), _whole_on_meta(folder)
    own = {text_name(name): name for name in files if text_name(name) is not None}
    others = {names[0]: [n for n in names[1:] if n in own] for names in ties}
    written: dict[str, str] = {}
    dtype: torch.dtype | None = None
    for tensors in parts:
        for name in others.keys() & tensors.keys():
            tensors |= {other: tensors[name].clone() for other in others[name]}
        named = _stored_names(wrapper, whole, own, tensors)
        _check_shapes(folder, files, named)
        dtype = dtype or next(t.dtype for t in named.values() if t.is_floating_point())
        _save(named, out, written)
    for names in _by_file({name: file for name, file in files.items() if name not in written}):
        with safe_open(folder / files[names[0]], "pt") as file:
            _save({name: file.get_tensor(name) for name in names}, out, written)
    index = json.dumps({"metadata": {}, "weight_map": written}, indent=2)
    (out / INDEX).write_text(index + "\n")
    _write_small_files(folder, out)
    _write_config(folder, out, wrapper.override, dtype)


def _files_of(folder: Path) -> dict[str, str]:
    """File of each tensor of the folder."""
    try:
        if (folder / INDEX).is_file():
            return json.loads((folder / INDEX).read_bytes())["weight_map"]
        with safe_open(folder / SINGLE, "pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: the multimodal model around the trained one, of which an export needs the "
            f"rest, cannot be read: {error}; --base names its folder"
        ) from error


def _whole_on_meta(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: no configuration that loads: {error}") from error
    kind = whole_class(config)
    if kind is None:
        raise CheckpointError(f"{folder}: is not the multimodal model that was trained: {config}")
    with torch.device("meta"):
        # in another dtype it would change torch's default, under a training that goes on
        return kind._from_config(config, dtype=torch.get_default_dtype())


def _stored_names(
    wrapper: Wrapper, whole: Any, own: Mapping[str | None, str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors as the folder has them: experts one by one where it has them so."""
    from transformers.core_model_loading import revert_weight_conversion

    named = {wrapper.whole_name(name): tensor for name, tensor in tensors.items()}
    reverted = revert_weight_conversion(whole, named)
    return {own.get(text_name(n), n): tensor.contiguous() for n, tensor in reverted.items()}


def _check_shapes(folder: Path, files: Mapping[str, str], named: Mapping[str, Tensor]) -> None:
    for name, tensor in named.items():
        shape: list[int] | None = None
        if name in files:
            with safe_open(folder / files[name], "pt") as file:
                shape = list(file.get_slice(name).get_shape())
        if shape != list(tensor.shape):
            raise CheckpointError(
                f"{folder}: is not the folder of the model that was trained: {name} is {shape} "
                f"there and {list(tensor.shape)} in the checkpoint"
            )


def _by_file(files: Mapping[str, str]) -> Iterator[list[str]]:
    for file in sorted(set(files.values())):
        yield [name for name, other in files.items() if other == file]


def _save(tensors: Mapping[str, Tensor], out: Path, written: dict[str, str]) -> None:
    file = f"model-{len(set(written.values())) + 1:05d}.safetensors"
    save_file(dict(tensors), out / file, metadata={"format": "pt"})
    PROGRESS.tick()
    written |= dict.fromkeys(tensors, file)


def _write_small_files(folder: Path, out: Path) -> None:
    for path in {path for pattern in SMALL_FILES for path in folder.glob(pattern)}:
        if path.name not in ("config.json", INDEX) and path.is_file():
            shutil.copy(path, out)


def _write_config(
    folder: Path, out: Path, override: Mapping[str, Any], dtype: torch.dtype | None
) -> None:
    """The folder's, with what training had otherwise, and the dtype of the trained tensors: that is
    what transformers loads all tensors in."""
    keys = json.loads((folder / "config.json").read_bytes())
    text = keys.get("text_config") or keys
    text |= override
    for section in (keys, text):
        for key in _DTYPES:
            if key in section and dtype is not None:
                section[key] = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(keys, indent=2) + "\n")
