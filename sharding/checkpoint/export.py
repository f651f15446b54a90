"""A checkpoint's model as a Hugging Face folder.

Owns the way from distributed tensors to safetensors, in a single process on the host, file by file.
Must not know process groups.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sharding.checkpoint.adapters import read_description, write_adapter, write_merged
from sharding.checkpoint.classes import classifier_class, empty_model
from sharding.checkpoint.damage import block_checksums
from sharding.checkpoint.files import (
    MANIFEST,
    TENSORS,
    CheckpointError,
    DamagedCheckpoint,
    put_in_place,
    sync_tree,
)
from sharding.checkpoint.folder import find_checkpoint
from sharding.checkpoint.rewrap import write_whole
from sharding.checkpoint.storage import SafeReader, read_tensors
from sharding.checkpoint.wrapped import read_wrapper
from sharding.names import layer_of, tied_names
from sharding.progress import PROGRESS

logger = logging.getLogger(__name__)

FILE_BYTES = 4 << 30
"""of weights in one file of an export, which is in memory while it is written"""


def export_hf(
    checkpoint: Path,
    out: Path,
    *,
    model: str = "actor",
    dtype: torch.dtype | None = None,
    adapter: bool = False,
    base: Path | None = None,
) -> Path:
    """Write a model of a checkpoint as safetensors, config and tokenizer; returns `out`.

    Needs host memory for a file of weights (FILE_BYTES), or a layer, in `dtype`, twice where names
    are converted. A value model becomes a sequence classification model with one label. Adapters
    are merged into their base, which is in host memory then. What was the language model of a
    multimodal folder goes back into a copy of that folder.

    Args:
        checkpoint: a checkpoint, or a run's folder: its newest undamaged one.
        out: new folder; it appears when everything is written.
        model: name under which the model was saved.
        dtype: None = as saved (float32 master weights); of a merged model as the base was held.
        adapter: write adapters alone, in peft's format.
        base: folder of the model under adapters, or of the multimodal one around the trained
            model; None = where it was in training.

    Raises:
        CheckpointError: no such checkpoint or model, or `out` exists and is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out}: exists and is not empty")
    beside = out.with_name(out.name + ".tmp")
    damaged: list[Path] = []
    while True:
        found = find_checkpoint(checkpoint, before_load=True, skip=damaged)
        shutil.rmtree(beside, ignore_errors=True)
        try:
            write_hf(found, beside, model=model, dtype=dtype, adapter=adapter, base=base)
            break
        except DamagedCheckpoint as damage:
            if found == checkpoint:
                raise
            logger.warning("skipped: %s", damage)
            damaged.append(found)
    sync_tree(beside)
    put_in_place(beside, out)
    logger.info("exported %s of %s to %s", model, found, out)
    return out


def write_hf(
    checkpoint: Path,
    out: Path,
    *,
    model: str,
    dtype: torch.dtype | None = None,
    adapter: bool | None = False,
    base: Path | None = None,
) -> None:
    """`export_hf` from a folder that need not be complete yet, into a folder that is made.

    adapter: None = where it holds one.
    """
    description, wrapper = read_description(checkpoint, model), read_wrapper(checkpoint, model)
    if adapter and description is None:
        raise CheckpointError(f"{checkpoint}: holds the whole {model}, no adapter")
    if description is not None:
        source = _Source(checkpoint, model, None)
        tensors, own = source.read([*source.dtypes]), checkpoint / "models" / model
        if adapter is None or adapter:
            write_adapter(tensors, description, out, wrapper)
        else:
            write_merged(
                *(tensors, description, out),
                config_folder=own,
                base=base,
                wrapper=wrapper,
                dtype=dtype,
                file_bytes=FILE_BYTES,
            )
        return _write_assets(checkpoint, out)
    source = _Source(checkpoint, model, dtype)
    module = _empty_model(checkpoint / "models" / model, source.dtypes)
    ties = {name for names in tied_names(module) for name in names}
    missing = sorted(set(module.state_dict()) - set(source.dtypes) - ties)
    if missing:
        raise CheckpointError(f"{checkpoint}: lacks {missing[0]} of {model}")
    out.mkdir(parents=True)
    if wrapper is not None and "score.weight" not in source.dtypes:
        parts = (source.read(names) for names in _parts(module, source))
        write_whole(wrapper, parts, out, ties=tied_names(module), base=base)
    else:
        _write_configuration(module, out)
        _write_weights(module, source, out)
    _write_assets(checkpoint, out)


