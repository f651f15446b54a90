"""Actor, critic and reference of a run, from its configuration."""

import gc
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ppo.config import Config, ConfigError, ModelRole
from ppo.errors import InputError
from ppo.models.build import build_causal_lm, build_value_model
from ppo.models.folder import model_folder
from ppo.models.hf_config import load_hf_config
from ppo.models.learner import Learner, Model, WithoutAdapters, make_optimizer
from sharding.fsdp import reshard
from sharding.layout import row_parallel_weight
from sharding.mesh import Mesh

logger = logging.getLogger(__name__)


class Models(NamedTuple):
    """What is trained, and what it is compared with; None where the algorithm has no use for it."""

    actor: Learner
    critic: Learner | None
    ref: Model | None

    def trained(self) -> dict[str, Learner]:
        """The models of a checkpoint."""
        return {m.name: m for m in (self.actor, self.critic) if m is not None}

    def modules(self) -> dict[str, nn.Module]:
        """Modules of a checkpoint, by name."""
        return {name: learner.module for name, learner in self.trained().items()}

    def optimizers(self, names: Sequence[str]) -> dict[str, torch.optim.Optimizer]:
        """Optimizers of a checkpoint, by the names of their models: of those that are asked for."""
        return {name: self.trained()[name].optimizer for name in names}


def build_models(
    config: Config, mesh: Mesh, run_dir: Path, total_steps: int, *, num_ids: int
) -> Models:
    """Actor, critic and reference, each rank loading its own shards. Collective.

    What rests on the host goes there before the next model is built, so that a start needs no more
    device memory than an iteration.

    num_ids: ids that may be sampled, from 0 on; others have no probability.
    """
    roles = config.models
    options = {role.name: build_options(config, role) for role in roles.values()}
    folder = model_folder(roles["actor"].path, mesh, run_dir)
    _check_sequences(config, roles["actor"], folder, num_ids)
    aligned = None
    if config.parallel.align_to_rollout:
        aligned = row_parallel_weight(load_hf_config(folder, config.model).model_type)
    logger.info("actor: loading %s", folder)
    module = build_causal_lm(folder, mesh, shard_dim1=aligned, num_ids=num_ids, **options["actor"])
    actor = _learner("actor", module, config, mesh, total_steps)
    critic = ref = None
    if "critic" in roles:
        critic_folder = model_folder(roles["critic"].path, mesh, run_dir)
        _check_sequences(config, roles["critic"], critic_folder, num_ids)
        logger.info("critic: loading %s", critic_folder)
        module = build_value_model(critic_folder, mesh, **options["critic"])
        critic = _learner("critic", module, config, mesh, total_steps)
    if config.ref_is_actor:
        rests = actor.param_offload
        ref = WithoutAdapters(module=actor.module, device=mesh.device, param_offload=rests)
    if "ref" in roles:
        module = _build_ref(config, mesh, run_dir, num_ids)
        ref = Model(module=module, device=mesh.device, param_offload=True)
        ref.rest()
    return Models(actor, critic, ref)


def reset_critic(config: Config, mesh: Mesh, run_dir: Path, critic: Learner) -> None:
    """The critic as it began: the weights of critic.model.path, new moments. Collective.

    The moments go first, so that no more memory is needed than they take.
    """
    critic.forget()
    role = config.models["critic"]
    folder = model_folder(role.path, mesh, run_dir)
    fresh = build_value_model(folder, mesh, **build_options(config, role))
    with critic.updating() as module, torch.no_grad():
        reshard(module)
        for parameter, new in zip(module.parameters(), fresh.parameters(), strict=True):
            parameter.copy_(new)
    del fresh, parameter, new
    gc.collect()  # a module that is built has references to itself


def _build_ref(config: Config, mesh: Mesh, run_dir: Path, num_ids: int) -> nn.Module:
    """The reference: the actor's model, or another one with the same token ids. Collective."""
    role = config.models["ref"]
    options, folder = build_options(config, role), model_folder(role.path, mesh, run_dir)
    _check_sequences(config, role, folder, num_ids)
    logger.info("ref: loading %s", folder)
    return build_causal_lm(folder, mesh, num_ids=num_ids, **options)


def _check_sequences(config: Config, role: ModelRole, folder: Path, num_ids: int) -> None:
    """Raise InputError when a model cannot take the sequences of a run: they are longer than its
    positions, or may hold ids that it does not have."""
    text = load_hf_config(folder, config.model_of(role)).get_text_config()
    problem = config.position_problem(role, getattr(text, "max_position_embeddings", None))
    if problem is not None:
        raise ConfigError([problem])
    own = getattr(text, "vocab_size", None)
    if own is not None and own < num_ids:
        raise InputError(
            f"{role.path_key} = {role.path}: it has {own} ids, and prompts and "
            f"responses of {config.model.path} hold up to {num_ids}: use a model with the same "
            "tokenizer"
        )


def build_options(config: Config, role: ModelRole) -> dict[str, Any]:
    """How a model is built for its role: what is not trained is stored as it computes."""
    stored = role.fsdp.mixed_precision.param_dtype if role.is_frozen else config.model.dtype
    return {
        "model_config": config.model_of(role),
        "fsdp_config": role.fsdp,
        "checkpointing": role.is_trained and config.model.policy != "none",
        "forward_only": not role.is_trained,
        "dtype": getattr(torch, stored),
        "lora": role.lora,
    }


def _learner(name: str, module: nn.Module, config: Config, mesh: Mesh, total_steps: int) -> Learner:
    """The module with an optimizer, at rest."""
    section = config.actor if name == "actor" else config.critic
    on_host = section.fsdp.steps_on_host
    learner = Learner(
        name=name,
        module=module,
        optimizer=make_optimizer(module, section.optim, mesh.device, on_host=on_host),
        optim=section.optim,
        grad_clip=section.grad_clip,
        total_steps=total_steps,
        device=mesh.device,
        param_offload=section.fsdp.param_offload,
        optimizer_offload=section.fsdp.optimizer_offload and not on_host,
    )
    learner.rest()
    return learner
