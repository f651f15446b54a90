"""Sections trainer and check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from ppo.config.bounds import (
    Bound,
    FilePath,
    HangTimeout,
    ListRule,
    MetricName,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Ranks,
    Seconds,
    Seed,
    Share,
    StepsOrEnd,
    Timeout,
)
from ppo.config.fields import MayChange, Section, seconds
from ppo.config.sections.guards import MEMORY, Action, Condition, Rule

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
    """memory of one device, GiB; `--device_memory_gib auto`, which the launch scripts say: of the
    smallest GPU here"""


@dataclass(frozen=True, kw_only=True)
class EarlyStopConfig(Section):
    """The end of a run whose metric does not become better any more."""

    metric: MetricName | None = None
    """metric whose highest value is best; with a minus before its name, the lowest; null = off"""
    patience: PositiveInt = 3
    """the run ends when it was so often not better than the best, one after the other; steps
    without it do not count"""


@dataclass(frozen=True, kw_only=True)
class AlarmsConfig(Section):
    """What is warned about, once until it is no longer so; null = not. status.json has it too."""

    reshard_share: Share | None = 0.05
    """timing_share/reshard above it: part of the time that weights take on their way"""
    comm_share: Share | None = 0.10
    """timing_share/comm above it, in an iteration of trainer.profile_steps: part of the time in
    which a rank does nothing but communicate"""
    memory: Share | None = 0.95
    """perf/max_memory_share above it: share of a device's memory"""
    ref_kl: Positive | None = 0.1
    """actor/ref_kl above it: the policy has left the reference"""
    rollout_probs_diff_mean: Positive | None = 0.01
    """training/rollout_probs_diff_mean above it: engine and trainer do not compute the same"""
    mfu_below: Share | None = None
    """perf/mfu/actor below it"""
    throughput_below: Positive | None = None
    """perf/throughput below it: tokens per second and device"""
    kv_util_below: Share | None = None
    """rollout/kv_util below it: a smaller rollout.gpu_memory_utilization would do"""
    cut: Share | None = 0.5
    """response_length/clip_ratio above it: share of responses that are cut by length"""
    length_drift: Annotated[float, Bound(gt=1, le=1e9)] | None = 3.0
    """response_length/drift above it, or below 1 / it: against the first iterations"""
    looping: Share | None = 0.2
    """degeneration/looping above it: share of responses that repeat themselves"""
    unprintable: Share | None = 0.2
    """degeneration/unprintable above it: share of tokens that are no text"""
    episodes_without_turn: Share | None = 0.01
    """episodes/no_turn above it: share of episodes whose beginning leaves no room for a turn"""
    flat_groups: Share | None = None
    """degeneration/flat_groups above it: share of groups from which nothing is learned"""
    distinct_answers_below: Share | None = None
    """degeneration/distinct_answers below it: a group's responses end alike"""

    def rules(self) -> list[Rule]:
        """The alarms as rules of guards."""
        drift = self.length_drift
        probs = "compare rollout.engine=torch and sglang, and look at rollout.engine_kwargs"
        beginning = "data.max_prompt_length counts descriptions of tools and what reset returns too"
        diff = "training/rollout_probs_diff_mean"
        found = [
            _alarm("timing_share/reshard", self.reshard_share),
            _alarm("timing_share/comm", self.comm_share, advice="look at profile/"),
            _alarm(MEMORY, self.memory),
            _alarm("actor/ref_kl", self.ref_kl),
            _alarm(diff, self.rollout_probs_diff_mean, advice=probs),
            _alarm("perf/mfu/actor", self.mfu_below, "below"),
            _alarm("perf/throughput", self.throughput_below, "below"),
            _alarm("rollout/kv_util", self.kv_util_below, "below"),
            _alarm("response_length/clip_ratio", self.cut, advice="data.max_response_length"),
            _alarm("response_length/drift", drift),
            _alarm("response_length/drift", drift and 1 / drift, "below"),
            _alarm("degeneration/looping", self.looping, advice="look at samples/"),
            _alarm("degeneration/unprintable", self.unprintable, advice="look at samples/"),
            _alarm("episodes/no_turn", self.episodes_without_turn, advice=beginning),
            _alarm("degeneration/flat_groups", self.flat_groups),
            _alarm("degeneration/distinct_answers", self.distinct_answers_below, "below"),
        ]
        if self.rollout_probs_diff_mean is not None:
            found.append(_alarm(diff, 0.0, "not_finite", advice=probs))
        return [rule for rule in found if rule is not None]


def _alarm(
    metric: str, threshold: float | None, condition: Condition = "above", *, advice: str = ""
) -> Rule | None:
    if threshold is None:
        return None
    return Rule(
        metric=metric,
        condition=condition,
        threshold=threshold,
        actions=(Action("warn"),),
        advice=advice,
    )


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
    keep_best: MayChange[MetricName | None] = None
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
    logger: MayChange[Annotated[list[LoggerName], ListRule(least=1)]] = field(
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
    profile_steps: MayChange[Annotated[list[PositiveInt], ListRule()]] = field(default_factory=list)
    """iterations whose first mini-batch of the actor's update is traced on every rank, to
    RUN/profile: traces for Perfetto, on CUDA a memory snapshot, a table, and metrics"""
    log_val_generations: MayChange[NonNegativeInt] = 8
    """validation samples that are logged as text"""
    balance_batch: MayChange[bool] = True
    """spread sequences over ranks by cost instead of in order"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = CUDA where there is one"""
    numa_binding: MayChange[bool] = True
    """on CUDA, keep each rank on the cores of its GPU's NUMA node, where the system shows it"""
    alarms: MayChange[AlarmsConfig] = field(default_factory=AlarmsConfig)
    """what is warned about"""
    deterministic: bool = False
    """deterministic kernels, and per-sample seeds in SGLang on CUDA: slower"""

    @property
    def resume_path(self) -> str | None:
        """The checkpoint that is asked for by name."""
        return None if self.resume_mode in ("auto", "disable") else self.resume_mode
