"""The sections that say how a model is trained: optimizer, FSDP, actor, ref, critic.

Owns names, types, defaults, units, and which keys of ref and critic follow the actor's. Must not
know how files are read or checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from ppo.config.bounds import (
    Bound,
    Coefficient,
    FilePath,
    FollowingBudget,
    ListRule,
    Prompts,
    Ranks,
    TokenBudget,
)
from ppo.config.fields import MayChange, Section, derived, inherits
from ppo.config.sections.algorithm import KlKind
from ppo.config.sections.model import (
    FsdpConfig,
    LoraAlpha,
    LoraDropout,
    LoraRank,
    OptimConfig,
)

LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
FullKl = Literal["full", "full_forward"]
KlLossKind = Literal[KlKind, "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+", FullKl]
LossMode = Literal[
    "vanilla",
    "gspo",
    "cispo",
    "sapo",
    "gpg",
    "geo_mean",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
]
_CLIPPING: tuple[LossMode, ...] = (
    *("vanilla", "gspo", "cispo", "geo_mean", "dppo_tv", "dppo_kl", "clip_cov"),
)
KEYS_OF_LOSS_MODES: dict[str, tuple[LossMode, ...]] = {
    **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"), _CLIPPING),
    "clip_ratio_c": ("vanilla", "dppo_tv", "dppo_kl"),
    **dict.fromkeys(("tau_pos", "tau_neg"), ("sapo",)),
    **dict.fromkeys(("policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb"), ("clip_cov",)),
    "policy_loss.clip_cov_ub": ("clip_cov",),
    **dict.fromkeys(("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"), ("kl_cov",)),
}
"""keys of this section that only some losses read, and which do"""
TokenShare = Annotated[float, Bound(gt=0, le=1, usual=(1e-5, 0.1))]
CovarianceBound = Annotated[float, Bound(ge=-1e9, le=1e9, usual=(-100, 100))]
ClipRatio = Annotated[float, Bound(gt=0, lt=1, usual=(1e-4, 0.5))]
Threshold = Annotated[float, Bound(ge=1e-6, le=1e9, usual=(0.01, 1e9))]
Epochs = Annotated[int, Bound(ge=1, le=1000, usual=(1, 20))]
SaveContent = Literal["model", "optimizer", "extra", "hf_model"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """What a checkpoint holds."""

    save_contents: Annotated[list[SaveContent], ListRule()] = field(
        default_factory=lambda: ["model", "optimizer", "extra"]
    )
    """model and extra are always saved; without optimizer a resumed run starts with new Adam
    moments; hf_model adds a folder for transformers (of a critic: a classifier with one label)"""


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(Section):
    """Which formula the policy loss is."""

    loss_mode: LossMode = "vanilla"
    """vanilla: PPO's clipped surrogate with the dual clip. gspo: clipped ratios of whole sequences.
    cispo: clipped importance weights. sapo: a smooth gate. gpg: the plain policy gradient. geo_mean
    (GMPO): the geometric mean of clipped ratios. dppo_tv, dppo_kl: without tokens whose probability
    has moved too far. clip_cov: some tokens whose log-prob and advantage vary together have no
    gradient. kl_cov: those that do most have a KL penalty. clip_ratio_low and clip_ratio_high are
    the bounds of each one's own clip"""
    clip_cov_ratio: TokenShare = 2e-4
    """clip_cov: share of a mini-batch's tokens without gradient, drawn from those between"""
    clip_cov_lb: CovarianceBound = 1.0
    """this covariance"""
    clip_cov_ub: CovarianceBound = 5.0
    """and this one; of the old log-probs, so that choosing needs no forward pass"""
    kl_cov_ratio: TokenShare = 2e-4
    """kl_cov: share of a mini-batch's tokens with the penalty, those with the largest covariance"""
    ppo_kl_coef: Coefficient = 0.1
    """kl_cov: weight of the penalty, |log pi - log pi_old|"""


@dataclass(frozen=True, kw_only=True)
class ActorConfig(Section):
    """The policy and its update."""

    ppo_mini_batch_size: Prompts = 256
    """prompts of one optimizer step, over all ranks; divides data.train_batch_size"""
    ppo_micro_batch_size_per_gpu: MayChange[Prompts | None] = None
    """sequences of one forward and backward without use_dynamic_bsz; null = all of a rank's"""
    use_dynamic_bsz: MayChange[bool] = True
    """cut micro-batches by tokens instead of by sequences"""
    ppo_max_token_len_per_gpu: MayChange[TokenBudget] = 16384
    """tokens of one forward and backward on a rank; the row of an sp group holds sp times these"""
    log_prob_max_token_len_per_gpu: MayChange[FollowingBudget] = derived(
        "actor.ppo_max_token_len_per_gpu", times=2
    )
    """tokens of one forward-only pass of ref or reward model on a rank (old log-probs are computed
    in the update's micro-batches); null = 2 x ppo_max_token_len_per_gpu"""
    ppo_epochs: Epochs = 1
    """passes over the batch of an iteration"""
    shuffle: bool = False
    """seeded shuffle of the prompts before they are cut into mini-batches"""
    clip_ratio: ClipRatio = 0.2
    """PPO's epsilon"""
    clip_ratio_low: ClipRatio = derived("actor.clip_ratio")
    """lower epsilon; null = clip_ratio"""
    clip_ratio_high: Annotated[float, Bound(gt=0, le=1e9, usual=(1e-4, 10))] = derived(
        "actor.clip_ratio"
    )
    """upper epsilon; null = clip_ratio"""
    clip_ratio_c: Annotated[float, Bound(gt=1, le=1e9)] = 3.0
    """dual clip: bound of the loss for negative advantages"""
    tau_pos: Threshold = 1.0
    """steepness of sapo's gate where the advantage is positive"""
    tau_neg: Threshold = 1.05
    """and where it is not"""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """the policy loss"""
    loss_agg_mode: LossAggMode = "token-mean"
    """how token losses become one number"""
    entropy_coeff: Annotated[float, Bound(ge=-10, le=10, usual=(-0.1, 0.1))] = 0.0
    """weight of the entropy bonus"""
    use_kl_loss: bool = False
    """add kl_loss_coef x KL(actor, ref) to the loss"""
    kl_loss_coef: Coefficient = 0.001
    """weight of that loss"""
    kl_loss_type: KlLossKind = "low_var_kl"
    """its estimator; "+" = that value with the gradient of k2. full = the exact KL(actor, ref) of
    each token's whole distribution, full_forward = KL(ref, actor): the reference's last hidden
    states are kept on the host until the update"""
    grad_clip: Threshold = 1.0
    """largest gradient norm"""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """optimizer"""
    ulysses_sequence_parallel_size: MayChange[Ranks] = 1
    """sp: ranks that share one sequence"""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """sharding"""
    checkpoint: MayChange[CheckpointConfig] = field(default_factory=CheckpointConfig)
    """what a checkpoint holds"""

    @property
    def full_kl(self) -> bool:
        """Whether the loss has the exact KL with the reference over the whole vocabulary."""
        return self.use_kl_loss and self.kl_loss_type in get_args(FullKl)


