"""Weights of a sharded model from a HF folder: each rank reads its own slices.

Owns reading safetensors, the match of names and shapes, and the buffers that no checkpoint holds.
Must not know what the model is used for. Parameters keep transformers' names.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ppo.errors import InputError
from sharding.adapters import model_parameters
from sharding.agree import raise_everywhere, together
from sharding.checkpoint.wrapped import text_name
from sharding.fsdp import local_shard
from sharding.names import (
    compute_buffers,
    non_persistent_buffers,
    persistent_buffers,
    set_parameter,
    tied_names,
)

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 12
"""problems that one error message lists"""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class WeightsError(InputError):
    """A folder whose weights do not fit the model; names file and key."""


class SafetensorsFolder:
    """The tensors of model.safetensors, or of all files that its index names, opened as needed."""

    def __init__(self, folder: Path, *, wrapped: bool = False) -> None:
        """wrapped: a multimodal folder, of which there is the language model alone, under the names
        of a causal LM."""
        self.folder = folder
        self.files: dict[str, str] = {}
        """file of each tensor; empty when the folder holds no safetensors"""
        self._open: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            self.files = _read_index(folder / INDEX)
        elif (folder / SINGLE).is_file():
            self.files = dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
        self._stored: dict[str, str] = {}
        """the name in the file, where it is another"""
        if wrapped:
            own = {text_name(name): name for name in self.files}
            self._stored = {name: stored for name, stored in own.items() if name is not None}
            self.files = {name: self.files[stored] for name, stored in self._stored.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header of its file."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        """The part of a tensor inside `box` (one slice per dim), in the file's dtype."""
        part = self._slice(name)
        return part[tuple(box)] if box else part[...]

    def where(self, name: str) -> str:
        """`file: key`, for messages; the index for a key that no file holds."""
        stored = self._stored.get(name, name)
        return f"{self.folder / self.files.get(name, INDEX)}: {stored}"

    def _slice(self, name: str) -> Any:
        handle = self._handle(self.files[name])
        try:
            return handle.get_slice(self._stored.get(name, name))
        except SafetensorError as error:
            raise WeightsError(f"{self.where(name)}: {error}") from error

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{self.folder / file}: cannot be read: {error}") from error
        return self._open[file]


def _read_index(path: Path) -> dict[str, str]:
    """File of each tensor. Raises WeightsError for an index that is cut or says something else."""
    try:
        index = json.loads(path.read_bytes())
    except ValueError as error:  # no UTF-8, no JSON
        raise WeightsError(f"{path}: is no JSON: {error}") from error
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files:
        raise WeightsError(f"{path}: has no weight_map, which names the file of each tensor")
    # A name with a folder in it could lie anywhere.
    wrong = [f for f in files.values() if not isinstance(f, str) or Path(f).name != f]
    if wrong:
        raise WeightsError(f"{path}: weight_map names {wrong[0]!r}, which is no file of its folder")
    return files


class HostCopy(NamedTuple):
    """Where the weights come from when names in the files are not the model's."""

    build: Callable[[], nn.Module]
    """the whole model on the host, by transformers' own loading"""
    group: dist.ProcessGroup
    """host group of all ranks, over which rank 0 hands the tensors out"""
    wrapped: bool = False
    """it is a multimodal model around the one that is filled"""


class Conversion(NamedTuple):
    """What transformers does with the tensors of a folder when it loads a model."""

    renames: bool
    merges: bool
    """joins, cuts or turns them"""


def materialize(module: nn.Module, *, param_device: torch.device, device: torch.device) -> None:
    """Give a model on the meta device memory: parameters on param_device, buffers on `device`.

    Parameters hold garbage until load_weights; non-persistent buffers are computed here where
    transformers' _init_weights knows them and are NaN otherwise.
    """
    tied = tied_names(module)
    module.to_empty(device=param_device)
    for names in tied:
        set_parameter(module, names, module.get_parameter(names[0]))
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = torch.empty_like(buffer, device=device)
    for parameter in module.parameters():
        parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
    buffers = non_persistent_buffers(module)
    for buffer in buffers.values():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    compute_buffers(module, buffers)


