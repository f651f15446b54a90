"""Rows in verl's format from what data sets hold: GSM8K, MATH, preference pairs, TRL's columns, any
records.

Pure: records in, rows out. Reading and writing are __main__.py's and writing.py's.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ppo.data.rows import Row, kind_of
from ppo.rewards.contract import RewardError
from ppo.rewards.scorers import builtin
from ppo.rewards.scorers.math_answers import last_boxed

PreparedRow = dict[str, Any]
Message = dict[str, str]

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


PROMPT_OPTION = "--prompt_key or --map COLUMN=prompt"
ANSWER_OPTION = "--answer_key or --map COLUMN=ground_truth"


class Method(NamedTuple):
    """How answers are scored, and what each question asks for so that they can be."""

    data_source: str
    name: str | None  # of the method of that scorer, which rows carry
    instruction: str
    scored: str  # for the help


METHODS = {
    "exact": Method(
        *("exact_match", "exact", "Reply with only the final answer."),
        scored="the whole response is the answer",
    ),
    "last_number": Method(
        *("exact_match", "last_number", "Reply with the final answer as the last number."),
        scored="the last number of the response is the answer",
    ),
    "hashes": Method(
        "gsm8k", "strict", GSM8K_INSTRUCTION, scored="the number behind #### is the answer"
    ),
    "boxed": Method("math", None, MATH_INSTRUCTION, scored="the last \\boxed{} equals the answer"),
}


def make_row(
    messages: Sequence[Message],
    *,
    data_source: str,
    ability: str,
    ground_truth: str | None,
    extra_info: Mapping[str, Any],
    style: str = "rule",
) -> PreparedRow:
    """One row as verl writes it: the ground truth is text."""
    return {
        "data_source": data_source,
        "prompt": list(messages),
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": dict(extra_info),
    }


def ask(question: str, *, instruction: str = "", system: str = "") -> list[Message]:
    """A conversation of one question, with an instruction behind it."""
    content = f"{question} {instruction}" if instruction else question
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": content}]


def gsm8k_rows(records: Sequence[Row], split: str) -> Iterator[PreparedRow]:
    """From {question, answer}: the ground truth stands behind #### in the answer."""
    for index, record in enumerate(records):
        question, answer = _text(record, "question"), _text(record, "answer")
        marked = re.search(r"####\s*(-?[\d.,]+)", answer)
        if marked is None:
            raise record.error("has no number behind ####", "answer")
        yield make_row(
            ask(question, instruction=GSM8K_INSTRUCTION),
            data_source="openai/gsm8k",
            ability="math",
            ground_truth=marked[1].replace(",", ""),
            extra_info={"split": split, "index": index, "question": question, "answer": answer},
        )


def math_rows(records: Sequence[Row], split: str) -> Iterator[PreparedRow]:
    """From {problem, solution}: the ground truth is the last box; or from {problem, answer}."""
    for index, record in enumerate(records):
        problem = _text(record, "problem")
        if record.values.get("answer") is not None:
            truth = _truth(record, "answer")
        else:
            truth = last_boxed(_text(record, "solution"))
        if truth is None:
            raise record.error("has no \\boxed answer", "solution")
        yield make_row(
            ask(problem, instruction=MATH_INSTRUCTION),
            data_source="DigitalLearningGmbH/MATH-lighteval",
            ability="math",
            ground_truth=truth,
            extra_info={"split": split, "index": index},
        )


def preference_rows(records: Sequence[Row], split: str) -> Iterator[PreparedRow]:
    """From {prompt, chosen, rejected}, or from {chosen, rejected}: transcripts as in hh-rlhf, or
    messages that begin with the prompt, as TRL has them.

    The ground truth is the chosen response; such rows are scored by a reward model or a function
    of the user.
    """
    for index, record in enumerate(records):
        prompt = record.values.get("prompt")
        if prompt is None:
            messages, chosen = _split_conversation(record, "chosen")
            rejected = _split_conversation(record, "rejected")[1]
        else:
            messages = ask(prompt) if isinstance(prompt, str) else prompt
            chosen, rejected = _response(record, "chosen"), _response(record, "rejected")
        yield make_row(
            messages,
            data_source="preference",
            ability="alignment",
            ground_truth=chosen,
            extra_info={"split": split, "index": index, "chosen": chosen, "rejected": rejected},
            style="model",
        )


class Columns(NamedTuple):
    """Which columns of any records are what."""

    prompt: str = "prompt"
    """text, or messages"""
    answer: str = "answer"
    """empty = there are no answers"""
    data_source: str | None = None
    """None = the same for all rows"""
    system: str | None = None
    """of each row's system message"""
    renamed: Mapping[str, str] = {}
    """other columns -> their names in extra_info"""


