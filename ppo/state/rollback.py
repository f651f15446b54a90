"""What guards change at the end of an iteration: the end of the run, a rollback, a new critic.

Must not know rules: ppo/guards/ decides.
"""

import logging
from collections.abc import Callable
from typing import Any

from ppo.config import Config
from ppo.models.roles import Models, reset_critic
from ppo.run.run import Run
from ppo.state.train_state import TrainState, state_problem
from sharding.checkpoint import Checkpointer, DamagedCheckpoint

logger = logging.getLogger(__name__)


def obey_guards(
    config: Config,
    run: Run,
    checkpoints: Checkpointer,
    models: Models,
    state: TrainState,
    mark: Callable[[int], None],
) -> bool:
    """What rules want at the end of an iteration: the end of the run, a rollback, a new critic.

    mark: told the step after which rows of metrics are of what is undone. Returns whether weights
    were rolled back. Raises GuardAbort on all ranks. Collective.
    """
    guard, critic = state.guard, models.critic
    run.note_alarms(guard.alarms)
    guard.raise_abort()
    rolls_back = guard.rolls_back
    if rolls_back:
        target = _roll_back(config, checkpoints, models, state)
        guard.rolled_back(state.step, target)
        mark(target["step"])
    if guard.resets_critic and critic is not None:
        reset_critic(config, run.mesh, run.dir, critic)
        guard.critic_is_new(state.step)
        logger.warning("after step %d: a new critic", state.step, extra={"every_rank": True})
    return rolls_back


def _roll_back(
    config: Config, checkpoints: Checkpointer, models: Models, state: TrainState
) -> dict[str, Any]:
    """Weights, optimizers, RNG and KL controller as the newest checkpoint of this run has them.

    The count of iterations, the sampler and the guards go on from where they are. Returns the state
    of the checkpoint. Collective.
    """
    optimizers = models.optimizers(config.saving("optimizer"))
    for name in models.trained().keys() - optimizers.keys():
        models.trained()[name].forget()
    while True:
        found = checkpoints.latest(check=state_problem)
        assert found is not None, "one was written at the start"
        try:
            checkpoints.load(found, models.modules(), optimizers)
        except DamagedCheckpoint:  # `latest` knows it now
            continue
        saved = checkpoints.read_state(found)
        state.kl_controller.load_state_dict(saved["kl_controller"])
        state.load_running(saved)  # the critic's values are in their units
        told = state.step, saved["step"]
        logger.warning("after step %d: back to step %d", *told, extra={"every_rank": True})
        return saved
