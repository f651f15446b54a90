"""Sections trainer and check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from ppo.config.bounds import (
    Bound,
    FilePath,
    HangTimeout,
    NonNegativeInt,
    PositiveInt,
    Ranks,
    Seconds,
    Seed,
    StepsOrEnd,
    Timeout,
)
from ppo.config.fields import MayChange, Section, seconds

LoggerName = Literal["console", "jsonl", "tensorboard", "wandb", "trackio", "mlflow", "swanlab"]
PACKAGES_OF_LOGGERS = ("wandb", "trackio", "mlflow", "swanlab")
"""loggers that need the package of their name"""


@dataclass(frozen=True, kw_only=True)
class CheckConfig(Section):
    """The machine that `--check` plans for; a training run does not read it."""

    nnodes: Annotated[int, Bound(ge=1, le=4096)] = 1
    """number of nodes"""
    nproc_per_node: Ranks = 8
    """ranks (devices) of a node"""
    device_memory_gib: Annotated[float, Bound(ge=1e-6, le=10_000, usual=(1, 1000))] = 80.0
    """memory of one device, GiB"""


@dataclass(frozen=True, kw_only=True)
class EarlyStopConfig(Section):
    """The end of a run whose metric does not become better any more."""

    metric: str | None = None
    """metric whose highest value is best; with a minus before its name, the lowest; null = off"""
    patience: PositiveInt = 3
    """the run ends when it was so often not better than the best, one after the other; steps
    without it do not count"""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Section):
    """The run: length, saving, logging, stopping."""

    seed: Seed = 42
    """of everything random"""
    total_epochs: MayChange[Annotated[int, Bound(ge=1, le=10**6, usual=(1, 1000))]] = 1
    """passes over the prompts"""
    total_training_steps: MayChange[PositiveInt | None] = None
    """iterations; null = all of total_epochs"""
    critic_warmup: NonNegativeInt = 0
    """iterations in which only the critic is trained"""
    save_freq: MayChange[StepsOrEnd] = 50
    """iterations between checkpoints; 0 = only at the end or at a stop, -1 = never"""
    test_freq: MayChange[StepsOrEnd] = 10
    """iterations between validations; 0 = only at the end, -1 = never"""
    val_before_train: MayChange[bool] = True
    """validate before the first iteration"""
    val_only: MayChange[bool] = False
    """validate and end: nothing of the run changes, the results are in its folder validations"""
    resume_mode: MayChange[FilePath] = "auto"
    """auto = newest complete checkpoint of the run folder; disable = start anew, an earlier run is
    set aside; or the path of a checkpoint or run: metrics and samples after its step are set
    aside, of a run in another folder everything that is here"""
    allow_changed_config: MayChange[bool] = False
    """resume although keys have changed that a resumed run should keep"""
    async_save: MayChange[bool] = True
    """write checkpoints while training goes on"""
    max_ckpt_to_keep: MayChange[PositiveInt | None] = 2
    """older checkpoints are deleted; null = keep all"""
    keep_best: MayChange[str | None] = None
    """metric whose highest value keeps its checkpoint besides; with a minus before its name, the
    lowest; null = none"""
    early_stop: MayChange[EarlyStopConfig] = field(default_factory=EarlyStopConfig)
    """end before the last iteration, as finished"""
    max_wall_time: MayChange[Seconds | None] = field(default=None, metadata=seconds())
    """stop, save and end after so long: seconds, or [D-]HH:MM:SS; null = never"""
    comm_timeout_s: MayChange[Timeout] = 600.0
    """time limit of a collective, seconds"""
    hang_timeout_s: MayChange[HangTimeout] = 1800.0
    """seconds without a sign of life of a rank, or without progress on any, after which a run that
    has begun ends, names who hangs, and has the stacks of all ranks in their logs; longer than a
    micro-batch takes; 0 = never"""
    logger: MayChange[list[LoggerName]] = field(
        default_factory=lambda: ["console", "jsonl", "tensorboard"]
    )
    """where metrics go: wandb, trackio, mlflow and swanlab need their package, and read their own
    environment variables (WANDB_MODE=offline, MLFLOW_TRACKING_URI, ...)"""
    project_name: MayChange[FilePath] = "ppo"
    """folder of related runs"""
    experiment_name: MayChange[FilePath | None] = None
    """folder of this run in it; null = name of the config file"""
    default_local_dir: MayChange[FilePath | None] = None
    """run folder; null = runs/PROJECT/EXPERIMENT"""
    log_val_generations: MayChange[NonNegativeInt] = 8
    """validation samples that are logged as text"""
    balance_batch: MayChange[bool] = True
    """spread sequences over ranks by cost instead of in order"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = CUDA where there is one"""
    numa_binding: MayChange[bool] = True
    """on CUDA, keep each rank on the cores of its GPU's NUMA node, where the system shows it"""
    deterministic: bool = False
    """deterministic kernels, and per-sample seeds in SGLang on CUDA: slower"""

    @property
    def resume_path(self) -> str | None:
        """The checkpoint that is asked for by name."""
        return None if self.resume_mode in ("auto", "disable") else self.resume_mode
