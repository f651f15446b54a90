"""The sections of the YAML file but for the models' training: data, model, rollout, trainer, ...

Owns names, types, defaults and units of these keys. Must not know how files are read or checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ppo.config.fields import (
    IntOrOff,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
    Seed,
    Share,
    UnitInterval,
    derived,
    seconds,
)

Dtype = Literal["float32", "bfloat16", "float16"]
AdvEstimator = Literal[
    "gae",
    "grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
]
KlKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
LoggerName = Literal["console", "jsonl", "tensorboard"]


@dataclass(frozen=True, kw_only=True)
class CheckConfig(Section):
    """The machine that `--check` plans for; a training run does not read it."""

    nnodes: PositiveInt = 1
    """number of nodes"""
    nproc_per_node: PositiveInt = 8
    """ranks (devices) of a node"""
    device_memory_gib: Positive = 80.0
    """memory of one device, GiB"""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """What concerns training and generation meshes together."""

    align_to_rollout: bool = False
    """shard o_proj and down_proj on dim 1, so that FSDP shards nest fully in rollout slices"""


@dataclass(frozen=True, kw_only=True)
class CustomClassConfig(Section):
    """A class of the user, loaded from a file."""

    path: str | None = None
    """Python file; null = the built-in class"""
    name: str | None = None
    """name of the class in that file"""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Prompts: where they are, how they are cut, how many make a step."""

    train_files: list[str]
    """parquet or JSONL files: one, many, globs; `tiny` = a seeded copy task"""
    val_files: list[str] = field(default_factory=list)
    """as train_files; empty = no validation"""
    prompt_key: str = "prompt"
    """column with the prompt: text, or a list of {role, content}"""
    reward_fn_key: str = "data_source"
    """column that picks the scorer"""
    max_prompt_length: PositiveInt = 512
    """longest prompt, tokens"""
    max_response_length: PositiveInt = 512
    """longest response, tokens"""
    train_batch_size: PositiveInt = 1024
    """prompts of one iteration, over all ranks"""
    val_batch_size: PositiveInt | None = None
    """prompts generated at once in validation; null = all"""
    shuffle: bool = True
    """shuffle the prompts anew in each epoch, seeded"""
    seed: Seed = derived("trainer.seed")
    """seed of that shuffle; null = trainer.seed"""
    drop_last: bool = True
    """drop the short last batch of an epoch (one warning) instead of using it"""
    filter_overlong_prompts: bool = True
    """drop prompts longer than max_prompt_length at load"""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """what happens to a prompt that is too long and not filtered; `left` cuts its start"""
    train_max_samples: IntOrOff = -1
    """use only the first so many training rows; -1 = all"""
    val_max_samples: IntOrOff = -1
    """use only the first so many validation rows; -1 = all"""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """passed on to tokenizer.apply_chat_template"""
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
    """dataset class of your own"""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The language model that actor and ref (and by default the critic) start from."""

    path: str
    """HF folder or hub name; `tiny` = seeded random Qwen2, built into the run folder"""
    tokenizer_path: str = derived("model.path")
    """HF folder or hub name of the tokenizer; null = model.path"""
    trust_remote_code: bool = False
    """run Python code that comes with the model"""
    override_config: dict[str, Any] = field(default_factory=dict)
    """keys of the model's config.json to replace"""
    dtype: Dtype = "float32"
    """master weights; gradients and Adam moments follow"""
    attn_implementation: str = "auto"
    """HF attention function; auto = packed varlen attention where it exists"""
    enable_gradient_checkpointing: bool = True
    """recompute each layer in the backward pass: less memory, about a third more time"""
    enable_activation_offload: bool = False
    """keep the checkpointed activations in host memory"""
    use_remove_padding: bool = True
    """pack sequences into one row instead of padding them"""
    custom_chat_template: str | None = None
    """Jinja text that replaces the tokenizer's chat template; null = the tokenizer's"""


