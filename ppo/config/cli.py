"""The command line that train_ppo.py and rollout.py have in common.

Owns --config, --check and its options, and what counts as an override.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from ppo.config.bounds import FilePath, broken_rule
from ppo.config.fields import ConfigError, Problem

WHERE_KEYS_ARE = """\
Keys: configs/ppo.yaml lists every key with its default, unit, bounds and meaning (the same from
`python -m ppo.config reference`). key.sub=value behind the command wins over the file, and the file
over the defaults. A value with spaces or brackets needs the shell's quotes.
Try it: python train_ppo.py --config ppo_tiny.yaml trains a random model on a CPU in half a minute.
"""


class CommandLine(NamedTuple):
    """What the command line says."""

    config: str
    """name of the YAML file; empty where one is to be suggested"""
    overrides: list[str]
    """`key.sub=value`, with or without leading dashes"""
    check: bool
    """plan, print and end"""
    verbose: bool
    """print all of it"""
    model_config: Path | None = None
    """config.json of model.path, for --check and --suggest"""
    suggest: str = ""
    """the algorithm of a configuration that is to be suggested for the model and the machine"""
    as_here: bool = False
    """--check plans for as much memory as the GPUs have that CUDA shows here"""


class ArgumentParser(argparse.ArgumentParser):
    """Answers a wrong command line with a ConfigError, as any other wrong input."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([Problem("", message, message, self.format_usage().strip())])


TRAIN = """\
Train with PPO; every rank runs this program.

    python train_ppo.py --config ppo_tiny.yaml                        # a random model, on a CPU
    python train_ppo.py --config ppo.yaml --check                     # plan: mesh, batches, memory
    python train_ppo.py --suggest --model Qwen/Qwen3-8B --gpus 8      # a file that passes --check
    torchrun --nproc_per_node=8 train_ppo.py --config ppo.yaml actor.optim.lr=2e-6
    torchrun --nproc_per_node=8 train_ppo.py --config ppo.yaml        # again: it resumes

Exit code: 0 finished, stopped or checked; 2 wrong configuration, data or weights (torchrun answers
1); the run folder's status.json says how a run ended.
"""


def parse_args(argv: Sequence[str], *, description: str = TRAIN) -> CommandLine:
    """Options of train_ppo.py; what is not an option is an override. Raises ConfigError.

    The options that say which machine --check plans for are overrides of the section `check`, as
    --model is one of model.path.
    """
    parser = build_parser(description, needs_config="--suggest" not in argv)
    group = parser.add_argument_group("plan without running anything")
    group.add_argument("--check", action="store_true", help="print the plan and end: exit 0 or 2")
    group.add_argument("-v", "--verbose", action="store_true", help="print all of the plan")
    machine = {
        "nnodes": ("--nnodes", "N", "nodes to plan for"),
        "nproc_per_node": ("--nproc_per_node", "M", "ranks (devices) of a node"),
        "device_memory_gib": (
            *("--device_memory_gib", "G"),
            "memory of a device, GiB; auto, with --check: of the smallest GPU here, where there is "
            "one and no check.device_memory_gib=G is given",
        ),
    }
    for option, letter, meaning in machine.values():
        names = dict.fromkeys((option, option.replace("_", "-")))
        group.add_argument(*names, metavar=letter, help=meaning)
    names, meaning = ("--model_config", "--model-config"), "config.json of a model that is not here"
    group.add_argument(*names, metavar="FILE", type=file, help=meaning)
    _add_suggest(parser)
    known, rest = parser.parse_known_args(list(argv))
    overrides = join_values(rest)
    as_here = known.device_memory_gib == "auto"
    if as_here:
        if known.suggest:
            parser.error("--device_memory_gib is a number with --suggest")
        known.device_memory_gib = None
        keys = [text.partition("=")[0].lstrip("-+") for text in overrides]
        as_here = "check.device_memory_gib" not in keys
    for name in machine:
        if (value := getattr(known, name)) is not None:
            overrides.append(f"check.{name}={value}")
    if known.suggest:
        overrides[:0] = _wish(parser, known)
    elif wrong := [n for n in ("model", "gpus", "algorithm") if getattr(known, n) is not None]:
        parser.error(f"--{wrong[0]} belongs to --suggest")
    return CommandLine(
        known.config or "",
        overrides,
        known.check or known.suggest,
        known.verbose,
        known.model_config,
        (known.algorithm or "ppo") if known.suggest else "",
        as_here,
    )


def _add_suggest(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "print a configuration that fits: --suggest --model NAME --gpus N [key.sub=value ...]"
    )
    group.add_argument("--suggest", action="store_true", help="print it and end: exit 0 or 2")
    group.add_argument("--model", metavar="NAME", help="folder or hub name")
    group.add_argument("--gpus", metavar="N", type=int, help="devices; more than 8: nodes of 8")
    names = "ppo, dapo, or an algorithm.adv_estimator"
    group.add_argument("--algorithm", metavar="NAME", help=f"{names}; default ppo")


def _wish(parser: argparse.ArgumentParser, known: argparse.Namespace) -> list[str]:
    """The overrides that --model and --gpus stand for."""
    if known.config is not None or known.model is None:
        parser.error("--suggest needs --model NAME, and no --config")
    found = [f"model.path={known.model}"]
    gpus = known.gpus
    if gpus is not None:
        nodes, per_node = (1, gpus) if gpus <= 8 else (gpus // 8, 8)
        if gpus < 1 or nodes * per_node != gpus:
            parser.error(
                "--gpus is 1 to 8, or a multiple of 8: --nnodes, --nproc_per_node say more"
            )
        found += [f"check.nnodes={nodes}", f"check.nproc_per_node={per_node}"]
    return found


def join_values(words: Sequence[str]) -> list[str]:
    """`--key value` as `--key=value`, and a `--flag` that nothing follows as `--flag=true`."""
    joined: list[str] = []
    waiting = False
    for word in words:
        is_key = word.startswith(("--", "+", "~")) or "=" in word
        if waiting:
            joined[-1] += "=true" if is_key else f"={word}"
        if is_key or not waiting:
            joined.append(word)
        waiting = is_key and word.startswith("--") and "=" not in word
    if waiting:
        joined[-1] += "=true"
    return joined


def build_parser(description: str, *, needs_config: bool = True) -> ArgumentParser:
    """A parser with --config; pass what it does not know on as overrides."""
    parser = ArgumentParser(
        description=description,
        allow_abbrev=False,
        usage="%(prog)s --config FILE [options] [key.sub=value ...]",
        epilog=WHERE_KEYS_ARE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        required=needs_config,
        metavar="FILE",
        help="YAML file: as given, else in configs/",
    )
    return parser


def for_users(docstring: str | None) -> str:
    """A program's docstring as --help shows it: without what it says to readers of its code."""
    return (docstring or "").partition("\n\nOwns ")[0]


def file(text: str) -> Path:
    """The type of an option that names a file that is there."""
    found = path(text)
    if not found.is_file():
        raise argparse.ArgumentTypeError(f"{text}: no such file")
    return found


def path(text: str) -> Path:
    """The type of an option that names a file or a folder."""
    rule = broken_rule(FilePath, text)
    if rule is not None:
        raise argparse.ArgumentTypeError(str(rule))
    return Path(os.path.expanduser(text))