def any_rows(
    records: Sequence[Row],
    split: str,
    *,
    columns: Columns,
    data_source: str,
    method: str | None = None,
    instruction: str = "",
    system: str = "",
) -> Iterator[PreparedRow]:
    """From any records with a question (text or messages) and its answer.

    Every column stays in extra_info, for rewards that take columns by name.

    Args:
        method: of the scorer of the data source.
    """
    answer_key, source = columns.answer, data_source
    _check_columns(records, columns)
    kinds = {type(record.values.get(answer_key)) for record in records}
    for index, record in enumerate(records):
        prompt = _field(record, columns.prompt, PROMPT_OPTION)
        if isinstance(prompt, str):
            head = _text(record, columns.system) if columns.system else system
            prompt = ask(prompt, instruction=instruction, system=head)
        truth = _truth(record, answer_key, ANSWER_OPTION) if answer_key else None
        values = {columns.renamed.get(name, name): x for name, x in record.values.items()}
        extra = {"split": split, "index": index} | values
        extra.pop("prompt", None)
        if len(kinds) > 1 and answer_key:  # a column of a parquet file has one type
            extra[answer_key] = truth
        if columns.data_source:
            source = _text(record, columns.data_source)
        if method is not None:
            is_list = method == "exact" and isinstance(record.values[answer_key], list)
            extra["method"] = "one_of" if is_list else method
        if answer_key:
            _check_truth(record, answer_key, source, truth, extra)
        yield make_row(prompt, data_source=source, ability="", ground_truth=truth, extra_info=extra)


def _check_columns(records: Sequence[Row], columns: Columns) -> None:
    """A column that is renamed is one of some record: else its name is misspelt."""
    known = {name for record in records for name in record.values}
    for name in columns.renamed:
        if records and name not in known:
            raise records[0].error(f"--map: no record has it; there is {', '.join(known)}", name)


def trl_rows(records: Sequence[Row], split: str, **options: Any) -> Iterator[PreparedRow]:
    """From {prompt, solution} as TRL's data sets have them; `solution` stays, for TRL's functions.

    Where the scorer is that of MATH, the ground truth is the last box of the solution, or what
    stands between its dollars.
    """
    columns = Columns("prompt", "solution")
    for row in any_rows(records, split, columns=columns, **options):
        if row["data_source"] == METHODS["boxed"].data_source:
            truth = row["reward_model"]["ground_truth"]
            row["reward_model"]["ground_truth"] = last_boxed(truth) or truth.strip().strip("$")
        yield row


def _check_truth(
    record: Row, answer_key: str, data_source: str, truth: str | None, extra: Mapping[str, Any]
) -> None:
    try:
        builtin.scorer_of(data_source)
    except RewardError:  # a function of the user will score
        return
    try:
        builtin.check(data_source, truth, extra)
    except RewardError as error:
        raise record.error(f"cannot be scored by {data_source}: {error}", answer_key) from error


def _field(record: Row, name: str, option: str = "") -> Any:
    if record.values.get(name) is None:
        what = "is null" if name in record.values else "is missing"
        advice = f"; name the column with {option}" if option else ""
        found = ", ".join(record.values) or "nothing"
        raise record.error(f"{what}{advice}; the record has {found}", name)
    return record.values[name]


def _text(record: Row, name: str) -> str:
    value = _field(record, name)
    if not isinstance(value, str):
        raise record.error(f"must be text, not {kind_of(value)}", name)
    return value


def _truth(record: Row, name: str, option: str = "") -> str:
    """The answer as text; what is no text is written as JSON: 76, true, ["a", "b"]."""
    value = _field(record, name, option)
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:  # bytes, dates, NaN
        raise record.error(f"{value!r} is neither text nor JSON", name) from error


def _response(record: Row, name: str) -> str:
    """A response as text: it may be written as the messages that follow the prompt."""
    value = _field(record, name)
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    if not isinstance(value, str):
        raise record.error("must be text, or messages that end with the response", name)
    return value


def _split_conversation(record: Row, name: str) -> tuple[list[Message], str]:
    """Messages before the last response, and that response."""
    value = _field(record, name)
    if not isinstance(value, list):
        return _split_transcript(record, name)
    response = _response(record, name)
    if len(value) < 2:
        raise record.error("begins with the response, and there is no column 'prompt'", name)
    return value[:-1], response


def _split_transcript(record: Row, name: str) -> tuple[list[Message], str]:
    """Messages and last response of "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    parts = re.split(r"\n\n(Human|Assistant):", _text(record, name))
    turns = list(zip(parts[1::2], parts[2::2], strict=True))
    if len(turns) < 2 or turns[-1][0] != "Assistant":
        raise record.error("is no transcript that ends with the assistant", name)
    roles = {"Human": "user", "Assistant": "assistant"}
    messages = [{"role": roles[who], "content": said.strip()} for who, said in turns]
    return messages[:-1], messages[-1]["content"]
