"""How long what may take before a run is said to hang: the watchdog of a configuration.

Owns the limits that follow from several keys, and which phases have one of their own.
"""

import math
from collections.abc import Callable
from typing import IO

import torch.distributed as dist

from ppo.config import Config, TrainerConfig
from ppo.run.watchdog import Watchdog
from sharding.mesh import Mesh

DEVICE_PHASES = (
    *("old_log_prob", "ref", "values", "reward_model", "update_critic", "update_actor"),
)
"""in which ranks wait for each other in NCCL alone"""
NCCL_SHARE = 0.9
"""of comm_timeout_s, after which it is said who hangs: NCCL ends the process without a word"""


def make_watchdog(
    config: Config,
    mesh: Mesh,
    name: str,
    log: IO[str],
    last_words: Callable[[str, bool, bool], None],
) -> Watchdog:
    """The watchdog of this rank; see there for the arguments."""
    trainer = config.trainer
    on_nccl = mesh.device.type == "cuda" and mesh.dims.world_size > 1
    return Watchdog(
        dist.distributed_c10d._get_default_store(),
        name=name,
        rank=mesh.rank,
        local_rank=mesh.local_rank,
        world_size=mesh.dims.world_size,
        hang_timeout_s=trainer.hang_timeout_s,
        silence_s=min(trainer.hang_timeout_s or math.inf, trainer.comm_timeout_s / 2),
        limit_of_phase=limits(trainer, on_nccl=on_nccl),
        log=log,
        last_words=last_words,
    )


def limits(trainer: TrainerConfig, *, on_nccl: bool) -> dict[str, float]:
    """Other limits than trainer.hang_timeout_s, in seconds, by phase."""
    before = min(trainer.hang_timeout_s, NCCL_SHARE * trainer.comm_timeout_s)
    return dict.fromkeys(DEVICE_PHASES, before) if on_nccl else {}
