"""Rows in verl's format from what data sets hold: GSM8K, MATH, preference pairs, any JSONL.

Pure: records in, rows out. Reading and writing are prepare.py's.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ppo.rewards.scorers.math_answers import last_boxed

PreparedRow = dict[str, Any]
Message = dict[str, str]

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


class RecordError(ValueError):
    """A record does not hold what its kind should."""


def make_row(
    messages: Sequence[Message],
    *,
    data_source: str,
    ability: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    style: str = "rule",
) -> PreparedRow:
    """One row as verl writes it."""
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


def _field(record: Mapping[str, Any], name: str, index: int) -> Any:
    if record.get(name) is None:
        raise RecordError(f"record {index} has no '{name}'; it has {', '.join(record)}")
    return record[name]


def gsm8k_rows(records: Sequence[Mapping[str, Any]], split: str) -> Iterator[PreparedRow]:
    """From {question, answer}: the ground truth stands behind #### in the answer."""
    for index, record in enumerate(records):
        question, answer = _field(record, "question", index), _field(record, "answer", index)
        marked = re.search(r"####\s*(-?[\d.,]+)", answer)
        if marked is None:
            raise RecordError(f"record {index}: 'answer' has no number behind ####")
        yield make_row(
            ask(question, instruction=GSM8K_INSTRUCTION),
            data_source="openai/gsm8k",
            ability="math",
            ground_truth=marked[1].replace(",", ""),
            extra_info={"split": split, "index": index, "question": question, "answer": answer},
        )


def math_rows(records: Sequence[Mapping[str, Any]], split: str) -> Iterator[PreparedRow]:
    """From {problem, solution}: the ground truth is the last box; or from {problem, answer}."""
    for index, record in enumerate(records):
        problem = _field(record, "problem", index)
        truth = record.get("answer")
        if truth is None:
            truth = last_boxed(_field(record, "solution", index))
        if truth is None:
            raise RecordError(f"record {index}: 'solution' has no \\boxed answer")
        yield make_row(
            ask(problem, instruction=MATH_INSTRUCTION),
            data_source="DigitalLearningGmbH/MATH-lighteval",
            ability="math",
            ground_truth=str(truth),
            extra_info={"split": split, "index": index},
        )


def preference_rows(records: Sequence[Mapping[str, Any]], split: str) -> Iterator[PreparedRow]:
    """From {prompt, chosen, rejected}, or from {chosen, rejected} transcripts as in hh-rlhf.

    The ground truth is the chosen response; such rows are scored by a reward model or a function
    of the user.
    """
    for index, record in enumerate(records):
        chosen, rejected = _field(record, "chosen", index), _field(record, "rejected", index)
        prompt = record.get("prompt")
        if prompt is None:
            messages, chosen = split_transcript(chosen, index)
            rejected = split_transcript(rejected, index)[1]
        else:
            messages = ask(prompt) if isinstance(prompt, str) else prompt
            chosen, rejected = _response(chosen), _response(rejected)
        yield make_row(
            messages,
            data_source="preference",
            ability="alignment",
            ground_truth=chosen,
            extra_info={"split": split, "index": index, "chosen": chosen, "rejected": rejected},
            style="model",
        )


def _response(value: Any) -> str:
    """A response as text: it may be written as the messages that follow the prompt."""
    return value if isinstance(value, str) else value[-1]["content"]


def split_transcript(text: str, index: int) -> tuple[list[Message], str]:
    """Messages and last response of "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    parts = re.split(r"\n\n(Human|Assistant):", text)
    turns = list(zip(parts[1::2], parts[2::2], strict=True))
    if len(turns) < 2 or turns[-1][0] != "Assistant":
        raise RecordError(f"record {index} is no transcript that ends with the assistant")
    roles = {"Human": "user", "Assistant": "assistant"}
    messages = [{"role": roles[who], "content": said.strip()} for who, said in turns]
    return messages[:-1], messages[-1]["content"]


def jsonl_rows(
    records: Sequence[Mapping[str, Any]],
    split: str,
    *,
    prompt_key: str,
    answer_key: str,
    data_source: str,
    instruction: str = "",
    system: str = "",
) -> Iterator[PreparedRow]:
    """From any records with a question (text or messages) and, where it is known, its answer."""
    for index, record in enumerate(records):
        prompt = _field(record, prompt_key, index)
        if isinstance(prompt, str):
            prompt = ask(prompt, instruction=instruction, system=system)
        others = {k: v for k, v in record.items() if k not in (prompt_key, answer_key)}
        yield make_row(
            prompt,
            data_source=data_source,
            ability="",
            ground_truth=record.get(answer_key),
            extra_info={**others, "split": split, "index": index},
        )
