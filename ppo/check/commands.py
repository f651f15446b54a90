"""What the command line of train_ppo.py asks for besides training, and what can be said before
torch is imported, which takes seconds (a minute from a cold disk).

Owns which of the two it is: a plan or a configuration; and what is wrong with a configuration for
the world that is started. Must not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ppo.check import preflight
from ppo.check.files import missing_files, wrong_contents
from ppo.check.rules import check_config
from ppo.check.suggest import run_suggest
from ppo.config import (
    CommandLine,
    Config,
    ConfigError,
    Problem,
    find_config,
    load_config,
    parse_args,
)
from ppo.config.evaluation import parse_options


def run_check(options: CommandLine) -> int:
    """`--check` or `--suggest`; the exit code."""
    return run_suggest(options) if options.suggest else preflight.run_check(options)


def problems_of_start(config: Config, *, world_size: int, ranks_per_node: int) -> list[Problem]:
    """Whatever is wrong with a configuration for a world of ranks, and on this machine."""
    return [
        *check_config(config, world_size=world_size, ranks_per_node=ranks_per_node),
        *missing_files(config),
        *wrong_contents(config),
    ]


def before_torch(words: Sequence[str], env: Mapping[str, str]) -> int | None:
    """The exit code of a command line of train_ppo.py that asks for a plan or is wrong; None where
    a run begins.

    Under torchrun nobody looks: ranks say together what is wrong. The first says what comes next.
    """

    def look() -> int | None:
        args = parse_args(words)
        if args.check:
            return run_check(args)
        check = partial(problems_of_start, world_size=1, ranks_per_node=1)
        load_config(args.config, args.overrides, check=check)
        return None

    return _early(look, env)


def before_evaluation(words: Sequence[str], env: Mapping[str, str]) -> int | None:
    """The same of rollout.py: its options, and whether its file is there."""

    def look() -> None:
        find_config(parse_options(words).config)

    return _early(look, env)


def _early(look: Callable[[], int | None], env: Mapping[str, str]) -> int | None:
    if "TORCHELASTIC_RUN_ID" not in env and env.get("WORLD_SIZE", "1") == "1":
        try:
            code = look()
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        if code is not None:
            return code
    if env.get("RANK", "0") == "0":  # nothing is seen of it for seconds
        sys.stderr.write("importing torch (seconds; from a cold disk up to a minute)\n")
        sys.stderr.flush()
    return None