def _write_assets(checkpoint: Path, out: Path) -> None:
    if (checkpoint / "assets").is_dir():
        shutil.copytree(checkpoint / "assets", out, dirs_exist_ok=True)


class _Source:
    """The tensors of one model of a checkpoint, read as they are asked for."""

    def __init__(self, checkpoint: Path, model: str, dtype: torch.dtype | None) -> None:
        """dtype: of what is floating; None = as saved."""
        self._folder, self._prefix = checkpoint / TENSORS, f"model.{model}."
        # one that is still being written has no manifest yet
        is_whole = (checkpoint / MANIFEST).is_file()
        self._reader = SafeReader(self._folder, block_checksums(checkpoint) if is_whole else {})
        self.shapes: dict[str, torch.Size] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for key, entry in self._reader.read_metadata().state_dict_metadata.items():
            if key.startswith(self._prefix) and isinstance(entry, TensorStorageMetadata):
                name, saved = key.removeprefix(self._prefix), entry.properties.dtype
                self.shapes[name] = entry.size
                self.dtypes[name] = dtype if dtype and saved.is_floating_point else saved
        if not self.dtypes:
            raise CheckpointError(f"{checkpoint}: holds no model {model}")

    def num_bytes(self, name: str) -> int:
        """Of a tensor in the dtype in which it is read."""
        return self.shapes[name].numel() * self.dtypes[name].itemsize

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole tensors under their names in the model."""
        table = {
            self._prefix + name: torch.empty(self.shapes[name], dtype=self.dtypes[name])
            for name in names
        }
        try:
            read_tensors(table, self._reader)
        except CheckpointError as error:
            raise type(error)(f"{self._folder}: {error}") from error
        return {key.removeprefix(self._prefix): tensor for key, tensor in table.items()}


def _write_configuration(module: Any, out: Path) -> None:
    """Everything that transformers writes beside weights."""
    with _no_progress_bar():
        module.save_pretrained(out, state_dict={})
    for path in out.glob("*.safetensors*"):
        path.unlink()


def _write_weights(module: Any, source: _Source, out: Path) -> None:
    """Files of at most FILE_BYTES, unless one layer has more, one after the other."""
    from transformers.core_model_loading import revert_weight_conversion

    parts = list(_parts(module, source))
    files: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = revert_weight_conversion(module, source.read(names))  # fused experts too
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, out / file, metadata={"format": "pt"})
        PROGRESS.tick()
        files |= dict.fromkeys(tensors, file)
        del tensors  # before the next are read
    if len(parts) == 1:
        (out / file).rename(out / "model.safetensors")
        return
    total = {"total_size": sum(source.num_bytes(name) for part in parts for name in part)}
    index = json.dumps({"metadata": total, "weight_map": files}, indent=2)
    (out / "model.safetensors.index.json").write_text(index + "\n")


def _parts(module: Any, source: _Source) -> Iterator[list[str]]:
    """Names of the tensors of each file, in the module's order.

    A layer is not cut: several of its tensors may become one under the names of the checkpoint.
    """
    ignored = getattr(module, "_keys_to_ignore_on_save", None) or ()
    names = [*dict.fromkeys([*module.state_dict(), *source.shapes])]
    names = [name for name in names if name in source.shapes and name not in ignored]
    part: list[str] = []
    size = 0
    for _, group in groupby(names, key=layer_of):
        layer = list(group)
        more = sum(map(source.num_bytes, layer))
        if part and size + more > FILE_BYTES:
            yield part
            part, size = [], 0
        part, size = part + layer, size + more
    yield part


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """A save in the background must not draw into the console of the run."""
    from transformers.utils import logging as transformers_logging

    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


def _empty_model(config_folder: Path, dtypes: Mapping[str, torch.dtype]) -> Any:
    """The model without memory, in the dtype of its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    is_value_model = "score.weight" in dtypes
    options: dict[str, Any] = {"num_labels": 1} if is_value_model else {}
    config = AutoConfig.from_pretrained(config_folder, **options)
    kind = classifier_class(config) if is_value_model else AutoModelForCausalLM
    dtype = next(dtype for dtype in dtypes.values() if dtype.is_floating_point)
    with torch.device("meta"):
        # in another dtype it would change torch's default, under a training that goes on
        return empty_model(kind, config, dtype=torch.get_default_dtype()).to(dtype)