@dataclass(frozen=True, kw_only=True)
class ValKwargsConfig(Section):
    """Sampling in validation."""

    temperature: NonNegative = 0.0
    """0 = greedy"""
    top_p: Share = 1.0
    """nucleus; 1 = off"""
    n: PositiveInt = 1
    """responses per prompt"""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section):
    """Generation: engine, sampling, memory."""

    engine: Literal["auto", "sglang", "torch"] = "auto"
    """auto = SGLang where CUDA and sglang are present, else the embedded torch engine"""
    n: PositiveInt = 1
    """responses per prompt"""
    temperature: NonNegative = 1.0
    """of sampling and of every log-prob; 0 = greedy (not for training)"""
    top_p: Share = 1.0
    """nucleus; 1 = off"""
    top_k: IntOrOff = -1
    """-1 = off"""
    stop: list[str] = field(default_factory=list)
    """texts that end a response, besides the end-of-sequence tokens"""
    ignore_eos: bool = False
    """generate up to max_response_length always"""
    tensor_model_parallel_size: PositiveInt = 1
    """ranks that share one engine; divides the ranks of a node"""
    gpu_memory_utilization: Share = 0.6
    """share of the whole device that weights and KV cache of the engine may take"""
    max_model_len: PositiveInt = derived("data.max_prompt_length", "data.max_response_length")
    """longest sequence of the engine, tokens; null = max_prompt_length + max_response_length"""
    max_num_seqs: PositiveInt = 256
    """sequences that one engine decodes at once"""
    max_num_batched_tokens: PositiveInt = 8192
    """prompt tokens that one engine prefills at once"""
    dtype: Dtype = "bfloat16"
    """weights and KV cache of the engine"""
    free_cache_engine: bool = True
    """give the engine's memory back while training"""
    reshard_bucket_mib: PositiveInt = 512
    """send and receive buffer of one exchange together, MiB"""
    verify_weights: Literal["first", "never"] | PositiveInt = "first"
    """compare weights of engine and trainer after the first sync, never, or after every N-th"""
    enforce_eager: bool = False
    """no CUDA graphs in the engine"""
    timeout_s: Positive = 3600.0
    """an engine without progress for so long is dead, seconds"""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """passed on to sglang.Engine"""
    val_kwargs: ValKwargsConfig = field(default_factory=ValKwargsConfig)
    """sampling in validation"""


@dataclass(frozen=True, kw_only=True)
class KlControlConfig(Section):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive", "step"] = "fixed"
    """adaptive: proportional to the error; step: times or divided by 1.5 outside a band"""
    kl_coef: NonNegative = 0.001
    """the coefficient, at the start if it is not fixed"""
    target_kl: Positive = 0.1
    """KL per token that adaptive and step aim at"""
    horizon: PositiveInt = 10000
    """sequences over which adaptive makes up its error"""
    min: NonNegative = 1e-4
    """smallest coefficient of adaptive and step"""
    max: NonNegative = 10.0
    """largest coefficient of adaptive and step"""


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig(Section):
    """Importance weights against the mismatch of engine and trainer."""

    rollout_is: Literal["token", "sequence"] | None = None
    """level of the weights; null = none"""
    rollout_is_threshold: Positive = 2.0
    """weights are cut here"""
    icepop: list[Positive] | None = None
    """[lo, hi]: tokens with a weight outside are dropped; null = none"""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Section):
    """Advantages and the KL penalty in the reward."""

    adv_estimator: AdvEstimator = "gae"
    """gae has a critic; remax samples one greedy response more per prompt; grpo, rloo, opo and
    reinforce_plus_plus_baseline compare responses and need rollout.n > 1"""
    gamma: UnitInterval = 1.0
    """discount of gae and reinforce_plus_plus"""
    lam: UnitInterval = 1.0
    """GAE's lambda"""
    norm_adv_by_std_in_grpo: bool = True
    """divide a group's advantages by its standard deviation"""
    use_kl_in_reward: bool = True
    """subtract kl_coef x KL(actor, ref) from the reward of each token"""
    kl_penalty: KlKind = "kl"
    """estimator of that KL"""
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    """its coefficient"""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """importance weights against the mismatch of engine and trainer"""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Section):
    """The run: length, saving, logging, stopping."""

    seed: Seed = 42
    """of everything random"""
    total_epochs: PositiveInt = 1
    """passes over the prompts"""
    total_training_steps: PositiveInt | None = None
    """iterations; null = all of total_epochs"""
    critic_warmup: NonNegativeInt = 0
    """iterations in which only the critic is trained"""
    save_freq: IntOrOff = 50
    """iterations between checkpoints; 0 or -1 = only at the end"""
    test_freq: IntOrOff = 10
    """iterations between validations; 0 or -1 = only at the end"""
    val_before_train: bool = True
    """validate before the first iteration"""
    val_only: bool = False
    """validate and end"""
    resume_mode: str = "auto"
    """auto = newest complete checkpoint of the run folder; disable; or a checkpoint's path"""
    allow_changed_config: bool = False
    """resume although keys have changed that a resumed run should keep"""
    async_save: bool = True
    """write checkpoints while training goes on"""
    max_ckpt_to_keep: PositiveInt | None = 2
    """older checkpoints are deleted; null = keep all"""
    keep_best: str | None = None
    """metric whose highest value keeps its checkpoint besides; null = none"""
    max_wall_time: Positive | None = field(default=None, metadata=seconds())
    """stop, save and end after so long: seconds, or [D-]HH:MM:SS; null = never"""
    comm_timeout_s: Positive = 600.0
    """time limit of a collective, seconds"""
    logger: list[LoggerName] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    """where metrics go"""
    project_name: str = "ppo"
    """folder of related runs"""
    experiment_name: str | None = None
    """folder of this run in it; null = name of the config file"""
    default_local_dir: str | None = None
    """run folder; null = runs/PROJECT/EXPERIMENT"""
    log_val_generations: NonNegativeInt = 8
    """validation samples that are logged as text"""
    balance_batch: bool = True
    """spread sequences over ranks by cost instead of in order"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = CUDA where there is one"""
    deterministic: bool = False
    """deterministic kernels, and per-sample seeds in SGLang on CUDA: slower"""
