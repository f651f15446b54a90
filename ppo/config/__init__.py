"""The configuration: `load_config` reads YAML and overrides into a frozen `Config`."""

from ppo.config.cli import Options, parse_args
from ppo.config.fields import ConfigError, Problem
from ppo.config.load import changed_keys, find_config, load_config, to_yaml
from ppo.config.root import Config

__all__ = [
    "Config",
    "ConfigError",
    "Options",
    "Problem",
    "changed_keys",
    "find_config",
    "load_config",
    "parse_args",
    "to_yaml",
]
