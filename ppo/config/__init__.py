"""The configuration: `load_config` reads YAML and overrides into a frozen `Config`."""

from ppo.config.cli import CommandLine, parse_args
from ppo.config.fields import ConfigError, Problem
from ppo.config.load import changed_keys, find_config, from_yaml, load_config, to_yaml
from ppo.config.root import Config, ModelRole
from ppo.config.sections.actor import ActorConfig, CriticConfig, RefConfig
from ppo.config.sections.algorithm import AlgorithmConfig, KlControlConfig
from ppo.config.sections.data import DataConfig
from ppo.config.sections.model import FsdpConfig, ModelConfig, OptimConfig, ParallelConfig
from ppo.config.sections.reward import RewardConfig
from ppo.config.sections.rollout import RolloutConfig
from ppo.config.sections.trainer import CheckConfig, TrainerConfig

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "CheckConfig",
    "CommandLine",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DataConfig",
    "FsdpConfig",
    "KlControlConfig",
    "ModelConfig",
    "ModelRole",
    "OptimConfig",
    "ParallelConfig",
    "Problem",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "TrainerConfig",
    "changed_keys",
    "find_config",
    "from_yaml",
    "load_config",
    "parse_args",
    "to_yaml",
]
