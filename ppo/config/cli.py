"""The command line that train_ppo.py and rollout.py have in common.

Owns --config, --check and its options, and what counts as an override. Must not know any key.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from ppo.config.fields import ConfigError, Problem


class CommandLine(NamedTuple):
    """What the command line says."""

    config: str
    """name of the YAML file"""
    overrides: list[str]
    """`key.sub=value`, with or without leading dashes"""
    check: bool
    """print the plan and end"""
    nnodes: int | None
    """nodes that --check plans for; None = check.nnodes"""
    nproc_per_node: int | None
    """ranks of a node that --check plans for; None = check.nproc_per_node"""
    device_memory_gib: float | None
    """device memory that --check plans for, GiB; None = check.device_memory_gib"""


class ArgumentParser(argparse.ArgumentParser):
    """Answers a wrong command line with a ConfigError, as any other wrong input."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([Problem("", message, message, self.format_usage().strip())])


def parse_args(argv: Sequence[str], *, description: str = "Train with PPO.") -> CommandLine:
    """Options of train_ppo.py; what is not an option is an override. Raises ConfigError."""
    parser = build_parser(description)
    group = parser.add_argument_group("plan without running anything")
    group.add_argument("--check", action="store_true", help="print the plan and end: exit 0 or 2")
    group.add_argument("--nnodes", type=count, metavar="N", help="nodes to plan for")
    group.add_argument("--nproc_per_node", "--nproc-per-node", type=count, metavar="M")
    group.add_argument("--device_memory_gib", "--device-memory-gib", type=size, metavar="G")
    known, overrides = parser.parse_known_args(list(argv))
    return CommandLine(overrides=overrides, **vars(known))


def count(text: str) -> int:
    """A whole number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def size(text: str) -> float:
    """A number above 0."""
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return number


def build_parser(description: str) -> ArgumentParser:
    """A parser with --config; pass what it does not know on as overrides."""
    parser = ArgumentParser(
        description=description,
        allow_abbrev=False,
        usage="%(prog)s --config FILE [options] [key.sub=value ...]",
    )
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="YAML file: as given, else in configs/"
    )
    return parser
