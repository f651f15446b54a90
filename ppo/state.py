"""What a restart needs: saved, found again, loaded."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo.config import Config, ConfigError, Problem, changed_keys, from_yaml, to_yaml
from ppo.data.prompts import PromptSets
from ppo.data.sampler import PromptSampler
from ppo.errors import InputError
from ppo.kl import KLController
from ppo.models.roles import Models
from ppo.run.run import Run
from sharding.checkpoint import Checkpointer, CheckpointError, find_checkpoint

logger = logging.getLogger(__name__)


def open_checkpoints(config: Config, run: Run, prompts: PromptSets) -> Checkpointer:
    """The checkpoints of the run folder."""
    return Checkpointer(
        run.dir / "checkpoints",
        run.mesh,
        async_save=config.trainer.async_save,
        max_to_keep=config.trainer.max_ckpt_to_keep,
        keep_best=config.trainer.keep_best is not None,
        assets=[prompts.tokenizer],
        hf_models=config.saving("hf_model"),
    )


CHANGED_KEY_ADVICE = "change it back, or set trainer.allow_changed_config=true"


@dataclass
class TrainState:
    """What a restart needs besides tensors: JSON, the same on every rank."""

    sampler: PromptSampler
    kl_controller: KLController
    step: int = 0
    """iterations done"""
    position: dict[str, Any] | None = None
    """where the sampler stood after them; None = at its start"""
    saved_step: int = 0
    """iterations in the newest checkpoint; not part of the state"""

    def commit(self) -> None:
        """End an iteration: only now do its prompts count as used."""
        self.step += 1
        self.position = self.sampler.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The state at the last iteration boundary."""
        return {
            "step": self.step,
            "sampler": self.position,
            "kl_controller": self.kl_controller.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the iteration that the checkpoint ended with."""
        self.step, self.position = state["step"], state["sampler"]
        if self.position is not None:
            self.sampler.load_state_dict(self.position)
        self.kl_controller.load_state_dict(state["kl_controller"])


def save_checkpoint(
    config: Config,
    checkpoints: Checkpointer,
    models: Models,
    state: TrainState,
    values: Mapping[str, float],
) -> None:
    """Write the state at this iteration boundary; `values` may hold trainer.keep_best's metric."""
    best = config.trainer.keep_best
    if values and best is not None and best not in values:
        logger.warning(
            "trainer.keep_best: step %d has no metric %s",
            state.step,
            best,
            extra={"every_rank": True},
        )
    checkpoints.save(
        state.step,
        models.modules(),
        models.optimizers(config.saving("optimizer")),
        state.state_dict() | {"config": to_yaml(config)},
        metric=values.get(best or ""),
    )
    state.saved_step = state.step


def resume(
    config: Config, run: Run, checkpoints: Checkpointer, models: Models, state: TrainState
) -> None:
    """Load the newest complete checkpoint, or the one that is asked for, if any."""
    mode = run.resume_mode
    if mode == "disable":
        return
    try:
        folder = checkpoints.latest() if mode == "auto" else find_checkpoint(Path(mode))
        if folder is None:
            return
        optimizers = models.optimizers(config.saving("optimizer"))
        saved = checkpoints.load(folder, models.modules(), optimizers)
    except CheckpointError as error:
        advice = "trainer.resume_mode=disable starts anew"
        raise InputError(f"trainer.resume_mode = {mode!r}: {error}; {advice}") from error
    changed = changed_keys(from_yaml(saved["config"]), config)
    if changed and not config.trainer.allow_changed_config:
        raise ConfigError(
            [Problem("", None, f"{key} since {folder}", CHANGED_KEY_ADVICE) for key in changed]
        )
    state.load_state_dict(saved)
    state.saved_step = state.step
    run.status("running", state.step)
    run.save_config()
    logger.info("resumed from %s after step %d", folder, state.step)
