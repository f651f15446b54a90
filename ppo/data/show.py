"""Rows of data files as the model will see them, before anything is trained.

    python -m ppo.data.show data/gsm8k/train.parquet --config ppo.yaml
    python -m ppo.data.show mine.jsonl --config ppo.yaml --rows 10 data.prompt_key=question
    python -m ppo.data.show --config ppo.yaml                 # the configuration's own train_files

Prints the first rows with the chat template applied, special tokens in brackets and the number of
tokens; then, of all rows: lengths, what is left out, cut or wrong, and the batches of an epoch. The
tokenizer is that of the configuration; nothing else of the model is needed.

Owns what is printed. Which rows become prompts is reading.py's.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ppo.config import Config, load_config
from ppo.config.cli import build_parser, for_users, join_values
from ppo.data.columns import Sample, parse_row
from ppo.data.reading import TOKENIZE_ROWS, Split, check_ids, fitted, rows_of, tokenized
from ppo.data.rows import DataError, Row
from ppo.data.tokenizer import load_tokenizer, token_texts
from ppo.errors import InputError
from ppo.models.tiny import build_tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BINS = 12
BAR = 40
"""letters of the longest bar"""
MOST_PROBLEMS = 5
"""rows of each kind that are named"""
MOST_TOKENS = 1200
"""tokens of a row that are printed: of a longer one the first and the last"""


class Prepared(NamedTuple):
    """A row that can be read, as tokens."""

    row: Row
    sample: Sample
    ids: list[int]
    """uncut"""
    kept: list[int] | None
    """what the model gets; None = the row is left out"""


@dataclass
class Survey:
    """What is known of the rows so far."""

    lengths: list[int] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    without_truth: int = 0

    def add(self, found: Prepared) -> None:
        """Count a row."""
        self.lengths.append(len(found.ids))
        self.sources[found.sample.data_source] += 1
        self.without_truth += found.sample.ground_truth is None
        where = f"{found.row.where} ({len(found.ids)} tokens)"
        if found.kept is None:
            self.dropped.append(where)
        elif len(found.kept) < len(found.ids):
            self.cut.append(where)

    @property
    def num_kept(self) -> int:
        """Rows that become prompts."""
        return len(self.lengths) - len(self.dropped)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 when a row is wrong, or nothing can be read."""
    try:
        config, num_rows, split = _parse(sys.argv[1:] if arguments is None else arguments)
        print(f"reading the tokenizer of {config.model.tokenizer_path}", file=sys.stderr)
        tokenizer = _tokenizer(config)
        survey = Survey()
        for number, found in enumerate(_prepared(config, tokenizer, split, survey)):
            if number < num_rows:
                _print_row(found, tokenizer, colour=sys.stdout.isatty())
            survey.add(found)
    except InputError as error:
        print(f"{error}", file=sys.stderr)
        return 2
    _print_survey(survey, config, split)
    return 2 if survey.wrong or not survey.num_kept else 0


def _parse(arguments: Sequence[str]) -> tuple[Config, int, Split]:
    parser = build_parser("Show rows as the model will see them.")
    parser.prog = "python -m ppo.data.show"
    parser.usage = "%(prog)s [FILE ...] --config FILE [options] [key.sub=value ...]"
    parser.description = for_users(__doc__)
    parser.add_argument("--rows", type=int, default=3, help="rows that are printed (3)")
    parser.add_argument("--split", choices=("train", "val"), default="train", help="of --config")
    options, rest = parser.parse_known_args(list(arguments))
    files = [word for word in rest if "=" not in word and not word.startswith(("-", "+", "~"))]
    overrides = join_values([word for word in rest if word not in files])
    name = "train_files" if options.split == "train" else "val_files"
    if files:
        overrides.append(f"data.{name}={json.dumps(files)}")
    config = load_config(options.config, overrides)
    if not getattr(config.data, name):
        raise DataError(f"data.{name}", "none given: name files, or set it in the configuration")
    if config.data.custom_cls.path is not None:
        raise InputError("data.custom_cls makes prompts of its own: only rows of files are shown")
    return config, options.rows, options.split


def _tokenizer(config: Config) -> "PreTrainedTokenizerBase":
    model = config.model
    if model.tokenizer_path == "tiny":
        tokenizer = build_tiny_tokenizer()
        tokenizer.chat_template = model.custom_chat_template or tokenizer.chat_template
        return tokenizer
    return load_tokenizer(
        model.tokenizer_path,
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
    )


def _prepared(
    config: Config, tokenizer: "PreTrainedTokenizerBase", split: Split, survey: Survey
) -> Iterator[Prepared]:
    """Rows that can be read; what is wrong with the others goes into the survey."""
    data = config.data
    files = data.train_files if split == "train" else data.val_files
    rows = rows_of(files, data, split)
    while chunk := list(islice(rows, TOKENIZE_ROWS)):
        parsed = []
        for row in chunk:
            try:
                sample = parse_row(row, data, need_data_source=config.needs_data_source)
                parsed.append((row, sample))
            except DataError as error:
                survey.wrong.append(str(error))
        yield from _tokens(parsed, tokenizer, config, survey)


