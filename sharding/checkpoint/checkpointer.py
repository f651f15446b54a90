"""Distributed checkpoints: save, find the newest, load on any other sharding, prune, export.

Owns what a trainer calls. How ranks write together is in writer.py, how one reads in reader.py,
what a checkpoint consists of in files.py, when one may be trusted in damage.py, their order in
folder.py, the names of tensors in tensors.py. Must not know a trainer.

    python -m sharding.checkpoint export CHECKPOINT_OR_RUN OUT [--model actor] [--dtype bfloat16]
                                         [--adapter] [--base FOLDER]
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from sharding.agree import gather, together
from sharding.checkpoint import folder as folders
from sharding.checkpoint import tensors as tensors
from sharding.checkpoint.adapters import FILE as ADAPTERS
from sharding.checkpoint.adapters import document_of
from sharding.checkpoint.damage import find_damage, read_train_state
from sharding.checkpoint.files import CheckpointError, DamagedCheckpoint
from sharding.checkpoint.reader import read_checkpoint
from sharding.checkpoint.wrapped import FILE as WRAPPER
from sharding.checkpoint.writer import CheckpointWriter, Job
from sharding.fsdp import reshard
from sharding.groups import new_group
from sharding.mesh import Mesh
from sharding.offload import host_storages, lend

logger = logging.getLogger(__name__)

Check = Callable[[int, dict[str, Any]], str | None]
"""what is wrong with the state of a step, or None"""


def accept(_step: int, _state: Mapping[str, Any]) -> None:
    """A check that finds nothing wrong."""


class Saved(NamedTuple):
    """How a save ended."""

    step: int
    failure: CheckpointError | None


class Checkpointer:
    """Saves and loads models, optimizers and JSON state in one folder, over all ranks of a mesh.

    Every method is collective. A context manager: leaving it finishes the save in flight, which
    must happen before the process group is destroyed.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        *,
        async_save: bool = True,
        max_to_keep: int | None = 2,
        keep_best: str | None = None,
        assets: Sequence[Any] = (),
        hf_models: Sequence[str] = (),
        timeout_s: float = 3600,
    ):
        """
        Args:
            folder: of the checkpoints; made when missing, on a file system that all ranks see.
            async_save: `save` returns when what is on a device is copied to the host, and a
                thread writes; what rests on the host (sharding/offload.py) is not copied.
            max_to_keep: newest checkpoints to keep; None = all.
            keep_best: name of a metric; the one with its highest value is kept besides.
            assets: objects with save_pretrained(folder), such as a tokenizer; and files.
            hf_models: names of models to write in Hugging Face format too (on rank 0).
            timeout_s: seconds that a rank may write longer than another.
        """
        self.folder = folder
        self._mesh = mesh
        self._async = async_save
        self._assets = _render(assets) if mesh.rank == 0 else {}
        # of its own: a collective of the writing thread must not meet one of the training
        everyone, timeout = range(mesh.dims.world_size), timedelta(seconds=timeout_s)
        self._writer = CheckpointWriter(
            folder=folder,
            mesh=mesh,
            group=new_group(everyone, timeout=timeout),
            max_to_keep=max_to_keep,
            keep_best=keep_best,
            hf_models=tuple(hf_models),
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Saved] | None = None
        self._failure: CheckpointError | None = None
        self._saved_step = 0
        self._staging = tensors.Staging()
        self._looked_at: set[Path] = set()
        """checkpoints of which all is as written but what is found out in loading"""
        self._damaged: dict[Path, str] = {}
        """what was found out in loading"""

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.finish()
        except RuntimeError as failure:
            if error is None:
                raise
            # the exception on its way is the cause to show; of ranks that are gone others speak
            level = logging.ERROR if isinstance(failure, CheckpointError) else logging.DEBUG
            logger.log(level, "%s", failure)
        finally:
            self._thread.shutdown()

    def save(
        self,
        step: int,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        state: Mapping[str, Any],
        *,
        metric: float | None = None,
    ) -> None:
        """Write `step_STEP`; replaces one of the same step.

        One that cannot be written is said, and the next save tries again; checkpoints that are
        there stay as they are.

        Args:
            models: FSDP2 modules (or plain ones, equal on all ranks) by name.
            optimizers: by the name of the model whose parameters they hold.
            state: JSON, equal on all ranks.
            metric: for keep_best; higher is better.

        Raises:
            CheckpointError: on all ranks, when two saves in a row could not be written.
        """
        self._settle()
        self._looked_at.clear()
        self._damaged.clear()
        for module in models.values():
            reshard(module)
        table = {
            **tensors.model_tensors(models),
            **tensors.optimizer_tensors(models, optimizers),
        }
        table = tensors.written_here(table, self._mesh) | tensors.rng_tensors(self._mesh.rank)
        train_state = {
            "step": step,
            "world_size": self._mesh.dims.world_size,
            "optimizers": tensors.optimizer_groups(models, optimizers),
            "state": state,
        }
        documents = self._assets | _model_configs(models) if self._mesh.rank == 0 else {}
        owners = [*models.values(), *optimizers.values()]
        if self._async:
            # what rests on the host is written from there: no update may change it meanwhile
            resting = set().union(*map(host_storages, owners))
            table = self._staging.copies(table, resting=resting)
        job = Job(
            step=step,
            table=table,
            train_state=json.dumps(train_state),
            documents=documents,
            metric=metric,
        )
        if self._async:
            self._pending = self._thread.submit(self._write, job)
            for owner in owners:
                lend(owner, self._pending)
        else:
            self._note(self._write(job))

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint that was written or loaded here; 0 = none. Collective."""
        self._settle()
        return self._saved_step

    def finish(self) -> None:
        """Wait for the save in flight; raises CheckpointError on all ranks if the last failed."""
        self._settle()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, job: Job) -> Saved:
        try:
            self._writer.write(job)
        except CheckpointError as failure:
            if self._mesh.rank == 0:
                logger.warning("%s; the next save, if there is one, tries again", failure)
            return Saved(job.step, failure)
        return Saved(job.step, None)

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._note(pending.result())

    def _note(self, saved: Saved) -> None:
        before, self._failure = self._failure, saved.failure
        if saved.failure is None:
            self._saved_step = saved.step
        elif before is not None:
            self._failure = None
            raise CheckpointError(f"two in a row: {before}; {saved.failure}")

    def latest(self, where: Path | None = None, *, check: Check = accept) -> Path | None:
        """The newest checkpoint that may be loaded, or None; same on all ranks.

        Its files are there as written, as far as can be said before its tensors are read: `load`
        checks those. A damaged checkpoint is skipped with a warning that names it, also one that
        `load` has found to be damaged.

        Args:
            where: a checkpoint, a run or a folder of checkpoints; None = this one's.
            check: what its state must be besides; called on rank 0.

        Raises:
            CheckpointError: on all ranks: there are checkpoints, and every one is damaged, or
                `where` holds none.
        """
        self._settle()
        candidates = self._on_rank_0(lambda: folders.candidates(where or self.folder))
        for candidate in candidates:
            damage = self._find_damage(candidate, check)
            if damage is None:
                return candidate
            if candidate == where:
                raise CheckpointError(damage)
            if self._mesh.rank == 0:
                logger.warning("checkpoint %s skipped: %s", candidate.name, damage)
        if candidates:  # to start anew would overwrite them
            raise CheckpointError(f"{where or self.folder}: every checkpoint is damaged")
        if where is not None:
            raise CheckpointError(f"{where}: no complete checkpoint here or in checkpoints/")
        return None

    def read_state(self, path: Path) -> dict[str, Any]:
        """The JSON state of a checkpoint, before any tensor is read; same on all ranks."""
        return self._on_rank_0(lambda: read_train_state(path))["state"]

    def owns(self, path: Path) -> bool:
        """Whether it is a checkpoint of this folder."""
        return path.resolve().parent == self.folder.resolve()

    def make_newest(self, path: Path) -> None:
        """The run goes on from this one: a later start must not find a newer one of its past.

        Does nothing for a checkpoint of another folder.
        """
        if self.owns(path):
            self._on_rank_0(lambda: folders.make_newest(path))

    def load(
        self,
        path: Path,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
    ) -> dict[str, Any]:
        """Load in place, whatever sharding, world size and axis order wrote it; returns the state.

        Optimizers get exactly the saved state; their hyperparameters stay as they are. With
        optimizers, on a world of the same size, random number generators are restored too.

        Raises:
            DamagedCheckpoint: on all ranks; models and optimizers hold parts of it then. `latest`
                names an older one now.
            CheckpointError: on all ranks: it does not hold what is asked for.
        """
        damage = None if path in self._looked_at else self._find_damage(path)
        if damage is not None:
            raise DamagedCheckpoint(damage)
        train_state = self._on_rank_0(lambda: read_train_state(path))
        rank, world_size = self._mesh.rank, self._mesh.dims.world_size

        def read() -> str | None:
            try:
                read_checkpoint(
                    path, models, optimizers, train_state, rank=rank, world_size=world_size
                )
            except DamagedCheckpoint as damage:
                return str(damage)
            return None

        group, kind = self._mesh.host_group, CheckpointError
        found = together(read, group, kind, expected=kind, name_ranks=False)
        damage = next((text for text in found if text is not None), None)
        if damage is not None:
            self._damaged[path] = damage
            raise DamagedCheckpoint(damage)
        self._saved_step = train_state["step"]
        logger.info("loaded checkpoint %s of step %d", path, train_state["step"])
        return train_state["state"]

    def load_newest(self, where: Path, models: Mapping[str, nn.Module]) -> Path:
        """Load models from the newest checkpoint that `where` means, and that is not damaged."""
        while True:
            path = self.latest(where)
            assert path is not None
            try:
                self.load(path, models, {})
            except DamagedCheckpoint:  # `latest` knows it now
                continue
            return path

    def _find_damage(self, path: Path, check: Check = accept) -> str | None:
        """The first damage that any rank finds in its share of the files, or found in loading."""
        if path in self._damaged:
            return self._damaged[path]
        size = self._mesh.dims.world_size
        mine = find_damage(path, share=self._mesh.rank, num_shares=size, before_load=True)
        if mine is None and self._mesh.rank == 0:
            try:
                train_state = read_train_state(path)
                mine = check(train_state["step"], train_state["state"])
            except CheckpointError as error:  # gone since
                mine = str(error)
        found = gather(mine, self._mesh.host_group)
        damage = next((text for text in found if text is not None), None)
        if damage is None:
            self._looked_at.add(path)
        return damage

    def _on_rank_0(self, look: Callable[[], Any]) -> Any:
        """What rank 0 finds: another node may see a new file later."""
        step = look if self._mesh.rank == 0 else lambda: None
        group, expected = self._mesh.host_group, (OSError, CheckpointError)
        return together(step, group, CheckpointError, expected=expected, name_ranks=False)[0]


def _render(assets: Sequence[Any]) -> dict[str, bytes]:
    """Files of the assets; made once, since a tokenizer in use cannot be saved by a thread."""
    with tempfile.TemporaryDirectory() as folder:
        for asset in assets:
            if isinstance(asset, Path):
                shutil.copy(asset, folder)
            else:
                asset.save_pretrained(folder)
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return {f"assets/{path.relative_to(folder)}": path.read_bytes() for path in paths}


def _model_configs(models: Mapping[str, nn.Module]) -> dict[str, bytes]:
    found = {}
    for name, module in models.items():
        if hasattr(module, "config"):
            config: Any = module.config
            found[f"models/{name}/config.json"] = config.to_json_string().encode()
        if (document := document_of(module)) is not None:
            found[f"models/{name}/{ADAPTERS}"] = document
        if (wrapper := getattr(module, "wrapper", None)) is not None:
            found[f"models/{name}/{WRAPPER}"] = wrapper.document()
    return found
