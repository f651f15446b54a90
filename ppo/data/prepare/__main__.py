"""Commands that write prompt files: train.parquet and test.parquet in verl's row format.

    python -m ppo.data.prepare reasoning_gym --out data/sums --task chain_sum --option max_terms=2
    python -m ppo.data.prepare gsm8k --out data/gsm8k                        # with `datasets`
    python -m ppo.data.prepare gsm8k --out data/gsm8k --input train.jsonl --test_input test.jsonl
    python -m ppo.data.prepare jsonl --out data/mine --input mine.jsonl --prompt_key question

Owns command line, reading and writing; what rows look like is sources.py's and gym_rows.py's.
Files are written beside and renamed; the same command gives the same files.
"""

import argparse
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ppo.data.prepare.gym_rows import INSTRUCTIONS, TaskError, gym_rows
from ppo.data.prepare.sources import (
    PreparedRow,
    RecordError,
    gsm8k_rows,
    jsonl_rows,
    math_rows,
    preference_rows,
)
from ppo.data.rows import DataError, read_rows
from ppo.files import new_file

logger = logging.getLogger(__name__)

HUB_SETS = {
    "gsm8k": ("openai/gsm8k", "main"),
    "math": ("DigitalLearningGmbH/MATH-lighteval", None),
    "preference": ("Anthropic/hh-rlhf", None),
}
MAKERS: dict[str, Callable[..., Iterable[PreparedRow]]] = {
    "gsm8k": gsm8k_rows,
    "math": math_rows,
    "preference": preference_rows,
}


class PrepareError(RuntimeError):
    """The data cannot be had."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; a problem is one message and exit code 1."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        train, test = options.make(options)
        for name, rows in (("train", train), ("test", test)):
            if rows:
                write_rows(options.out / f"{name}.parquet", rows)
    except (PrepareError, DataError, RecordError, TaskError) as error:
        parser.exit(1, f"{error}\n")


def write_rows(path: Path, rows: Sequence[PreparedRow]) -> None:
    """Write rows as parquet, beside and renamed."""
    import pyarrow
    import pyarrow.parquet

    with new_file(path) as beside:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), beside)
    logger.info("wrote %s: %d rows", path, len(rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ppo.data.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="SET")
    for name in MAKERS:
        hub = HUB_SETS[name][0]
        command = _command(commands, name, f"{hub}, or the same records in local files")
        _add_inputs(command, required=False)
        command.set_defaults(make=_make_known, name=name)
    command = _command(commands, "jsonl", "any questions of your own")
    _add_inputs(command, required=True)
    command.add_argument("--prompt_key", default="prompt", help="text, or a list of messages")
    command.add_argument("--answer_key", default="answer", help="becomes the ground truth")
    command.add_argument("--data_source", default="exact_match", help="picks the scorer")
    _add_texts(command, instruction="")
    command.set_defaults(make=_make_jsonl)
    _add_gym(_command(commands, "reasoning_gym", "generated tasks, no download"))
    return parser


def _command(commands: Any, name: str, help_text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=help_text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    command.add_argument("--out", type=Path, required=True, help="folder of the parquet files")
    return command


def _add_inputs(command: argparse.ArgumentParser, *, required: bool) -> None:
    command.add_argument("--input", type=Path, nargs="+", required=required, help="JSONL, parquet")
    command.add_argument("--test_input", type=Path, nargs="+", help="JSONL or parquet")
    command.add_argument(
        "--test_size", type=int, default=0, help="without --test_input: last records of --input"
    )


def _add_texts(command: argparse.ArgumentParser, *, instruction: str | None) -> None:
    command.add_argument("--instruction", default=instruction, help="behind each question")
    command.add_argument("--system", default="", help="system message")


def _add_gym(command: argparse.ArgumentParser) -> None:
    command.add_argument("--task", required=True, help="name in reasoning-gym, e.g. chain_sum")
    command.add_argument(
        "--option", nargs="+", default=[], metavar="KEY=VALUE", help="options of the task"
    )
    command.add_argument("--train_size", type=int, default=10_000, help="training rows")
    command.add_argument("--test_size", type=int, default=256, help="held-out rows")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--method", choices=[*INSTRUCTIONS], default="own", help="of scoring")
    _add_texts(command, instruction=None)
    command.set_defaults(make=_make_gym)


def _make_gym(options: argparse.Namespace) -> tuple[list[PreparedRow], list[PreparedRow]]:
    return gym_rows(
        options.task,
        train_size=options.train_size,
        test_size=options.test_size,
        seed=options.seed,
        options=dict(_parse_option(text) for text in options.option),
        method=options.method,
        instruction=options.instruction,
        system=options.system,
    )


def _parse_option(text: str) -> tuple[str, Any]:
    """`KEY=VALUE`, the value as JSON where it is, else as text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise PrepareError(f"--option {text}: write KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _make_known(options: argparse.Namespace) -> tuple[list[PreparedRow], list[PreparedRow]]:
    maker = MAKERS[options.name]
    if options.input is None:
        hub, config = HUB_SETS[options.name]
        train, test = (_from_hub(hub, config, split) for split in ("train", "test"))
    else:
        train, test = _from_files(options)
    return list(maker(train, "train")), list(maker(test, "test"))


def _make_jsonl(options: argparse.Namespace) -> tuple[list[PreparedRow], list[PreparedRow]]:
    maker = partial(
        jsonl_rows,
        prompt_key=options.prompt_key,
        answer_key=options.answer_key,
        data_source=options.data_source,
        instruction=options.instruction,
        system=options.system,
    )
    train, test = _from_files(options)
    return list(maker(train, "train")), list(maker(test, "test"))


def _from_files(options: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """Records of the local files, training and test."""

    def read(paths: Sequence[Path]) -> list[dict]:
        for path in paths:
            if not path.is_file():
                raise DataError(path, "no such file")
        return [row.values for path in paths for row in read_rows(path)]

    train = read(options.input)
    if options.test_input:
        return train, read(options.test_input)
    if options.test_size >= len(train):
        raise PrepareError(f"--test_size {options.test_size} leaves none of {len(train)} records")
    cut = len(train) - options.test_size
    return train[:cut], train[cut:]


def _from_hub(name: str, config: str | None, split: str) -> list[dict]:
    """Records of a data set of the hub, through `datasets`. Raises PrepareError."""
    hint = "without network give local files: --input TRAIN.jsonl --test_input TEST.jsonl"
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise PrepareError(
            f"{name} needs the package datasets: pip install datasets; {hint}"
        ) from (error)
    try:
        return [dict(record) for record in datasets.load_dataset(name, config, split=split)]
    except (OSError, ValueError) as error:
        raise PrepareError(f"{name} could not be loaded: {error}; {hint}") from error


if __name__ == "__main__":
    main()
