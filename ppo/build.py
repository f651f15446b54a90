"""Models of a run and how their micro-batches are laid out, built from its configuration.

Owns construction only. Every rank calls everything here.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ppo.batch import Budget
from ppo.config import ActorConfig, Config, CriticConfig, FsdpConfig
from ppo.data.tokenizer import load_tokenizer
from ppo.errors import InputError
from ppo.learner import Frozen, Learner, make_optimizer
from ppo.models import build_causal_lm, build_value_model, is_packable, load_hf_config
from ppo.reward_model import RewardModel
from ppo.run import Run
from ppo.scoring import Batcher
from ppo.tiny import build_tiny_model
from sharding.layout import row_parallel_weight

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def model_folder(path: str, run: Run, *, classifier: bool = False) -> Path:
    """The folder of a model: as given, from the hub, or `tiny` built into the run folder."""
    if path == "tiny" and classifier:
        return build_tiny_model(run.dir / "tiny_reward_model", classifier=True)
    if path == "tiny":
        return build_tiny_model(run.dir / "tiny_model")
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    files, error = ["*.json", "*.safetensors", "*.jinja", "*.model"], None
    if run.mesh.local_rank == 0:  # one download per node, then the others find it
        try:
            snapshot_download(path, allow_patterns=files)
        except (OSError, ValueError) as problem:
            error = ValueError(f"model {path}: no such folder here, and the hub says: {problem}")
    run.agree(error)
    return Path(snapshot_download(path, allow_patterns=files, local_files_only=True))


class Models(NamedTuple):
    """What is trained, and what it is compared with; None where the algorithm has no use for it."""

    actor: Learner
    critic: Learner | None
    ref: Frozen | None

    def trained(self) -> dict[str, Learner]:
        """The models of a checkpoint."""
        return {m.name: m for m in (self.actor, self.critic) if m is not None}

    def rest(self) -> None:
        """Send to the host what rests there until it is used."""
        for model in self:
            if model is not None:
                model.rest()

    def modules(self) -> dict[str, nn.Module]:
        """Modules of a checkpoint, by name."""
        return {name: learner.module for name, learner in self.trained().items()}

    def optimizers(self, save_contents: Sequence[str]) -> dict[str, torch.optim.Optimizer]:
        """Optimizers of a checkpoint, by the name of their model; none where not asked for."""
        learners = self.trained() if "optimizer" in save_contents else {}
        return {name: learner.optimizer for name, learner in learners.items()}


def build_models(config: Config, run: Run, total_steps: int) -> Models:
    """Actor, critic and reference, each rank loading its own shards."""
    folder = model_folder(config.model.path, run)
    master = getattr(torch, config.model.dtype)
    trained = {
        "model_config": config.model,
        "checkpointing": config.model.enable_gradient_checkpointing,
        "forward_only": False,
        "dtype": master,
    }
    hf_config = load_hf_config(folder, config.model)
    _check_positions(config, hf_config)
    aligned = None
    if config.parallel.align_to_rollout:
        aligned = row_parallel_weight(hf_config.model_type)
    actor = build_causal_lm(
        folder, run.mesh, fsdp_config=config.actor.fsdp, shard_dim1=aligned, **trained
    )
    critic = ref = None
    if config.critic_enabled:
        critic_folder = model_folder(config.critic.model.path, run)
        module = build_value_model(
            critic_folder, run.mesh, fsdp_config=config.critic.fsdp, **trained
        )
        critic = _learner("critic", module, config, run, total_steps)
    if config.ref_enabled:
        module = build_causal_lm(
            folder, run.mesh, model_config=config.model, **_frozen_options(config.ref.fsdp)
        )
        ref = Frozen(module=module, device=run.mesh.device, param_offload=True)
    return Models(_learner("actor", actor, config, run, total_steps), critic, ref)


def _check_positions(config: Config, hf_config: Any) -> None:
    """Raise InputError when the longest sequence has more tokens than the policy has positions."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise InputError(
            f"data.max_prompt_length + data.max_response_length = {longest} tokens: "
            f"{config.model.path} has max_position_embeddings = {limit}; lower them, or set "
            "model.override_config.max_position_embeddings"
        )