def remember_names(module: Any, whole: Any | None = None) -> None:
    """Note on a transformers model how its names differ from those of its checkpoints.

    They are looked up by class, and FSDP renames classes: call this before sharding. Whoever writes
    the checkpoint's names (transformers.core_model_loading.revert_weight_conversion) finds them
    there, and so does whoever loads.
    whole: the multimodal model (ppo/models/wrapped.py) whose folder holds it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming

    conversions = get_model_conversion_mapping(module, add_legacy=False)
    # As transformers does: whether a checkpoint has a prefix that may be left out is not known.
    module._weight_conversions = [c for c in conversions if not isinstance(c, PrefixChange)]
    if whole is not None:
        module.wrapper = whole.wrapper
        conversions = get_model_conversion_mapping(whole.module, add_legacy=False)
        # those of its towers have the tower as their scope
        own = "language_model"
        scopes = [getattr(c, "scope_prefix", None) or own for c in conversions]
        conversions = [c for c, s in zip(conversions, scopes, strict=True) if s.startswith(own)]
    merges = any(not isinstance(c, WeightRenaming) for c in conversions)
    module.conversion = Conversion(bool(conversions), merges)


def load_weights(
    module: nn.Module,
    folder: Path,
    *,
    source: HostCopy,
    aliases: Sequence[Sequence[str]] | None = None,
    optional: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> None:
    """Fill parameters and persistent buffers of a materialized model from `folder`.

    Every rank reads only its shards. Where tensors are converted on loading (`remember_names` of
    the module before it was sharded) and the files do not hold them under the model's names, or the
    folder holds no safetensors, rank 0 builds the whole model on the host and every rank takes its
    slices of each broadcast tensor: collective then.
    Files may hold a tensor under any name of its group in `aliases` (None = of the module's tied
    parameters). Names in `optional` that no file holds become zeros; keys that match a pattern of
    `ignored` may be there.
    Raises WeightsError that lists missing, unexpected and mis-shaped keys with their files.
    """
    files, targets = SafetensorsFolder(folder, wrapped=source.wrapped), _targets(module)
    names = {g[0]: list(g) for g in (tied_names(module) if aliases is None else aliases)}
    for name in [name for name in optional if name not in files.files]:
        local_shard(targets.pop(name)).zero_()
    conversion: Conversion = module.conversion  # pyright: ignore[reportAssignmentType]
    problems = _problems(module, files, targets, names, ignored)
    if not files.files:
        _load_through_host(module, files, targets, source, "the folder has no safetensors")
    elif conversion.merges or (conversion.renames and problems):
        _load_through_host(module, files, targets, source, "names are converted on loading")
    else:
        raise_problems(problems)
        _load_slices(files, targets, names)
    unknown = {n: b for n, b in non_persistent_buffers(module).items() if _unset(b)}
    if unknown:
        reason = f"{next(iter(unknown))} is computed when a model is built"
        _load_through_host(module, files, unknown, source, reason)


def check_finite(module: nn.Module, folder: Path, group: dist.ProcessGroup) -> None:
    """Raise WeightsError on all ranks of the group for loaded numbers that are not finite."""
    shards = {name: local_shard(target) for name, target in _targets(module).items()}
    broken = [name for name, shard in shards.items() if not _is_finite(shard)]
    error = f"{folder}: {broken[0]} holds numbers that are not finite" if broken else None
    raise_everywhere(error, group, WeightsError, name_ranks=False)


def _is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are; by their sum, which is fast and takes no memory of that size."""
    wider = torch.float32 if tensor.dtype == torch.float16 else None  # whose sums overflow
    return not tensor.is_floating_point() or bool(tensor.sum(dtype=wider).isfinite())


