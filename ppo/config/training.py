"""The sections that say how a model is trained: optimizer, FSDP, actor, ref, critic.

Owns names, types, defaults, units, and which keys of ref and critic follow the actor's. Must not
know how files are read or checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from ppo.config.fields import (
    Bound,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
    UnitInterval,
    derived,
    inherits,
)
from ppo.config.sections import Dtype

LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
KlLossKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip
Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]
SaveContent = Literal["model", "optimizer", "extra", "hf_model"]
Beta = Annotated[float, Bound(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: NonNegative = 1e-6
    """peak learning rate"""
    lr_warmup_steps: NonNegativeInt = 0
    """iterations of linear warm-up; 0 = lr_warmup_steps_ratio decides"""
    lr_warmup_steps_ratio: UnitInterval = 0.0
    """warm-up as a share of all iterations"""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """course after the warm-up"""
    min_lr_ratio: UnitInterval = 0.0
    """last learning rate of cosine and linear, as a share of lr"""
    weight_decay: NonNegative = 0.01
    """decoupled weight decay"""
    betas: list[Beta] = field(default_factory=lambda: [0.9, 0.999])
    """Adam's two decay rates"""
    eps: Positive = 1e-8
    """Adam's epsilon"""


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionConfig(Section):
    """Dtypes of FSDP's forward and backward."""

    param_dtype: Dtype = "bfloat16"
    """gathered parameters and activations"""
    reduce_dtype: Dtype = "float32"
    """reduction of gradients"""


@dataclass(frozen=True, kw_only=True)
class WrapPolicyConfig(Section):
    """Which modules FSDP shards as units of their own, besides every transformer layer."""

    min_num_params: NonNegativeInt = 0
    """parameters from which another module is wrapped; 0 = none"""


@dataclass(frozen=True, kw_only=True)
class FsdpConfig(Section):
    """Sharding, precision, prefetch and offload of one model."""

    sharding_strategy: Strategy | None = None
    """null = follows from fsdp_size and reshard_after_forward; a contradiction is an error"""
    fsdp_size: Annotated[int, Bound(ge=-1)] = -1
    """ranks of a shard group (dp_shard x sp); -1 = a node's on several nodes, else all"""
    reshard_after_forward: bool = True
    """free gathered parameters between forward and backward; false = SHARD_GRAD_OP"""
    forward_prefetch: bool = True
    """gather the next layer while one computes in the forward pass"""
    backward_prefetch: bool = True
    """gather the next layer while one computes in the backward pass"""
    param_offload: bool = False
    """parameters to host memory while they are not used"""
    optimizer_offload: bool = False
    """optimizer state to host memory while it is not used"""
    offload_policy: bool = False
    """FSDP2's CPUOffloadPolicy: parameters, gradients and optimizer live in host memory"""
    mixed_precision: MixedPrecisionConfig = field(default_factory=MixedPrecisionConfig)
    """dtypes"""
    wrap_policy: WrapPolicyConfig = field(default_factory=WrapPolicyConfig)
    """wrapping"""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """What a checkpoint holds."""

    save_contents: list[SaveContent] = field(
        default_factory=lambda: ["model", "optimizer", "extra"]
    )
    """model and extra are always saved; without optimizer a resumed run starts with new Adam
    moments; hf_model adds a folder for transformers"""