def build_reward_model(config: Config, run: Run) -> RewardModel | None:
    """The reward model, resting on the host; None where functions score alone."""
    section = config.reward.model
    if not section.enable:
        return None
    assert section.path is not None  # check_config has seen to it
    folder = model_folder(section.path, run, classifier=True)
    tokenizer = load_tokenizer(
        folder,
        trust_remote_code=config.model.trust_remote_code,
        custom_chat_template=section.chat_template,
        template_key="reward.model.chat_template",
    )
    module = build_value_model(
        folder,
        run.mesh,
        model_config=replace(config.model, path=section.path, override_config={}),
        needs_head=True,
        **_frozen_options(section.fsdp),
    )
    model = Frozen(module=module, device=run.mesh.device, param_offload=True)
    model.rest()
    batcher = make_batcher(
        config, run, model, _pad_id(tokenizer), tokens=section.max_token_len_per_gpu
    )
    return RewardModel(model=model, tokenizer=tokenizer, batcher=batcher)


def _frozen_options(fsdp: FsdpConfig) -> dict[str, Any]:
    """How a model is built that only runs forward."""
    return {
        "fsdp_config": fsdp,
        "checkpointing": False,
        "forward_only": True,
        "dtype": getattr(torch, fsdp.mixed_precision.param_dtype),
    }


def _learner(name: str, module: nn.Module, config: Config, run: Run, total_steps: int) -> Learner:
    section = config.actor if name == "actor" else config.critic
    return Learner(
        name=name,
        module=module,
        optimizer=make_optimizer(module, section.optim, run.mesh.device),
        optim=section.optim,
        grad_clip=section.grad_clip,
        total_steps=total_steps,
        device=run.mesh.device,
        param_offload=section.fsdp.param_offload,
        optimizer_offload=section.fsdp.optimizer_offload,
    )


class Batchers(NamedTuple):
    """How sequences are laid out for each pass."""

    actor: Batcher
    critic: Batcher
    ref: Batcher


def make_batchers(
    config: Config, run: Run, tokenizer: "PreTrainedTokenizerBase", actor: Learner
) -> Batchers:
    """Budgets of the updates and of the forward-only pass of the reference."""
    batcher = partial(make_batcher, config, run, actor, _pad_id(tokenizer))
    return Batchers(
        actor=batcher(tokens=config.actor.ppo_max_token_len_per_gpu),
        critic=batcher(tokens=config.critic.ppo_max_token_len_per_gpu, section=config.critic),
        ref=batcher(tokens=config.ref.log_prob_max_token_len_per_gpu),
    )


def make_batcher(
    config: Config,
    run: Run,
    model: Frozen,
    pad_id: int,
    *,
    tokens: int,
    section: ActorConfig | CriticConfig | None = None,
) -> Batcher:
    """The layout of one model's passes: `tokens` per rank, or the sequences that `section` says.

    section: whose keys say how micro-batches are cut; None = the actor's.
    """
    section = section or config.actor
    dynamic, dims = section.use_dynamic_bsz, run.mesh.dims
    packed = config.model.use_remove_padding and is_packable(model.module)
    budget = Budget(
        dp=dims.dp,
        tokens=tokens * dims.sp if dynamic else None,
        count=None if dynamic else section.ppo_micro_batch_size_per_gpu,
        padded=not packed,
        balance=config.trainer.balance_batch,
        hidden_size=model.hf_config.hidden_size,
    )
    return Batcher(mesh=run.mesh, budget=budget, packed=packed, pad_id=pad_id)


def _pad_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    pad_id = tokenizer.pad_token_id
    assert isinstance(pad_id, int), pad_id  # load_tokenizer has seen to it
    return pad_id
