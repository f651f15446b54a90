"""The configuration: `load_config` reads YAML and overrides into a frozen `Config`."""

from ppo.config.fields import ConfigError, Problem
from ppo.config.root import Config

__all__ = ["Config", "ConfigError", "Problem"]
