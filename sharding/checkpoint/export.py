"""A checkpoint's model as a Hugging Face folder.

Owns the way from distributed tensors to safetensors, in a single process on the host. Must not know
process groups.
"""

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from sharding.checkpoint.files import TENSORS, CheckpointError, put_in_place, sync_tree
from sharding.checkpoint.folder import find_checkpoint
from sharding.checkpoint.storage import SafeReader, causes
from sharding.names import tied_names

logger = logging.getLogger(__name__)


def export_hf(
    checkpoint: Path, out: Path, *, model: str = "actor", dtype: torch.dtype | None = None
) -> Path:
    """Write a model of a checkpoint as safetensors, config and tokenizer; returns `out`.

    Needs host memory for the whole model in `dtype`. A value model becomes a sequence
    classification model with one label.

    Args:
        checkpoint: a checkpoint, or a run's folder: its newest undamaged one.
        out: new folder; it appears when everything is written.
        model: name under which the model was saved.
        dtype: None = as saved (float32 master weights).

    Raises:
        CheckpointError: no such checkpoint or model, or `out` exists and is not empty.
    """
    checkpoint = find_checkpoint(checkpoint)
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out}: exists and is not empty")
    beside = out.with_name(out.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    write_hf(checkpoint, beside, model=model, dtype=dtype)
    sync_tree(beside)
    put_in_place(beside, out)
    logger.info("exported %s of %s to %s", model, checkpoint, out)
    return out


def write_hf(checkpoint: Path, out: Path, *, model: str, dtype: torch.dtype | None = None) -> None:
    """`export_hf` from a folder that need not be complete yet, into a folder that is made."""
    weights = _read(checkpoint / TENSORS, f"model.{model}.", dtype)
    module = _empty_model(checkpoint / "models" / model, weights)
    ties = {name for names in tied_names(module) for name in names}
    missing = sorted(set(module.state_dict()) - set(weights) - ties)
    if missing:
        raise CheckpointError(f"{checkpoint}: lacks {missing[0]} of {model}")
    out.mkdir(parents=True)
    with _no_progress_bar():
        module.save_pretrained(out, state_dict=weights)  # original names of fused experts too
    if (checkpoint / "assets").is_dir():
        shutil.copytree(checkpoint / "assets", out, dirs_exist_ok=True)


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


def _read(folder: Path, prefix: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Whole tensors under their names in the model."""
    reader = SafeReader(folder)
    table = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata):
            saved = entry.properties.dtype
            wanted = dtype if dtype is not None and saved.is_floating_point else saved
            table[name] = torch.empty(entry.size, dtype=wanted)
    if not table:
        raise CheckpointError(f"{folder.parent}: holds no model {prefix.split('.')[1]}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as wanted
        try:
            load(table, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(f"{folder}: {causes(error)}") from error
    return {name.removeprefix(prefix): tensor for name, tensor in table.items()}


def _empty_model(config_folder: Path, weights: dict[str, Tensor]) -> Any:
    """The model without memory, in the dtype of its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    options: dict[str, Any] = {}
    factory: Any = AutoModelForCausalLM
    if "score.weight" in weights:
        factory, options = AutoModelForSequenceClassification, {"num_labels": 1}
    config = AutoConfig.from_pretrained(config_folder, **options)
    dtype = next(t.dtype for t in weights.values() if t.is_floating_point())
    with torch.device("meta"):
        # in another dtype it would change torch's default, under a training that goes on
        return factory.from_config(config, dtype=torch.get_default_dtype()).to(dtype)
