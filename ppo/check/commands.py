"""What the command line of train_ppo.py asks for besides training: a plan, or a configuration.

Owns which of the two it is.
"""

from __future__ import annotations

from ppo.check import preflight
from ppo.check.suggest import run_suggest
from ppo.config import CommandLine


def run_check(options: CommandLine) -> int:
    """`--check` or `--suggest`; the exit code."""
    return run_suggest(options) if options.suggest else preflight.run_check(options)
