"""The configuration: `load_config` reads YAML and overrides into a frozen `Config`."""

from ppo.config.cli import Options, parse_args
from ppo.config.fields import ConfigError, Problem
from ppo.config.load import changed_keys, find_config, from_yaml, load_config, to_yaml
from ppo.config.reward import RewardConfig
from ppo.config.root import Config
from ppo.config.sections import (
    AlgorithmConfig,
    CheckConfig,
    DataConfig,
    KlControlConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    TrainerConfig,
)
from ppo.config.training import ActorConfig, CriticConfig, FsdpConfig, OptimConfig, RefConfig

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "CheckConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DataConfig",
    "FsdpConfig",
    "KlControlConfig",
    "ModelConfig",
    "OptimConfig",
    "Options",
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