@dataclass(frozen=True, kw_only=True)
class ActorConfig(Section):
    """The policy and its update."""

    ppo_mini_batch_size: PositiveInt = 256
    """prompts of one optimizer step, over all ranks; divides data.train_batch_size"""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """sequences of one forward and backward without use_dynamic_bsz; null = all of a rank's"""
    use_dynamic_bsz: bool = True
    """cut micro-batches by tokens instead of by sequences"""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """tokens of one forward and backward on a rank; the row of an sp group holds sp times these"""
    log_prob_max_token_len_per_gpu: PositiveInt = derived(
        "actor.ppo_max_token_len_per_gpu", times=2
    )
    """tokens of one forward-only pass on a rank; null = 2 x ppo_max_token_len_per_gpu"""
    ppo_epochs: PositiveInt = 1
    """passes over the batch of an iteration"""
    shuffle: bool = False
    """seeded shuffle of the prompts before they are cut into mini-batches"""
    clip_ratio: Annotated[float, Bound(gt=0, lt=1)] = 0.2
    """PPO's epsilon"""
    clip_ratio_low: Annotated[float, Bound(gt=0, lt=1)] = derived("actor.clip_ratio")
    """lower epsilon; null = clip_ratio"""
    clip_ratio_high: Positive = derived("actor.clip_ratio")
    """upper epsilon; null = clip_ratio"""
    clip_ratio_c: Annotated[float, Bound(gt=1)] = 3.0
    """dual clip: bound of the loss for negative advantages"""
    loss_agg_mode: LossAggMode = "token-mean"
    """how token losses become one number"""
    entropy_coeff: float = 0.0
    """weight of the entropy bonus"""
    use_kl_loss: bool = False
    """add kl_loss_coef x KL(actor, ref) to the loss"""
    kl_loss_coef: NonNegative = 0.001
    """weight of that loss"""
    kl_loss_type: KlLossKind = "low_var_kl"
    """its estimator; "+" = that value with the gradient of k2"""
    grad_clip: Positive = 1.0
    """largest gradient norm"""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """optimizer"""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """ranks that share one sequence (sp)"""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """sharding"""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """what a checkpoint holds"""


@dataclass(frozen=True, kw_only=True)
class RefConfig(Section):
    """The frozen reference policy; a key that is null follows the actor's."""

    log_prob_max_token_len_per_gpu: PositiveInt = derived("actor.log_prob_max_token_len_per_gpu")
    """tokens of one forward-only pass on a rank"""
    fsdp: FsdpConfig = inherits(FsdpConfig, "actor.fsdp")
    """sharding; parameters are held in param_dtype and offloaded when idle"""


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig(Section):
    """Where the value model starts from."""

    path: str = derived("model.path")
    """HF folder or hub name; null = model.path"""


@dataclass(frozen=True, kw_only=True)
class CriticConfig(Section):
    """The value model and its update; a key that is null follows the actor's."""

    enable: bool | None = None
    """null = only for adv_estimator gae"""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """where it starts from"""
    optim: OptimConfig = inherits(OptimConfig, "actor.optim", lr=1e-5)
    """optimizer; lr 1e-5, the rest follows the actor's"""
    cliprange_value: Positive = 0.5
    """values may move so far from the old ones before the loss stops them"""
    ppo_mini_batch_size: PositiveInt = derived("actor.ppo_mini_batch_size")
    """prompts of one optimizer step, over all ranks; divides data.train_batch_size"""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = derived("actor.ppo_micro_batch_size_per_gpu")
    """sequences of one forward and backward without use_dynamic_bsz"""
    use_dynamic_bsz: bool = derived("actor.use_dynamic_bsz")
    """cut micro-batches by tokens instead of by sequences"""
    ppo_max_token_len_per_gpu: PositiveInt = derived("actor.ppo_max_token_len_per_gpu", times=2)
    """tokens of one pass on a rank, forward-only ones too; null = 2 x the actor's"""
    ppo_epochs: PositiveInt = derived("actor.ppo_epochs")
    """passes over the batch of an iteration"""
    shuffle: bool = derived("actor.shuffle")
    """seeded shuffle of the prompts before they are cut into mini-batches"""
    loss_agg_mode: LossAggMode = derived("actor.loss_agg_mode")
    """how token losses become one number"""
    grad_clip: Positive = derived("actor.grad_clip")
    """largest gradient norm"""
    ulysses_sequence_parallel_size: PositiveInt = derived("actor.ulysses_sequence_parallel_size")
    """ranks that share one sequence (sp); must be the actor's"""
    fsdp: FsdpConfig = inherits(FsdpConfig, "actor.fsdp")
    """sharding"""
    checkpoint: CheckpointConfig = inherits(CheckpointConfig, "actor.checkpoint")
    """what a checkpoint holds"""
