"""A reward on real rows, before anything is trained.

    python -m ppo.rewards.try my_reward.py --data data/gsm8k/train.parquet
    python -m ppo.rewards.try my_reward.py --data test.jsonl --responses responses.txt
    python -m ppo.rewards.try builtin --data data/gsm8k/test.parquet
    python -m ppo.rewards.try f.py --data d.jsonl reward.function.style=trl reward.timeout_s=5

Without --responses each row is answered with what is known of it: the ground truth in several
forms, the column that holds a whole answer, nothing, and the truth of another row. A reward that
works gives the right ones more than the wrong ones. FUNCTION_FILE may be `builtin`: the scorers
that data_source picks. With --config the keys of that file hold (data.prompt_key, reward.*, ...).

The functions run in the processes and within the limits that a training run gives them.

Owns the command. Must not know how functions are called.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ppo.config import Config, load_config
from ppo.config.cli import WHERE_KEYS_ARE, ArgumentParser, for_users, join_values
from ppo.data.columns import Sample, parse_row
from ppo.data.rows import DataError, Row, find_files, read_rows
from ppo.errors import InputError
from ppo.rewards.contract import RewardError, RewardRequest, RewardResult
from ppo.rewards.pool import RewardPool

BUILTIN = "builtin"
ANSWER_COLUMNS = ("answer", "solution", "chosen", "response")
"""columns of a row that hold a whole answer in known data sets"""
FORMS = {
    "the truth": "{}",
    "a sentence": "The answer is {}",
    "#### truth": "So it is {0}.\n#### {0}",
    "\\boxed{truth}": "So it is $\\boxed{{{0}}}$.",
    "<answer> tags": "<think>so</think>\n<answer>{}</answer>",
}
MOST_SHOWN = 3
"""failures and rows that are printed whole"""
MOST_LETTERS = 300


class Attempt(NamedTuple):
    """A response to a row."""

    kind: str
    row: Row
    request: RewardRequest


class Scored(NamedTuple):
    """What came of it."""

    attempt: Attempt
    result: RewardResult
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when so many failed that a run would end; 2 when it cannot work at all."""
    try:
        options, config = _parse(sys.argv[1:] if arguments is None else arguments)
        attempts = list(_attempts(options, config))
        started = time.monotonic()
        with RewardPool(config.reward) as pool:
            startup = time.monotonic() - started
            scored = _score(pool, attempts, config.reward.num_workers)
    except (InputError, RewardError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"workers: {config.reward.num_workers}, ready after {startup:.1f} s")
    _print_table(scored)
    _print_failures(scored)
    _print_examples(scored)
    failed = sum(one.result.failed is not None for one in scored)
    limit = config.reward.max_failed_fraction
    if failed > limit * len(scored):
        print(
            f"{failed} of {len(scored)} failed: more than reward.max_failed_fraction = {limit}, at "
            "which a run ends"
        )
        return 1
    return 0


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    parser = ArgumentParser(
        prog="python -m ppo.rewards.try",
        usage="%(prog)s FUNCTION_FILE --data FILE [options] [key.sub=value ...]",
        description=for_users(__doc__),
        epilog=WHERE_KEYS_ARE,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("function", help=f"Python file with the function, or {BUILTIN}")
    parser.add_argument("--data", required=True, nargs="+", help="parquet, JSONL, or globs")
    parser.add_argument(
        "--responses",
        help="responses to the rows in their order: JSONL or parquet with a column `response` (as "
        "rollout.py and a run's samples/ have them), or one in each line of a .txt",
    )
    parser.add_argument("--rows", type=int, default=50, help="rows that are tried (50)")
    parser.add_argument("--config", help="YAML file whose keys hold, as given, else in configs/")
    options, rest = parser.parse_known_args(list(arguments))
    rest = [*(word for word in options.data if "=" in word), *rest]  # argparse takes them for files
    options.data = [word for word in options.data if "=" not in word]
    overrides = [f"data.train_files={json.dumps(options.data)}", *join_values(rest)]
    if options.function != BUILTIN:
        overrides.append(f"reward.function.path={json.dumps(options.function)}")
    if options.config is None:
        overrides = ["model.path=tiny", "reward.num_workers=2", *overrides]
    return options, load_config(options.config, overrides)


def _attempts(options: argparse.Namespace, config: Config) -> Iterator[Attempt]:
    rows = [
        row for path in find_files(options.data) for row in islice(read_rows(path), options.rows)
    ]
    rows = rows[: options.rows]
    need_source = options.function == BUILTIN
    samples = [parse_row(row, config.data, need_data_source=need_source) for row in rows]
    if options.responses is None:
        for index, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            other = samples[(index + 1) % len(samples)]
            for kind, text in known_answers(sample, other):
                yield Attempt(kind, row, _request(sample, text))
        return
    responses = read_responses(Path(options.responses))
    if len(responses) < len(rows):
        raise DataError(
            options.responses,
            f"holds {len(responses)} responses, for {len(rows)} rows: one is needed for each, or "
            f"--rows {len(responses)}",
        )
    for row, sample, text in zip(rows, samples, responses, strict=False):
        yield Attempt("given", row, _request(sample, text))


def known_answers(sample: Sample, other: Sample) -> Iterator[tuple[str, str]]:
    """What can be answered to a row, by kind: its truth in several forms, and wrong answers."""
    truth = _as_text(sample.ground_truth)
    if truth is not None:
        for kind, form in FORMS.items():
            yield kind, form.format(truth)
    for column in ANSWER_COLUMNS:
        if isinstance(sample.extra_info.get(column), str):
            yield f"column {column}", sample.extra_info[column]
    yield "empty", ""
    wrong = _as_text(other.ground_truth)
    if wrong is not None and wrong != truth:
        yield "another's truth", wrong


def read_responses(path: Path) -> list[str]:
    """Responses of a file, in its order. Raises DataError."""
    (path,) = find_files([str(path)])[:1]
    if path.suffix.lower() == ".txt":
        try:
            return path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(path, f"cannot be read as text: {error}") from error
    found = []
    for row in read_rows(path):
        response = row.values.get("response")
        if not isinstance(response, str):
            columns = ", ".join(row.values) or "nothing"
            raise row.error(f"must be text; the row has {columns}", "response")
        found.append(response)
    return found


def _as_text(truth: Any) -> str | None:
    if truth is None or isinstance(truth, str):
        return truth
    if isinstance(truth, list) and truth:
        return _as_text(truth[0])
    return json.dumps(truth, ensure_ascii=False, default=str)


def _request(sample: Sample, text: str) -> RewardRequest:
    return RewardRequest(
        data_source=sample.data_source,
        solution_str=text,
        ground_truth=sample.ground_truth,
        extra_info=sample.extra_info,
        prompt=sample.messages,
    )


def _score(pool: RewardPool, attempts: Sequence[Attempt], num_workers: int) -> list[Scored]:
    """Score as many at once as there are workers, so that each call's own time is known."""
    lock = threading.Lock()

    def score(attempt: Attempt) -> Scored:
        with lock:
            started = time.monotonic()
            job = pool.submit([attempt.request])
        job.poll(None)
        return Scored(attempt, job.results[0], time.monotonic() - started)

    with ThreadPoolExecutor(num_workers) as threads:
        return list(threads.map(score, attempts))


def _print_table(scored: Sequence[Scored]) -> None:
    kinds = dict.fromkeys(one.attempt.kind for one in scored)
    header = ("number", "mean", "least", "most", "failed", "ms a call", "slowest ms")
    print(f"{'response':<18}" + "".join(f"{name:>12}" for name in header))
    for kind in kinds:
        some = [one for one in scored if one.attempt.kind == kind]
        scores = [one.result.score for one in some if one.result.score is not None]
        times = [1000 * one.seconds for one in some]
        numbers = (
            [f"{sum(scores) / len(scores):.4f}", f"{min(scores):.4g}", f"{max(scores):.4g}"]
            if scores
            else ["-"] * 3
        )
        failed = sum(one.result.failed is not None for one in some)
        cells = [str(len(some)), *numbers, str(failed)]
        cells += [f"{sum(times) / len(times):.1f}", f"{max(times):.1f}"]
        print(f"{kind:<18.17}" + "".join(f"{cell:>12}" for cell in cells))
    every = {one.result.score for one in scored if one.result.score is not None}
    if len(every) == 1 and len(scored) > 1:
        print(f"every response scores {every.pop():g}: nothing could be learned from this reward")
    unscored = sum(one.result.score is None and one.result.failed is None for one in scored)
    if unscored:
        print(f"to {unscored} responses no function applies: a run masks such samples out")


def _print_failures(scored: Sequence[Scored]) -> None:
    failures = [one for one in scored if one.result.failed is not None]
    for one in failures[:MOST_SHOWN]:
        print(f"\n{one.attempt.row.where}, {one.attempt.kind}: {one.result.failed}")
        print(_shortened(repr(one.attempt.request.solution_str)))
        print(one.result.traceback.rstrip())
    if len(failures) > MOST_SHOWN:
        print(f"\nand {len(failures) - MOST_SHOWN} failures more")


def _print_examples(scored: Sequence[Scored]) -> None:
    """The first of each score that occurs, highest first."""
    first: dict[float, Scored] = {}
    for one in scored:
        if one.result.score is not None:
            first.setdefault(one.result.score, one)
    for score in sorted(first, reverse=True)[:MOST_SHOWN]:
        one = first[score]
        extra = ", ".join(f"{name} {value:g}" for name, value in one.result.extra.items())
        print(f"\nscores {score:g}{f' ({extra})' if extra else ''}: {one.attempt.row.where}")
        print(f"    response     {_shortened(repr(one.attempt.request.solution_str))}")
        print(f"    ground truth {_shortened(repr(one.attempt.request.ground_truth))}")


def _shortened(text: str) -> str:
    half = MOST_LETTERS // 2
    return text if len(text) <= MOST_LETTERS else f"{text[:half]} ... {text[-half:]}"


if __name__ == "__main__":
    sys.exit(main())