def _load_slices(
    files: SafetensorsFolder, targets: dict[str, Tensor], aliases: Mapping[str, Sequence[str]]
) -> None:
    """Copy this rank's part of each target from the files."""
    for name, target in targets.items():
        copies = [
            files.read(stored, local_box(target))
            for stored in aliases.get(name, [name])
            if stored in files.files
        ]
        if any(not torch.equal(copy, copies[0]) for copy in copies[1:]):
            raise WeightsError(
                f"{files.folder}: {aliases[name]} are tied in the model and differ in the files; "
                "set model.override_config.tie_word_embeddings=false"
            )
        local_shard(target).copy_(copies[0])


def local_box(tensor: Tensor) -> tuple[slice, ...]:
    """The part of a (sharded) tensor that this rank holds, one slice of the whole per dim."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def _unset(buffer: Tensor) -> bool:
    """Whether _init_weights left a buffer alone; unknowable for integers, which count as unset."""
    return not buffer.is_floating_point() or bool(buffer.isnan().any())


def _targets(module: nn.Module) -> dict[str, Tensor]:
    """Tensors to fill, by name; tied parameters once, adapters not."""
    return {**model_parameters(module), **persistent_buffers(module)}


def _problems(
    module: nn.Module,
    files: SafetensorsFolder,
    targets: dict[str, Tensor],
    aliases: Mapping[str, Sequence[str]],
    ignored: Sequence[str],
) -> list[str]:
    """What does not fit: missing, unexpected and mis-shaped keys, with their files."""
    problems = []
    for name, target in targets.items():
        stored = [n for n in aliases.get(name, [name]) if n in files.files]
        if not stored:
            problems.append(f"{files.folder}: {name}: missing")
        for other in stored:
            if (shape := files.shape(other)) != tuple(target.shape):
                problems.append(
                    f"{files.where(other)}: shape {[*shape]}, the model needs {[*target.shape]}"
                )
    # Rotary tables are in old checkpoints; transformers drops the rest too.
    allowed = [*ignored, r"rotary_emb\.inv_freq$"]
    allowed += getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    known = {*targets, *non_persistent_buffers(module), *(n for g in aliases.values() for n in g)}
    problems += [
        f"{files.where(name)}: not a parameter of {type(module).__name__}"
        for name in sorted(files.files.keys() - known)
        if not any(re.search(pattern, name) for pattern in allowed)
    ]
    return problems


def raise_problems(problems: Sequence[str]) -> None:
    """Raise WeightsError that lists the problems, if any."""
    if problems:
        more = len(problems) - MAX_PROBLEMS
        lines = [*problems[:MAX_PROBLEMS]] + ([f"... and {more} more"] if more > 0 else [])
        raise WeightsError("weights do not fit the model:\n  " + "\n  ".join(lines))


@torch.no_grad()
def _load_through_host(
    module: nn.Module,
    files: SafetensorsFolder,
    targets: dict[str, Tensor],
    source: HostCopy,
    reason: str,
) -> None:
    """Broadcast each tensor of a whole model that rank 0 builds, and keep this rank's slice.

    What is wrong with the files is raised on every rank.
    """
    rank, whole = dist.get_rank(source.group), {}
    logger.info(
        "%s: loading through one whole copy on the host of rank 0 (%s)", files.folder, reason
    )

    def build() -> None:
        if rank == 0:
            host = source.build()
            held = {**dict(host.named_parameters()), **dict(host.named_buffers())}
            named = {text_name(n) if source.wrapped else n: t for n, t in held.items()}
            whole.update(named)

    together(build, source.group, WeightsError, expected=WeightsError, name_ranks=False)
    for name, target in targets.items():
        full = torch.empty(target.shape, dtype=target.dtype)
        if rank == 0 and name in whole:
            full.copy_(whole[name])
        elif rank == 0:  # a head that transformers' class does not have
            full.copy_(files.read(name, [slice(0, n) for n in target.shape]))
        dist.broadcast(full, group_src=0, group=source.group)
        local_shard(target).copy_(full[local_box(target)])
