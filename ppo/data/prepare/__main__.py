"""Commands that write prompt files: train.parquet and test.parquet in verl's row format.

    python -m ppo.data.prepare reasoning_gym --out data/sums --task chain_sum --option max_terms=2
    python -m ppo.data.prepare gsm8k --out data/gsm8k                        # with `datasets`
    python -m ppo.data.prepare gsm8k --out data/gsm8k --input train.jsonl --test_input test.jsonl
    python -m ppo.data.prepare math --out data/math --input math.jsonl --test_size 0.1
    python -m ppo.data.prepare preference --out data/hh --input pairs.jsonl --test_size 500
    python -m ppo.data.prepare jsonl --out data/mine --input mine.jsonl --prompt_key question
    python -m ppo.data.prepare csv --out data/mine --input mine.csv --map q=prompt a=ground_truth
    python -m ppo.data.prepare trl --out data/deepmath --input deepmath.parquet

Owns command line and reading; what rows look like is sources.py's and gym_rows.py's, writing is
writing.py's. The same command gives the same files.
"""

import argparse
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ppo.config.cli import for_users
from ppo.data.prepare.csv_rows import SEPARATORS, read_csv
from ppo.data.prepare.gym_rows import INSTRUCTIONS, TaskError, gym_rows
from ppo.data.prepare.sources import (
    METHODS,
    Columns,
    PreparedRow,
    any_rows,
    gsm8k_rows,
    math_rows,
    preference_rows,
    trl_rows,
)
from ppo.data.prepare.writing import Part, WriteError, write_parts
from ppo.data.rows import DataError, Row, find_files, read_rows

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


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults of options, and examples as they are written."""


KINDS = "JSONL, parquet, CSV, or globs"


class PrepareError(RuntimeError):
    """The data cannot be had."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; a problem is one message and exit code 2, as of every command."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        train, test = options.make(options)
        write_parts(options.out, {"train": train, "test": test})
    except (PrepareError, DataError, TaskError, WriteError) as error:
        parser.exit(2, f"{error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ppo.data.prepare",
        description=for_users(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="SET")
    for name in MAKERS:
        hub = HUB_SETS[name][0]
        command = _command(commands, name, f"{hub}, or the same records in local files")
        _add_inputs(command, required=False)
        command.set_defaults(make=_make_known, name=name)
    command = _command(commands, "jsonl", "any records of your own", aliases=["csv", "parquet"])
    _add_inputs(command, required=True)
    command.add_argument("--prompt_key", default="prompt", help="text, or a list of messages")
    command.add_argument(
        "--answer_key", default="answer", help="becomes the ground truth; '' = there are no answers"
    )
    command.add_argument(
        "--map",
        nargs="+",
        default=[],
        metavar="COLUMN=FIELD",
        help="what columns are: prompt, ground_truth, data_source, system, or another name in "
        "extra_info",
    )
    _add_scoring(command, "exact")
    command.set_defaults(make=_make_any, method_if_none="exact")
    command = _command(commands, "trl", "records with the columns prompt and solution, as in TRL")
    _add_inputs(command, required=True)
    _add_scoring(command, "boxed")
    command.set_defaults(make=_make_trl, method_if_none="boxed")
    _add_gym(_command(commands, "reasoning_gym", "generated tasks, no download"))
    return parser


def _add_scoring(command: argparse.ArgumentParser, default: str) -> None:
    scored = "; ".join(f"{name}: {method.scored}" for name, method in METHODS.items())
    command.add_argument(
        "--method",
        choices=[*METHODS],
        help=f"how answers are scored ({default} if not given): {scored}",
    )
    command.add_argument(
        "--data_source",
        help="picks another scorer, or is a name for one of yours; not with --method",
    )
    _add_texts(command, instruction=None)


def _command(
    commands: Any, name: str, help_text: str, *, aliases: Sequence[str] = ()
) -> argparse.ArgumentParser:
    names = {f"ppo.data.prepare {one} " for one in (name, *aliases)}
    examples = [line for line in (__doc__ or "").splitlines() if any(n in line for n in names)]
    command = commands.add_parser(
        name,
        help=help_text,
        aliases=[*aliases],
        description="\n".join([f"{help_text[0].upper()}{help_text[1:]}.", "", *examples]),
        formatter_class=_Help,
    )
    command.add_argument("--out", type=Path, required=True, help="folder of the parquet files")
    return command


def _add_inputs(command: argparse.ArgumentParser, *, required: bool) -> None:
    command.add_argument("--input", nargs="+", required=required, help=KINDS)
    command.add_argument("--test_input", nargs="+", help=KINDS)
    command.add_argument(
        "--test_size",
        type=_test_size,
        default=0,
        help="without --test_input: last records of --input, a number or a share such as 0.1",
    )


def _test_size(text: str) -> int | float:
    """A number of records, or a share of them, between 0 and 1."""
    try:
        size = float(text) if "." in text else int(text)
    except ValueError:
        size = -1
    if size < 0 or (isinstance(size, float) and not 0 < size < 1):
        rule = "must be a number of records, or a share between 0 and 1 such as 0.1"
        raise argparse.ArgumentTypeError(f"{text!r}: {rule}")
    return size


def _add_texts(command: argparse.ArgumentParser, *, instruction: str | None) -> None:
    command.add_argument(
        "--instruction", default=instruction, help="behind each question; the method's if not given"
    )
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


def _make_gym(options: argparse.Namespace) -> list[Part]:
    logging.info("importing reasoning_gym, and drawing questions of %s", options.task)
    train, test = gym_rows(
        options.task,
        train_size=options.train_size,
        test_size=options.test_size,
        seed=options.seed,
        options=dict(_parse_option(text) for text in options.option),
        method=options.method,
        instruction=options.instruction,
        system=options.system,
    )
    return [Part(train), Part(test)]


def _parse_option(text: str) -> tuple[str, Any]:
    """`KEY=VALUE`, the value as JSON where it is, else as text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise PrepareError(f"--option {text}: write KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _make_known(options: argparse.Namespace) -> list[Part]:
    if options.input is None:
        hub, config = HUB_SETS[options.name]
        records = [_from_hub(hub, config, split) for split in ("train", "test")]
    else:
        records = _from_files(options)
    return _parts(MAKERS[options.name], records)


def _make_any(options: argparse.Namespace) -> list[Part]:
    columns = _columns(options)
    if columns.data_source is not None:
        if options.data_source is not None or options.method is not None:
            raise PrepareError("--map COLUMN=data_source, --data_source and --method: give one")
        options.data_source = "of each row"
    scoring = _scoring(options, has_answers=bool(columns.answer))
    return _parts(partial(any_rows, columns=columns, **scoring), _from_files(options))


def _make_trl(options: argparse.Namespace) -> list[Part]:
    return _parts(partial(trl_rows, **_scoring(options, has_answers=True)), _from_files(options))


def _columns(options: argparse.Namespace) -> Columns:
    """--prompt_key, --answer_key and --map."""
    columns = Columns(options.prompt_key, options.answer_key)
    fields = {"prompt": "prompt", "ground_truth": "answer"}
    fields |= {name: name for name in ("data_source", "system")}
    seen, renamed = set[str](), {}
    for text in options.map:
        column, equals, field = text.rpartition("=")
        if not equals or not column or not field:
            raise PrepareError(f"--map {text}: write COLUMN=FIELD")
        if field in seen:
            raise PrepareError(f"--map {text}: {field} is given twice")
        seen.add(field)
        if field in fields:
            columns = columns._replace(**{fields[field]: column})
        else:
            renamed[column] = field
    return columns._replace(renamed=renamed)


def _scoring(options: argparse.Namespace, *, has_answers: bool) -> dict[str, Any]:
    """--method, --data_source, --instruction and --system, as the makers of rows take them."""
    source, method, instruction = options.data_source, None, ""
    if source is None:
        source, method, instruction, _ = METHODS[options.method or options.method_if_none]
    elif options.method is not None:
        raise PrepareError(f"--method {options.method} names a scorer, and so does --data_source")
    if options.instruction is not None:
        instruction = options.instruction
    return {
        "data_source": source,
        "method": method if has_answers else None,
        "instruction": instruction,
        "system": options.system,
    }


def _parts(
    maker: Callable[..., Iterable[PreparedRow]], records: Sequence[Sequence[Row]]
) -> list[Part]:
    train, test = records
    return [Part(list(maker(train, "train")), train), Part(list(maker(test, "test")), test)]


def _from_files(options: argparse.Namespace) -> list[list[Row]]:
    """Records of the local files, training and test."""

    def read(files: Sequence[str]) -> list[Row]:
        return [row for path in find_files(files) for row in _records(path)]

    train = read(options.input)
    if options.test_input:
        return [train, read(options.test_input)]
    size = options.test_size
    size = max(1, round(size * len(train))) if isinstance(size, float) else size
    if size >= len(train):
        raise PrepareError(f"--test_size {options.test_size} leaves none of {len(train)} records")
    cut = len(train) - size
    return [train[:cut], train[cut:]]


def _records(path: Path) -> Iterator[Row]:
    return read_csv(path) if path.suffix.lower() in SEPARATORS else read_rows(path)


def _from_hub(name: str, config: str | None, split: str) -> list[Row]:
    """Records of a data set of the hub, through `datasets`. Raises PrepareError."""
    hint = "without network give local files: --input TRAIN.jsonl --test_input TEST.jsonl"
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise PrepareError(
            f"{name} needs the package datasets: pip install -e '.[data]'; {hint}"
        ) from error
    try:
        records = datasets.load_dataset(name, config, split=split)
        place = Path(f"{name} {split}")
        return [Row(place, index, None, dict(record)) for index, record in enumerate(records)]
    except (OSError, ValueError) as error:
        raise PrepareError(f"{name} could not be loaded: {error}; {hint}") from error


if __name__ == "__main__":
    main()
