"""Checkpoints of a run: written at an iteration's end, found again, accepted, loaded.

Owns which checkpoint a start goes on from. Must not know the form of one (sharding/checkpoint/).
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from ppo.config import Config, ConfigError, Problem, changed_keys, from_yaml, to_yaml
from ppo.data.prompts import PromptSets
from ppo.errors import InputError
from ppo.models.folder import files_to_keep, model_folder
from ppo.models.roles import Models
from ppo.run.run import Run
from ppo.state.train_state import TrainState, signed_metric, state_problem
from sharding.checkpoint import Checkpointer, CheckpointError, DamagedCheckpoint

logger = logging.getLogger(__name__)

CHANGED_KEY_ADVICE = (
    "change it back, start another run with trainer.experiment_name=NAME, or set "
    "trainer.allow_changed_config=true"
)


def open_checkpoints(config: Config, run: Run, prompts: PromptSets) -> Checkpointer:
    """The checkpoints of the run folder."""
    folder = model_folder(config.model.path, run.mesh, run.dir)
    return Checkpointer(
        run.dir / "checkpoints",
        run.mesh,
        async_save=config.trainer.async_save,
        max_to_keep=config.trainer.max_ckpt_to_keep,
        keep_best=config.trainer.keep_best,
        assets=[prompts.tokenizer, *files_to_keep(folder)],
        hf_models=config.saving("hf_model"),
    )


def save_checkpoint(
    config: Config,
    checkpoints: Checkpointer,
    models: Models,
    state: TrainState,
    values: Mapping[str, float],
) -> None:
    """Write the state at this iteration boundary; `values` may hold trainer.keep_best's metric."""
    checkpoints.save(
        state.step,
        models.modules(),
        models.optimizers(config.saving("optimizer")),
        state.state_dict() | {"config": to_yaml(config)},
        metric=_best_metric(config.trainer.keep_best, state, values),
    )


def _best_metric(best: str | None, state: TrainState, values: Mapping[str, float]) -> float | None:
    """trainer.keep_best's metric of this step, such that higher is better."""
    found = signed_metric(best, values)
    if found is None and best is not None and values and not state.said_best_is_missing:
        logger.warning(
            "trainer.keep_best: step %d has no metric %s, and its checkpoint is kept as a newest "
            "one only; said once",
            state.step,
            best.removeprefix("-"),
            extra={"every_rank": True},
        )
        state.said_best_is_missing = True
    return found


def find_start(
    config: Config, run: Run, checkpoints: Checkpointer, state: TrainState
) -> Path | None:
    """The checkpoint that this start goes on from, with its JSON in `state`; None = from nothing.

    No tensor is read: a change that is refused costs seconds. A restart by torchrun goes on from
    the run's own checkpoints, once it has any, whatever the first start went on from.

    Raises InputError on all ranks: there is none, or it fits not.
    """
    mode = config.trainer.resume_mode
    found = None
    try:
        if mode == "auto" or run.is_restart:
            found = checkpoints.latest(check=state_problem)
        if found is None and config.trainer.resume_path is not None:
            found = checkpoints.latest(Path(mode), check=state_problem)
        if found is None:
            return None
        saved = checkpoints.read_state(found)
    except CheckpointError as error:
        advice = "trainer.resume_mode=disable starts anew"
        raise InputError(f"trainer.resume_mode = {mode!r}: {error}; {advice}") from error
    if not config.trainer.allow_changed_config:
        _refuse_changes(config, saved["config"], found)
    state.load_state_dict(saved)
    return found


def load_models(
    config: Config,
    run: Run,
    checkpoints: Checkpointer,
    models: Models,
    state: TrainState,
    start: Path,
) -> Path:
    """Weights and optimizers of `start`, which `find_start` has found; returns where they are from.

    A checkpoint whose tensors turn out to be damaged, which is seen as they are read, is skipped
    for the next one of `find_start`, with its JSON in `state`. Raises InputError on all ranks.
    """
    optimizers = models.optimizers(config.saving("optimizer"))
    found: Path | None = start
    while found is not None:
        try:
            checkpoints.load(found, models.modules(), optimizers)
            logger.info("resumed from %s after step %d", found, checkpoints.saved_step)
            return found
        except DamagedCheckpoint:
            found = find_start(config, run, checkpoints, state)
        except CheckpointError as error:
            raise InputError(f"resume: {error}") from error
    raise InputError(f"resume: {start} is damaged, and there is no other checkpoint")


def _refuse_changes(config: Config, saved: str, checkpoint: Path) -> None:
    try:
        changed = changed_keys(from_yaml(saved), config)
    except ConfigError as error:
        changed = [f"the configuration was saved by another version: {p}" for p in error.problems]
    if changed:
        raise ConfigError(
            [Problem("", None, f"{key} since {checkpoint}", CHANGED_KEY_ADVICE) for key in changed]
        )
