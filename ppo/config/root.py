"""The whole configuration as one frozen object, with what follows from it.

Owns the accessors that need more than one section. Must not know how files are read or checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from ppo.config.fields import MayChange, Problem, Section, hints
from ppo.config.sections.actor import ActorConfig, CriticConfig, RefConfig
from ppo.config.sections.algorithm import AlgorithmConfig
from ppo.config.sections.data import DataConfig, ValSetConfig
from ppo.config.sections.guards import GuardsConfig, Rule, parse_rule
from ppo.config.sections.model import FsdpConfig, Lora, ModelConfig, ParallelConfig
from ppo.config.sections.reward import RewardConfig
from ppo.config.sections.rollout import EngineKind, RolloutConfig
from ppo.config.sections.trainer import CheckConfig, TrainerConfig
from sharding.dims import ParallelDims


class ModelRole(NamedTuple):
    """One model of a run: what it is called, how it is used, where it comes from."""

    name: str
    section: str
    """dotted path of its section"""
    path_key: str
    """dotted path of the key that names it"""
    is_trained: bool
    """has an optimizer and is saved; else it only runs forward, and rests on the host"""
    has_logits: bool
    """a causal LM; else it gives one number per token"""
    path: str
    """folder, name of the Hub, or tiny"""
    fsdp: FsdpConfig
    lora: Lora | None = None
    """the adapters that are trained in its place"""

    @property
    def is_frozen(self) -> bool:
        """Whether its weights stay as they are, in fsdp.mixed_precision.param_dtype."""
        return not self.is_trained or self.lora is not None


# name, section, path_key, is_trained, has_logits: every model that a run may have
MODEL_ROLES = (
    ("actor", "actor", "model.path", True, True),
    ("critic", "critic", "critic.model.path", True, False),
    ("ref", "ref", "ref.model.path", False, True),
    ("reward model", "reward.model", "reward.model.path", False, False),
)


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """One section for each part of the program. Build it with `ppo.config.load_config`."""

    check: MayChange[CheckConfig] = field(default_factory=CheckConfig)
    parallel: MayChange[ParallelConfig] = field(default_factory=ParallelConfig)
    data: DataConfig
    model: ModelConfig
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    guards: MayChange[GuardsConfig] = field(default_factory=GuardsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    @property
    def critic_enabled(self) -> bool:
        """Whether a value model is trained: where the estimator needs one."""
        return self.algorithm.needs.critic and self.critic.enable is not False

    @property
    def ref_enabled(self) -> bool:
        """Whether a frozen reference is loaded: for KL in the reward or in the loss, as teacher."""
        algorithm = self.algorithm
        return algorithm.charges_kl or algorithm.needs.teacher or self.actor.use_kl_loss

    @property
    def ref_is_actor(self) -> bool:
        """Whether the reference is the actor without its adapters: no model of its own."""
        same = self.ref.model.path == self.model.path
        return self.ref_enabled and same and self.model.lora_rank > 0

    def _lora(self, name: str) -> Lora | None:
        """The adapters of a model by its name, if it has any."""
        sections = {"actor": ("model", self.model), "critic": ("critic.model", self.critic.model)}
        if name not in sections or sections[name][1].lora_rank == 0:
            return None
        section, keys = sections[name]
        return Lora(
            section=section,
            rank=keys.lora_rank,
            alpha=keys.lora_alpha,
            target_modules=keys.lora_target_modules,
            exclude_modules=keys.lora_exclude_modules,
            dropout=keys.lora_dropout,
            seed=self.trainer.seed,
        )

    @property
    def uses_function(self) -> bool:
        """Whether a function scores: always where a reward is needed and no model is to score
        alone, else where one is asked for."""
        function, weights = self.reward.function, self.reward.weights
        asked_for = function.path is not None or weights.function is not None
        return asked_for or (self.algorithm.needs_reward and not self.reward.model.enable)

    @property
    def uses_builtin(self) -> bool:
        """Whether built-in scorers are picked by data_source."""
        return self.uses_function and self.reward.function.path is None

    @property
    def needs_data_source(self) -> bool:
        """Whether each row has to say which built-in scorer is its own: not where episodes may
        score themselves."""
        return self.uses_builtin and not self.rollout.has_episodes

    def watched_rules(self) -> list[Rule]:
        """Rules about metrics: of guards, of alarms, and the end of a run in which trainer and
        engine, both in float32, do not compute the same. Raises ValueError."""
        rules = [*self.guards.all_rules(), *self.trainer.alarms.rules()]
        exact = self.rollout.dtype == self.actor.fsdp.mixed_precision.param_dtype == "float32"
        older = self.algorithm.filter_groups.surplus == "keep"  # samples of the weights before
        limit = self.trainer.alarms.rollout_probs_diff_mean
        if exact and not older and limit is not None and self.guards.preset != "none":
            metric = "training/rollout_probs_diff_mean"
            rule = {"metric": metric, "above": limit, "action": "abort"}
            rules.append(parse_rule(rule, max_fires=self.guards.max_fires))
        return rules

    @property
    def planned_engine(self) -> EngineKind:
        """The engine on a machine that has the devices and packages that a run hopes for."""
        cuda = self.trainer.device != "cpu"
        return self.rollout.engine_kind(cuda=cuda, installed=lambda package: True)

    @property
    def models(self) -> dict[str, ModelRole]:
        """The models that this run has, by name, in the order of MODEL_ROLES."""
        used = {
            "actor": True,
            "critic": self.critic_enabled,
            "ref": self.ref_enabled and not self.ref_is_actor,
            "reward model": self.reward.model.enable and self.reward.model.path is not None,
        }
        return {
            name: ModelRole(
                *(name, section, path_key, is_trained, has_logits),
                path=attrgetter(path_key)(self),
                fsdp=attrgetter(f"{section}.fsdp")(self),
                lora=self._lora(name),
            )
            for name, section, path_key, is_trained, has_logits in MODEL_ROLES
            if used[name]
        }

    def model_of(self, role: ModelRole) -> ModelConfig:
        """How the model of a role is read: as model.path is, but what is overridden of that one's
        config.json is not of another's."""
        if role.path == self.model.path:
            return self.model
        return replace(self.model, path=role.path, override_config={})

    def position_problem(self, role: ModelRole, positions: int | None) -> Problem | None:
        """What is wrong with a model that has fewer positions than a sequence has tokens.

        positions: None where the model has no limit. A reward model gives no score beyond its own.
        """
        is_actors = role.path == self.model.path
        responses = {"data.max_response_length": self.data.max_response_length}
        if role.name == "actor":
            responses |= self.data.val_response_lengths
        key = max(responses, key=responses.__getitem__)
        longest = self.data.max_prompt_length + responses[key]
        if role.name == "reward model" or positions is None or positions >= longest:
            return None
        fix = "set model.override_config.max_position_embeddings"
        return Problem(
            role.path_key,
            role.path,
            f"data.max_prompt_length + {key} = {longest} tokens, and it has "
            f"max_position_embeddings = {positions}",
            f"lower them, or {fix if is_actors else 'name another model'}",
        )

    @property
    def val_sets(self) -> dict[str, ValSetConfig]:
        """Validation sets by name, with nothing null; data.val_files' has the empty name."""
        files = self.data.val_files
        found = {"": self.sampling_of(files)} if files else {}
        for name, val in self.data.val_sets.items():
            own = {key: getattr(val, key) for key in hints(ValSetConfig)}
            own = {key: value for key, value in own.items() if value is not None}
            found[name] = replace(self.sampling_of(val.files), **own)
        return found

    def sampling_of(self, files: list[str]) -> ValSetConfig:
        """How a validation set is sampled that says nothing about it."""
        sampling = self.rollout.val_kwargs
        return ValSetConfig(
            files=files,
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_response_length=self.data.max_response_length,
        )

    @property
    def longest_sampled(self) -> int:
        """Tokens of the longest sequence that is generated, in training or validation."""
        longest = [val.max_response_length or 0 for val in self.val_sets.values()]
        return self.data.max_prompt_length + max([self.data.max_response_length, *longest])

    @property
    def prompt_files(self) -> dict[str, list[str]]:
        """Files and globs with prompts, by the key that names them."""
        sets = {f"data.val_sets.{n}.files": val.files for n, val in self.data.val_sets.items()}
        return {
            "data.train_files": self.data.train_files,
            "data.val_files": self.data.val_files,
            **sets,
        }

    def saving(self, content: str) -> list[str]:
        """The trained models whose checkpoint.save_contents holds it."""
        return [
            role.name
            for role in self.models.values()
            if role.is_trained
            and content in attrgetter(f"{role.section}.checkpoint.save_contents")(self)
        ]

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        if self.trainer.default_local_dir is not None:
            return Path(self.trainer.default_local_dir)
        experiment = self.trainer.experiment_name or "default"
        return Path("runs") / self.trainer.project_name / experiment

    def dims(self, world_size: int, ranks_per_node: int) -> ParallelDims:
        """The degrees of both meshes for this world (ranks); they may have problems()."""
        return ParallelDims(
            world_size=world_size,
            ranks_per_node=ranks_per_node,
            fsdp_size=self.actor.fsdp.shard_size(world_size),
            sp=self.actor.ulysses_sequence_parallel_size,
            rollout_tp=self.rollout.tensor_model_parallel_size,
        )