def _tokens(
    parsed: Sequence[tuple[Row, Sample]],
    tokenizer: "PreTrainedTokenizerBase",
    config: Config,
    survey: Survey,
) -> Iterator[Prepared]:
    data = config.data
    try:
        found = tokenized(parsed, tokenizer, data)
    except DataError as error:
        if len(parsed) == 1:
            survey.wrong.append(str(error))
            return
        for one in parsed:  # which of them?
            yield from _tokens([one], tokenizer, config, survey)
        return
    for (row, sample), ids in zip(parsed, found, strict=True):
        try:
            check_ids(ids, row, tokenizer, data, None)
            yield Prepared(row, sample, ids, fitted(ids, row, data))
        except DataError as error:
            survey.wrong.append(str(error))


def _print_row(found: Prepared, tokenizer: "PreTrainedTokenizerBase", *, colour: bool) -> None:
    sample = found.sample
    state = "left out" if found.kept is None else f"{len(found.kept)} tokens"
    if found.kept is not None and len(found.kept) < len(found.ids):
        state += f", cut from {len(found.ids)}"
    truth = _shortened(repr(sample.ground_truth), 200)
    print(f"--- {found.row.where}: {state}")
    print(f"    data_source {sample.data_source!r}, ground truth {truth}")
    print(visible(found.ids if found.kept is None else found.kept, tokenizer, colour=colour))
    if sample.extra_info:
        pairs = (f"{name}={_shortened(repr(v), 60)}" for name, v in sample.extra_info.items())
        print(f"    extra_info {_printable(', '.join(pairs))}")
    print()


def visible(
    ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase", *, colour: bool = False
) -> str:
    """The text of the tokens with special ones in brackets (inverse on a terminal).

    What a terminal would act on is replaced, but for line breaks.
    """
    known: Any = tokenizer  # whose own types do not know the method
    special = {*known.all_special_ids, *known.get_added_vocab().values()}
    left, right = ("\x1b[7m", "\x1b[0m") if colour else ("[", "]")
    middle = len(ids) - MOST_TOKENS
    parts = []
    for index, (token, text) in enumerate(zip(ids, token_texts(tokenizer, ids), strict=True)):
        if middle > 0 and MOST_TOKENS // 2 <= index < MOST_TOKENS // 2 + middle:
            if index == MOST_TOKENS // 2:
                parts.append(f"\n... {middle} tokens ...\n")
            continue
        text = _printable(text)
        parts.append(f"{left}{text}{right}" if token in special else text)
    return "".join(parts)


def _print_survey(survey: Survey, config: Config, split: Split) -> None:
    data, lengths = config.data, survey.lengths
    if lengths:
        ordered = sorted(lengths)
        shares = {q: ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.5, 0.99)}
        print(
            f"{len(lengths)} rows, tokens of a prompt: {ordered[0]} to {ordered[-1]}, median "
            f"{shares[0.5]}, 99 % within {shares[0.99]}"
        )
        print("\n".join(histogram(lengths, mark=data.max_prompt_length)))
    sources = ", ".join(f"{name!r} {number}" for name, number in survey.sources.most_common(20))
    if sources:
        print(f"data sources: {_printable(sources)}")
    if survey.without_truth:
        print(f"without a ground truth: {survey.without_truth}")
    limit = f"data.max_prompt_length = {data.max_prompt_length}"
    _print_places(survey.dropped, f"left out, longer than {limit} (data.filter_overlong_prompts)")
    _print_places(survey.cut, f"cut to {limit} (data.truncation = {data.truncation})")
    _print_places(survey.wrong, "wrong: a run would refuse them")
    if split == "train":
        _print_batches(survey.num_kept, config)


def _print_batches(num_prompts: int, config: Config) -> None:
    size, data = config.data.train_batch_size, config.data
    batches, rest = divmod(num_prompts, size)
    if num_prompts < size and data.drop_last:
        print(
            f"{num_prompts} prompts are fewer than data.train_batch_size = {size}: add data, lower "
            "it, or set data.drop_last=false"
        )
        return
    more = ""
    if rest:
        fate = "are not used (data.drop_last)" if data.drop_last else "make a smaller batch"
        more = f"; the last {rest} of each epoch's order {fate}"
    print(f"{num_prompts} prompts: {batches} batches of {size} in an epoch{more}")


def _print_places(places: Sequence[str], what: str) -> None:
    if not places:
        return
    print(f"{len(places)} {what}:")
    for place in places[:MOST_PROBLEMS]:
        print(f"    {_printable(place)}")
    if len(places) > MOST_PROBLEMS:
        print(f"    and {len(places) - MOST_PROBLEMS} more")


def histogram(lengths: Sequence[int], *, mark: int) -> list[str]:
    """Lengths as lines of text; a bin that begins beyond `mark` is marked."""
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // BINS))
    counts = Counter((length - low) // width for length in lengths)
    most = max(counts.values())
    lines = []
    for number in range(max(counts) + 1):
        start, count = low + number * width, counts[number]
        bar = "#" * -(-count * BAR // most)
        note = " too long" if start > mark else ""
        lines.append(f"{start:>8} to {start + width - 1:<8} {count:>8} {bar}{note}")
    return lines


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "\u00b7" for c in text)


def _shortened(text: str, most: int) -> str:
    text = _printable(text)
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


if __name__ == "__main__":
    sys.exit(main())
