"""Section model, and what is said of any model: optimizer, FSDP, dtypes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from ppo.config.bounds import Bound, FilePath, JinjaText, NonNegativeInt, TextRule, UnitInterval
from ppo.config.fields import MayChange, Section, derived

Dtype = Literal["float32", "bfloat16", "float16"]
CheckpointPolicy = Literal["full", "selective", "none"]
LoraRank = Annotated[int, Bound(ge=0, le=16384, usual=(0, 512))]
LoraAlpha = Annotated[float, Bound(gt=0, le=1e6, usual=(1, 1024))]
LoraDropout = Annotated[float, Bound(ge=0, lt=1)]
ALL_LINEAR = "all-linear"
"""in the place of names of layers"""


class Lora(NamedTuple):
    """The adapters of one model of a run."""

    section: str
    """dotted path of the section that describes them"""
    rank: int
    alpha: float
    target_modules: list[str]
    exclude_modules: list[str]
    dropout: float
    seed: int
    """of A; B begins with zeros"""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """What concerns training and generation meshes together."""

    align_to_rollout: bool = False
    """shard o_proj and down_proj on dim 1, so that FSDP shards nest fully in rollout slices"""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The language model that actor and ref (and by default the critic) start from."""

    path: FilePath
    """HF folder or hub name, of a multimodal one its language model; `tiny` = seeded random Qwen2,
    built into the run folder"""
    tokenizer_path: FilePath = derived("model.path")
    """HF folder or hub name of the tokenizer; null = model.path"""
    trust_remote_code: bool = False
    """run Python code that comes with the model"""
    override_config: dict[str, Any] = field(default_factory=dict)
    """keys to replace in the config.json of model.path; a model of another path keeps its own"""
    dtype: Dtype = "float32"
    """master weights; gradients follow, and Adam's moments unless optim.state_dtype says more"""
    attn_implementation: Annotated[str, TextRule("the name of a function", r"[A-Za-z].*")] = "auto"
    """HF attention function; auto = packed varlen attention where it exists, by FA3 or FA4 where
    one is installed and a trial at the start finds it as exact as flash attention 2"""
    enable_gradient_checkpointing: MayChange[bool] = True
    """recompute layers in the backward pass as checkpoint_policy says; false = none"""
    checkpoint_policy: MayChange[CheckpointPolicy] = "full"
    """full = a layer keeps its inputs alone, for about a third more time; selective = also what
    matrix products and attention give, for little more time, about half the memory of none"""
    mlp_block_rows: MayChange[NonNegativeInt] = 0
    """tokens that an MLP sees at once, for long sequences: what is as wide as it exists for no more
    of them, and its forward runs once more; 0 = all"""
    enable_activation_offload: MayChange[bool] = False
    """keep the checkpointed activations in host memory"""
    compile: Literal["false", "layers"] = "false"
    """layers = torch compiles the layers of each model when they first run, in a minute or two, and
    their small operations become few kernels; log-probs with and without gradients are then equal
    up to rounding, and so is the first ratio 1. Where that fails they run as they are"""
    use_liger: bool = False
    """on CUDA, RMSNorm, SwiGLU and rotary positions by the package liger-kernel, which has to be
    installed, in the families that it knows"""
    use_remove_padding: bool = True
    """pack sequences into one row instead of padding them"""
    verify_forward: MayChange[bool] = True
    """compare a small copy of the model with transformers' own forward before it is loaded, and a
    prompt's log-probs with those of an engine of other code when it is first awake"""
    custom_chat_template: JinjaText | None = None
    """Jinja text that replaces the tokenizer's chat template; null = the tokenizer's"""
    lora_rank: LoraRank = 0
    """rank of the adapters that are trained in the place of the model (LoRA), which stays as it is,
    in actor.fsdp.mixed_precision.param_dtype; 0 = the whole model is trained. Their learning rate
    is about ten times that of the whole model"""
    lora_alpha: LoraAlpha = 16.0
    """scale of the adapters: a layer's weight is W + lora_alpha / lora_rank x B A"""
    lora_target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """linear layers that have one, by the end of their names (q_proj, mlp.up_proj); all-linear =
    all but the output head and the experts of a mixture"""
    lora_exclude_modules: list[str] = field(default_factory=list)
    """linear layers that have none, named likewise"""
    lora_dropout: LoraDropout = 0.0
    """share of an adapter's inputs that an update leaves out; above 0 the first ratio is not 1"""

    @property
    def policy(self) -> CheckpointPolicy:
        """What layers keep for the backward pass."""
        return self.checkpoint_policy if self.enable_gradient_checkpointing else "none"


Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]
Beta = Annotated[float, Bound(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: Annotated[float, Bound(ge=0, le=1, usual=(1e-8, 1e-3))] = 1e-6
    """peak learning rate"""
    lr_warmup_steps: NonNegativeInt = 0
    """iterations of linear warm-up; 0 = lr_warmup_steps_ratio decides"""
    lr_warmup_steps_ratio: UnitInterval = 0.0
    """warm-up as a share of all iterations"""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """course after the warm-up"""
    min_lr_ratio: UnitInterval = 0.0
    """last learning rate of cosine and linear, as a share of lr"""
    weight_decay: Annotated[float, Bound(ge=0, le=10, usual=(0, 0.5))] = 0.01
    """decoupled weight decay"""
    betas: list[Beta] = field(default_factory=lambda: [0.9, 0.999])
    """Adam's two decay rates"""
    eps: Annotated[float, Bound(ge=1e-20, le=1, usual=(1e-12, 1e-4))] = 1e-8
    """Adam's epsilon"""
    state_dtype: Literal["float32", "bfloat16", "8bit"] | None = None
    """Adam's moments; they are averaged in float32 and rounded such that nothing is lost for good;
    8bit = logarithms, in units of the largest of 256 numbers; null = model.dtype"""


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

    min_num_params: Annotated[int, Bound(ge=0, le=10**13)] = 0
    """parameters from which another module is wrapped; 0 = none"""


@dataclass(frozen=True, kw_only=True)
class FsdpConfig(Section):
    """Sharding, precision, prefetch and offload of one model."""

    sharding_strategy: MayChange[Strategy | None] = None
    """null = follows from fsdp_size and reshard_after_forward; the defaults of both give way to it,
    another value that contradicts it is an error"""
    fsdp_size: MayChange[Annotated[int, Bound(ge=1, le=10**6, also=(-1,))]] = -1
    """ranks of a shard group (dp_shard x sp); -1 = all; on several nodes a node's where that fits
    by the memory plan, else the smallest larger group that does"""
    reshard_after_forward: MayChange[bool] = True
    """free gathered parameters between forward and backward; false = SHARD_GRAD_OP"""
    forward_prefetch: MayChange[bool] = True
    """gather the next layer while one computes in the forward pass"""
    backward_prefetch: MayChange[bool] = True
    """gather the next layer while one computes in the backward pass"""
    param_offload: MayChange[bool] = False
    """parameters to host memory while they are not used"""
    optimizer_offload: MayChange[bool] = False
    """optimizer state to host memory while it is not used"""
    optimizer_on_host: MayChange[bool] = False
    """gradients and moments live in host memory, where the optimizer steps: gradients go there
    while the backward pass computes; the device keeps the parameters"""
    offload_policy: MayChange[bool] = False
    """FSDP2's CPUOffloadPolicy: parameters, gradients and optimizer live in host memory"""
    mixed_precision: MixedPrecisionConfig = field(default_factory=MixedPrecisionConfig)
    """dtypes"""
    wrap_policy: MayChange[WrapPolicyConfig] = field(default_factory=WrapPolicyConfig)
    """wrapping"""

    @property
    def steps_on_host(self) -> bool:
        """Whether gradients go to the host by themselves; with offload_policy FSDP2 brings them."""
        return self.optimizer_on_host and not self.offload_policy

    @property
    def reshards(self) -> bool:
        """Whether gathered layers are freed between forward and backward."""
        return self.reshard_after_forward and self.sharding_strategy != "SHARD_GRAD_OP"

    def shard_size(self, world_size: int) -> int:
        """fsdp_size, or what an explicit strategy makes of -1; -1 where neither says anything."""
        whole = {"NO_SHARD": 1, "FULL_SHARD": world_size, "SHARD_GRAD_OP": world_size}
        if self.fsdp_size != -1 or self.sharding_strategy is None:
            return self.fsdp_size
        return whole.get(self.sharding_strategy, -1)
