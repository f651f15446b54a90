"""The configuration: `load_config` reads YAML and overrides into a frozen `Config`.

The sections and their types are imported from here and from nowhere else.
"""

from ppo.config.cli import CommandLine, parse_args
from ppo.config.fields import ConfigError, Problem
from ppo.config.load import (
    changed_keys,
    find_config,
    from_yaml,
    load_config,
    preset_of,
    to_yaml,
    unusual_values,
)
from ppo.config.root import Config, ModelRole
from ppo.config.schema import flatten as values_of
from ppo.config.schema import with_values
from ppo.config.sections.actor import (
    KEYS_OF_LOSS_MODES,
    ActorConfig,
    CriticConfig,
    CriticModelConfig,
    LossAggMode,
    RefConfig,
)
from ppo.config.sections.algorithm import (
    CORRECTION_PRESETS,
    ESTIMATOR_NEEDS,
    AdvEstimator,
    AlgorithmConfig,
    FilterGroupsConfig,
    KlControlConfig,
    RejectRule,
    RolloutCorrectionConfig,
)
from ppo.config.sections.data import (
    CustomClassConfig,
    DataConfig,
    DifficultyConfig,
    ValSetConfig,
)
from ppo.config.sections.guards import (
    BATCH_METRICS,
    FIRES_WINDOW,
    MEMORY,
    GuardsConfig,
    Rule,
    parse_rule,
)
from ppo.config.sections.model import (
    ALL_LINEAR,
    CheckpointPolicy,
    FsdpConfig,
    Lora,
    MixedPrecisionConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
)
from ppo.config.sections.reward import RewardConfig, RewardFunctionConfig
from ppo.config.sections.rollout import (
    ENGINE_TRAITS,
    EngineProcess,
    EngineTraits,
    EpisodeConfig,
    RolloutConfig,
)
from ppo.config.sections.trainer import (
    PACKAGES_OF_LOGGERS,
    CheckConfig,
    EarlyStopConfig,
    TrainerConfig,
)

__all__ = [
    "ALL_LINEAR",
    "BATCH_METRICS",
    "CORRECTION_PRESETS",
    "ENGINE_TRAITS",
    "ESTIMATOR_NEEDS",
    "FIRES_WINDOW",
    "KEYS_OF_LOSS_MODES",
    "MEMORY",
    "PACKAGES_OF_LOGGERS",
    "ActorConfig",
    "AdvEstimator",
    "AlgorithmConfig",
    "CheckConfig",
    "CheckpointPolicy",
    "CommandLine",
    "Config",
    "ConfigError",
    "CriticConfig",
    "CriticModelConfig",
    "CustomClassConfig",
    "DataConfig",
    "DifficultyConfig",
    "EarlyStopConfig",
    "EngineProcess",
    "EngineTraits",
    "EpisodeConfig",
    "FilterGroupsConfig",
    "FsdpConfig",
    "GuardsConfig",
    "KlControlConfig",
    "Lora",
    "LossAggMode",
    "MixedPrecisionConfig",
    "ModelConfig",
    "ModelRole",
    "OptimConfig",
    "ParallelConfig",
    "Problem",
    "RefConfig",
    "RejectRule",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "Rule",
    "TrainerConfig",
    "ValSetConfig",
    "changed_keys",
    "find_config",
    "from_yaml",
    "load_config",
    "parse_args",
    "parse_rule",
    "preset_of",
    "to_yaml",
    "unusual_values",
    "values_of",
    "with_values",
]