@dataclass(frozen=True, kw_only=True)
class RefModelConfig(Section):
    """What the reference is."""

    path: FilePath = derived("model.path")
    """HF folder or hub name of another model with the same tokenizer, of any architecture and size:
    opd's teacher; null = model.path, the model that training begins with"""


@dataclass(frozen=True, kw_only=True)
class RefConfig(Section):
    """The frozen reference policy; a key that is null follows the actor's."""

    model: RefModelConfig = field(default_factory=RefModelConfig)
    """what it is"""
    log_prob_max_token_len_per_gpu: MayChange[FollowingBudget] = derived(
        "actor.log_prob_max_token_len_per_gpu"
    )
    """tokens of one forward-only pass on a rank"""
    fsdp: FsdpConfig = inherits(FsdpConfig, "actor.fsdp")
    """sharding; parameters are held in param_dtype and offloaded when idle"""


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig(Section):
    """Where the value model starts from."""

    path: FilePath = derived("model.path")
    """HF folder or hub name; null = model.path"""
    lora_rank: LoraRank = derived("model.lora_rank")
    """as model.lora_rank, for the critic, whose value head is trained beside its adapters"""
    lora_alpha: LoraAlpha = derived("model.lora_alpha")
    """as model.lora_alpha"""
    lora_target_modules: list[str] = derived("model.lora_target_modules")
    """as model.lora_target_modules"""
    lora_exclude_modules: list[str] = derived("model.lora_exclude_modules")
    """as model.lora_exclude_modules"""
    lora_dropout: LoraDropout = derived("model.lora_dropout")
    """as model.lora_dropout"""


@dataclass(frozen=True, kw_only=True)
class CriticConfig(Section):
    """The value model and its update; a key that is null follows the actor's."""

    enable: bool | None = None
    """null = where algorithm.adv_estimator has one (gae)"""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """where it starts from"""
    optim: OptimConfig = inherits(OptimConfig, "actor.optim", lr=1e-5)
    """optimizer; lr 1e-5, the rest follows the actor's"""
    cliprange_value: Threshold = 0.5
    """values may move so far from the old ones before the loss stops them; with normalize_returns
    in standard deviations of the returns"""
    normalize_returns: bool = False
    """the value model learns returns minus their mean over the run so far, divided by their
    standard deviation; advantages are of values in the units of rewards"""
    ppo_mini_batch_size: Prompts = derived("actor.ppo_mini_batch_size")
    """prompts of one optimizer step, over all ranks; divides data.train_batch_size"""
    ppo_micro_batch_size_per_gpu: MayChange[Prompts | None] = derived(
        "actor.ppo_micro_batch_size_per_gpu"
    )
    """sequences of one forward and backward without use_dynamic_bsz"""
    use_dynamic_bsz: MayChange[bool] = derived("actor.use_dynamic_bsz")
    """cut micro-batches by tokens instead of by sequences"""
    ppo_max_token_len_per_gpu: MayChange[FollowingBudget] = derived(
        "actor.ppo_max_token_len_per_gpu", times=2
    )
    """tokens of one pass on a rank, forward-only ones too; null = 2 x the actor's"""
    ppo_epochs: Epochs = derived("actor.ppo_epochs")
    """passes over the batch of an iteration"""
    shuffle: bool = derived("actor.shuffle")
    """seeded shuffle of the prompts before they are cut into mini-batches"""
    loss_agg_mode: LossAggMode = derived("actor.loss_agg_mode")
    """how token losses become one number"""
    grad_clip: Threshold = derived("actor.grad_clip")
    """largest gradient norm"""
    ulysses_sequence_parallel_size: MayChange[Ranks] = derived(
        "actor.ulysses_sequence_parallel_size"
    )
    """sp: ranks that share one sequence; must be the actor's"""
    fsdp: FsdpConfig = inherits(FsdpConfig, "actor.fsdp")
    """sharding"""
    checkpoint: MayChange[CheckpointConfig] = inherits(CheckpointConfig, "actor.checkpoint")
    """what a checkpoint holds"""
