"""Section rollout, and what the rest of the program has to know of each engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from ppo.config.bounds import (
    Bound,
    FilePath,
    IntOrOff,
    Length,
    NonEmpty,
    PositiveInt,
    Ranks,
    Samples,
    Temperature,
    Timeout,
    TokenBudget,
    TopP,
)
from ppo.config.fields import MayChange, Section, derived
from ppo.config.sections.model import Dtype

EngineKind = Literal["sglang", "torch"]
EngineProcess = Literal["rank", "host"]


class EngineTraits(NamedTuple):
    """What checks, memory plan and choice know of an engine without importing it."""

    package: str | None = None
    """Python package that it needs; pip installs it as the extra of that name"""
    auto_on_cpu: bool = False
    """rollout.engine=auto may mean it where there is no CUDA"""
    own_processes: bool = False
    """may live outside of the trainer's processes, with CUDA contexts of its own; its KV cache
    fills rollout.gpu_memory_utilization"""
    unused: tuple[str, ...] = ()
    """keys of this section that have no effect with it"""


ENGINE_TRAITS: dict[EngineKind, EngineTraits] = {  # auto is the first one that fits
    "sglang": EngineTraits(package="sglang", own_processes=True),
    "torch": EngineTraits(
        auto_on_cpu=True,
        unused=("engine_kwargs", "engine_process", "enforce_eager", "free_cache_engine"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class ValKwargsConfig(Section):
    """Sampling in validation."""

    temperature: Temperature = 0.0
    """0 = greedy"""
    top_p: TopP = 1.0
    """nucleus; 1 = off"""
    n: Samples = 1
    """responses per prompt"""


ToolFormat = Literal["auto", "hermes", "qwen3_xml", "llama3", "mistral"]


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig(Section):
    """Conversations of several turns, with tools and environments of the user."""

    path: FilePath | None = None
    """Python file with the episode; null = one response to each prompt"""
    name: str = "episode"
    """async function of a row and a policy, or class of an environment, in that file"""
    max_turns: Annotated[int, Bound(ge=1, le=10_000, usual=(1, 200))] = 8
    """responses of the policy in one episode"""
    tool_timeout_s: MayChange[Timeout] = 30.0
    """of one call of a tool, seconds; the policy is told that it took too long"""
    timeout_s: MayChange[Timeout] = 600.0
    """of one episode, seconds; it counts as failed then"""
    max_observation_tokens: Length | None = None
    """longest result of a tool, tokens, longer ones are cut; null = as much as there is room for"""
    tool_format: ToolFormat = "auto"
    """how the model writes calls of tools; auto = by its chat template"""
    replay: MayChange[FilePath | None] = None
    """folder of a run, or samples of rollout.py (.jsonl): logged episodes are repeated by their
    tapes, without running their code; others run"""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section):
    """Generation: engine, sampling, memory."""

    engine: Literal["auto", EngineKind] = "auto"
    """auto = SGLang where CUDA and sglang are present, else the embedded torch engine"""
    engine_process: MayChange[Literal["auto", EngineProcess]] = "auto"
    """where SGLang runs: rank = inside the trainer's ranks, without other processes; host = in
    processes of its own; auto = rank on a CPU, host on CUDA"""
    n: Samples = 1
    """responses per prompt"""
    temperature: Temperature = 1.0
    """of sampling and of every log-prob; 0 = greedy, not for training"""
    top_p: TopP = 1.0
    """nucleus; 1 = off"""
    top_k: IntOrOff = -1
    """-1 = off"""
    stop: list[NonEmpty] = field(default_factory=list)
    """texts that end a response, besides the end-of-sequence tokens"""
    ignore_eos: bool = False
    """generate up to max_response_length always"""
    tensor_model_parallel_size: MayChange[Ranks] = 1
    """ranks that share one engine; divides the ranks of a node"""
    gpu_memory_utilization: MayChange[
        Annotated[float, Bound(ge=0.01, le=1, usual=(0.05, 0.95))]
    ] = 0.6
    """share of the whole device that weights and KV cache of the engine may take"""
    max_model_len: Annotated[int, Bound(ge=1, le=2 * 10**7)] = derived(
        "data.max_prompt_length", "data.max_response_length"
    )
    """longest sequence of the engine, tokens; null = max_prompt_length + max_response_length"""
    max_num_seqs: MayChange[Annotated[int, Bound(ge=1, le=10**6, usual=(1, 8192))] | None] = None
    """sequences that one engine decodes at once; null = as many as its KV cache holds of a quarter
    of the longest length, 256 on a CPU"""
    max_num_batched_tokens: MayChange[TokenBudget] = 8192
    """prompt tokens that one engine prefills at once"""
    dtype: Dtype = "bfloat16"
    """weights and KV cache of the engine"""
    free_cache_engine: MayChange[bool] = True
    """give the engine's memory back while training"""
    reshard_bucket_mib: MayChange[Annotated[int, Bound(ge=1, le=10**6, usual=(1, 16384))]] = 512
    """send and receive buffer of one exchange together, MiB"""
    verify_weights: MayChange[Literal["first", "never"] | PositiveInt] = "first"
    """compare weights of engine and trainer after the first sync, never, or after every N-th"""
    enforce_eager: MayChange[bool] = False
    """no CUDA graphs in the engine"""
    timeout_s: MayChange[Timeout] = 3600.0
    """an engine without progress for so long is dead, seconds"""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """passed on to sglang.Engine"""
    val_kwargs: MayChange[ValKwargsConfig] = field(default_factory=ValKwargsConfig)
    """sampling in validation"""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    """conversations of several turns"""

    def engine_kind(
        self, *, cuda: bool, installed: Callable[[str], object] = importlib.util.find_spec
    ) -> EngineKind:
        """The engine that `engine` means; auto is the first that this device and machine allow."""
        if self.engine != "auto":
            return self.engine
        return next(
            kind
            for kind, traits in ENGINE_TRAITS.items()
            if (cuda or traits.auto_on_cpu)
            and (traits.package is None or installed(traits.package))
        )

    def engine_process_kind(self, *, cuda: bool) -> EngineProcess:
        """Where SGLang runs; auto is the host on CUDA, where the rank was not tried yet."""
        if self.engine_process != "auto":
            return self.engine_process
        return "host" if cuda else "rank"

    @property
    def has_episodes(self) -> bool:
        """Whether a sample is a conversation of several turns."""
        return self.episode.path is not None

    @property
    def knows_stop_texts(self) -> bool:
        """Whether requests may name texts that end a response, for which an engine has to decode
        what it samples."""
        return bool(self.stop) or self.has_episodes

    def verifies(self, num_syncs: int) -> bool:
        """Whether the weights of a sync are compared, of which there were `num_syncs` before."""
        if isinstance(self.verify_weights, int):
            return num_syncs % self.verify_weights == 0
        return self.verify_weights == "first" and num_syncs == 0
