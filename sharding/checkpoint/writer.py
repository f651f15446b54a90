"""Writing one checkpoint over all ranks: beside, agreed, renamed.

Owns the order of writing, and that all ranks succeed or fail together. Runs in a thread while the
training goes on: it talks on a group of its own and never touches the device. Must not know models.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from sharding.agree import gather, raise_everywhere, together
from sharding.checkpoint import files as files
from sharding.checkpoint import folder as folders
from sharding.checkpoint.damage import bound_train_state
from sharding.checkpoint.export import write_hf
from sharding.checkpoint.files import CheckpointError, FileRecord
from sharding.checkpoint.storage import ChecksumWriter, causes
from sharding.fsdp import local_shard
from sharding.mesh import Mesh

logger = logging.getLogger(__name__)

FAILURES = (OSError, RuntimeError, ValueError, TypeError, LookupError, ImportError)
"""What writing may raise; it must reach the other ranks, or they would wait for this one."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One save: everything that it needs once the training goes on."""

    step: int
    table: dict[str, Tensor]
    """what this rank writes"""
    train_state: str
    """JSON"""
    documents: dict[str, bytes]
    """by path inside the checkpoint; rank 0's are written"""
    metric: float | None


class _Planner(DefaultSavePlanner):
    """Torch's, which sends to rank 0 and back what is to be written, only if that has changed.

    All of it would be an entry for each tensor and rank. Torch keeps plans by the name of the
    class, though, for everything that a process saves.
    """

    def __init__(self, key: str):
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = key


class _Written(NamedTuple):
    """What is known of all ranks' files of tensors."""

    records: dict[str, FileRecord]
    """by path inside the checkpoint"""
    blocks: dict[str, str]
    """checksums of blocks by file name"""


@dataclass(frozen=True, kw_only=True)
class CheckpointWriter:
    """Writes jobs into one folder; see Checkpointer for the options."""

    folder: Path
    mesh: Mesh
    group: ProcessGroup
    """gloo, all ranks, used by nothing else"""
    max_to_keep: int | None
    keep_best: str | None
    """name of the metric"""
    hf_models: tuple[str, ...]
    key: str = field(default_factory=lambda: uuid4().hex)
    """of its own plans among those of this process"""

    def write(self, job: Job) -> None:
        """Write beside, agree, rename. Raises CheckpointError on all ranks or on none."""
        started = time.monotonic()
        beside = self.folder / f"step_{job.step:08d}.tmp"
        num_bytes = self._total_bytes(job)
        try:
            self._on_rank_0(lambda: self._prepare(beside, num_bytes))
            written = self._write_tensors(beside, job)
            self._on_rank_0(lambda: self._commit(beside, job, written))
        except CheckpointError as error:
            if self.mesh.rank == 0:
                shutil.rmtree(beside, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {job.step} not written, earlier ones are untouched: {error}"
            ) from error
        if self.mesh.rank == 0:
            took = time.monotonic() - started
            path = beside.with_suffix("")
            logger.info("wrote checkpoint %s: %.3f GiB, %.1f s", path, num_bytes / 2**30, took)

    def _total_bytes(self, job: Job) -> int:
        """Bytes of all ranks' tensors."""
        local = (local_shard(tensor) for tensor in job.table.values())
        total = torch.tensor(sum(tensor.numel() * tensor.element_size() for tensor in local))
        dist.all_reduce(total, group=self.group)
        return int(total)

    def _prepare(self, beside: Path, num_bytes: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        folders.remove_leftovers(self.folder)
        needed = int(num_bytes * (1.02 + 0.5 * len(self.hf_models))) + (1 << 24)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise CheckpointError(
                f"{self.folder} has {free / 2**30:.3f} GiB free, {needed / 2**30:.3f} GiB needed"
            )
        (beside / files.TENSORS).mkdir(parents=True)

    def _write_tensors(self, beside: Path, job: Job) -> "_Written":
        """All ranks' tensor files."""
        writer = ChecksumWriter(beside / files.TENSORS)
        try:
            save(
                job.table,
                storage_writer=writer,
                planner=_Planner(self.key),
                process_group=self.group,
            )
        except CheckpointException as error:  # raised on all ranks when any fails
            raise_everywhere(writer.error, self.group, CheckpointError)
            raise CheckpointError(causes(error)) from error
        written = _Written({}, {})
        for records, blocks in gather((writer.records, writer.blocks), self.group):
            written.records.update({f"{files.TENSORS}/{name}": r for name, r in records.items()})
            written.blocks.update(blocks)
        return written

    def _commit(self, beside: Path, job: Job, written: "_Written") -> None:
        """Rank 0, when all tensors are durable: the rest of the files, then the names."""
        records = written.records
        documents = job.documents | {
            files.TRAIN_STATE: bound_train_state(json.loads(job.train_state), records),
            files.CHECKSUMS: json.dumps(written.blocks).encode(),
        }
        for name, content in documents.items():
            (beside / name).parent.mkdir(parents=True, exist_ok=True)
            records[name] = files.write_durably(beside / name, content)
        for model in self.hf_models:
            write_hf(beside, beside / f"hf_{model}", model=model, adapter=None)
            records |= files.record_files(beside / f"hf_{model}", beside)
        files.sync_folder(beside / files.TENSORS)
        newest = folders.publish(
            beside,
            self.folder,
            step=job.step,
            files=records,
            metric=job.metric,
            metric_name=self.keep_best,
        )
        folders.point_latest_to(newest)
        try:
            folders.prune(self.folder, max_to_keep=self.max_to_keep, best_by=self.keep_best)
        except OSError as error:
            logger.warning("an old checkpoint could not be deleted: %s", error)

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        """Run it on rank 0; a failure there is a CheckpointError everywhere."""
        step = action if self.mesh.rank == 0 else lambda: None
        together(step, self.group, CheckpointError, expected=FAILURES)
