"""Whether the rows hold what their rewards need: found at the start, with file and row.

Owns the comparison of data and rewards, which do not know each other. Must not know processes.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ppo.config import Config
from ppo.data.dataset import Prompt, facts_of
from ppo.data.prompts import PromptSets
from ppo.rewards.contract import RewardError, RewardRequest
from ppo.rewards.scorers import builtin

logger = logging.getLogger(__name__)


def reward_request(prompt: Prompt, text: str = "") -> RewardRequest:
    """A response to a prompt as the reward function gets it."""
    return RewardRequest(
        data_source=prompt.data_source,
        solution_str=text,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        prompt=prompt.messages,
    )


def checked_requests(
    config: Config, columns: frozenset[str], prompts: PromptSets
) -> list[RewardRequest]:
    """An empty response to the first prompt of each data source, when rows have been looked at.

    columns: that the functions cannot be called without. Raises RewardError.
    """
    check_columns(columns, prompts)
    requests = first_requests(prompts)
    if not config.uses_builtin:
        warn_of_null_truths(prompts)
        return requests
    concerns = None
    if not config.needs_data_source:  # the others' episodes score themselves
        concerns = builtin.has_scorer
        requests = [request for request in requests if concerns(request.data_source)]
    check_truths(prompts, config.reward.function.kwargs, concerns)
    return requests


def check_truths(
    prompts: PromptSets,
    kwargs: Mapping[str, Any],
    concerns: Callable[[str], bool] | None = None,
) -> None:
    """Each built-in scorer can compare with the ground truths of its rows. Raises RewardError.

    Args:
        kwargs: what the scorers are called with besides, reward.function.kwargs.
        concerns: whether a data source is looked at; None = all are.
    """
    first, count = None, 0
    for prompt in prompts.all():
        if concerns is not None and not concerns(prompt.data_source):
            continue
        try:
            builtin.check(prompt.data_source, prompt.ground_truth, prompt.extra_info, **kwargs)
        except RewardError as error:
            first, count = first or f"{place(prompt)}: {error}", count + 1
    if first is not None:
        raise RewardError(first + (f" (and {count - 1} rows more)" if count > 1 else ""))


def warn_of_null_truths(prompts: PromptSets) -> None:
    """Say that some rows have no ground truth and others do: a function may not expect it."""
    sets = [(rows, facts_of(rows)) for rows in prompts.sets()]
    lacking = sum(facts.num_null_truths for _, facts in sets)
    total = sum(facts.num_prompts for _, facts in sets)
    if 0 < lacking < total:
        rows, facts = next((rows, facts) for rows, facts in sets if facts.num_null_truths)
        where = place(rows[facts.first_null_truth])
        logger.warning("%s: the ground truth is null, as in %d of %d rows", where, lacking, total)


def check_columns(columns: frozenset[str], prompts: PromptSets) -> None:
    """Rows give the columns that the functions cannot be called without. Raises RewardError.

    A row may lack what others of its data have: it gives null.
    """
    for number, rows in enumerate(prompts.sets()):
        name, found = "validation" if number else "training", facts_of(rows).columns
        if len(rows) and columns - found:
            lacking = ", ".join(map(repr, sorted(columns - found)))
            raise RewardError(
                f"reward.function: no column of the {name} data gives {lacking}, which it takes; "
                f"there are {', '.join(sorted(found | {'ground_truth', 'data_source'}))}"
            )


def first_requests(prompts: PromptSets) -> list[RewardRequest]:
    """An empty response to the first prompt of each data source, training and validation."""
    return [
        reward_request(rows[index])
        for rows in prompts.sets()
        for index in facts_of(rows).first_of_source.values()
    ]


def place(prompt: Prompt) -> str:
    """Where a prompt stands, for messages."""
    return prompt.where or f"prompt {prompt.uid}"


def describe(prompt: Prompt, text: str, failure: str | None) -> str:
    """A sample for people: where its prompt stands, the answer, the truth, and what went wrong."""
    lines = _lines(place(prompt), prompt.data_source, text, prompt.ground_truth)
    return "\n  ".join(lines if failure is None else [*lines, *failure.splitlines()])


def describe_row(row: Mapping[str, Any]) -> str:
    """The same of a sample that is a row of a samples file."""
    where = row["where"] or f"prompt {row['uid']}"
    return "\n  ".join(_lines(where, row["data_source"], row["response"], row["ground_truth"]))


def _lines(where: str, data_source: str, text: str, ground_truth: Any) -> list[str]:
    return [
        f"{where}, data_source {data_source!r}",
        f"response: {_shortened(text)}",
        f"ground truth: {_shortened(ground_truth)}",
    ]


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 500 else f"{text[:300]} ... {text[-200:]}"
