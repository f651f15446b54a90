"""How reward functions are found, called and read. Must not import torch, nor know processes.

verl's style: compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)
-> float | bool | {"score": ..., metrics}. trl's: f(prompts, completions, **columns) -> list, whose
None means that the function does not apply. Both may be async.
"""

import ast
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppo.plugin import PluginError, load_plugin, parse_plugin
from ppo.rewards.contract import Function, FunctionSettings, RewardError, RewardRequest
from ppo.rewards.scorers import builtin
from ppo.rewards.signature import accepted, check_signature, required_columns, signature_of

ANSWER = "pred"
"""entry of a returned dict, of verl's name: what the response answers, for votes"""
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


class Loaded(NamedTuple):
    """A function, imported."""

    function: Function
    call: Callable[..., Any]
    signature: inspect.Signature | None = None  # some functions of C extensions have none
    columns: frozenset[str] = frozenset()  # of the data, that it cannot be called without


class Scored(NamedTuple):
    """What was said about one sample."""

    score: float | None  # None: no function applies to it
    extra: Mapping[str, float] = {}
    answer: str | None = None


def functions_of(settings: FunctionSettings) -> list[Function]:
    """The functions of section `reward.function`; several files may share a name, and the reverse.

    Raises RewardError when the lists do not fit together.
    """
    paths, names = [None] if settings.path is None else settings.path, settings.name
    number = max(len(paths), len(names))
    weights = [1.0] * number if settings.weights is None else settings.weights
    if {len(paths), len(names)} - {1, number} or len(weights) != number or number == 0:
        raise RewardError(
            f"reward.function: {len(paths)} in path, {len(names)} in name and {len(weights)} in "
            "weights do not fit together: write one path, or one name, or as many of each"
        )
    paths = list(paths) * (number // len(paths))
    names = list(names) * (number // len(names))
    return [
        Function(path, name, settings.kwargs, settings.style, weight, label)
        for path, name, weight, label in zip(
            paths, names, weights, _labels(paths, names), strict=True
        )
    ]


def _labels(paths: Sequence[str | None], names: Sequence[str]) -> Sequence[str]:
    """A different label for each function, as short as can be."""
    stems = [Path(path or "").stem for path in paths]
    for labels in (names, [".".join(pair) for pair in zip(stems, names, strict=True)]):
        if len(set(labels)) == len(names):
            return labels
    return [f"{index}.{name}" for index, name in enumerate(names)]


def check_function(function: Function) -> None:
    """Check file, name and signature without running the file, in no time. Raises RewardError.

    A function that is decorated or imported there is checked when the workers load it.
    """
    if function.path is None:
        return
    try:
        node = parse_plugin(function.path, function.name)
    except PluginError as error:
        raise RewardError(f"reward.function: {error}") from error
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.decorator_list:
        check_signature(signature_of(node), function)


def load_function(function: Function) -> Loaded:
    """Import the function, or take the built-in one. Raises RewardError and what the file does."""
    if function.path is None:
        found: Callable[..., Any] = builtin.score_and_answer
    else:
        try:
            found = load_plugin(function.path, function.name)
        except PluginError as error:
            raise RewardError(f"reward.function: {error}") from error
    if not callable(found):
        raise RewardError(f"reward.function: {function.name} of {function.path} is no function")
    try:
        signature = inspect.signature(found)
    except ValueError:  # the probe will tell
        return Loaded(function, found)
    check_signature(signature, function)
    return Loaded(function, found, signature, required_columns(signature, function))


def call(loaded: Loaded, request: RewardRequest) -> Any | Awaitable[Any]:
    """Call the function for one sample; what it returns may have to be awaited."""
    function = loaded.function
    if function.style != "trl":
        return loaded.call(
            data_source=request.data_source,
            solution_str=request.solution_str,
            ground_truth=request.ground_truth,
            extra_info=request.extra_info,
            **function.kwargs,
        )
    completion: Any = request.solution_str
    if not isinstance(request.prompt, str):  # a conversation is answered with a conversation
        completion = [{"role": "assistant", "content": completion}]
    columns = {
        **dict.fromkeys(loaded.columns),  # a row without a column that others have
        **request.extra_info,
        "data_source": request.data_source,
        "ground_truth": request.ground_truth,
        "extra_info": request.extra_info,
        "reward_model": {"ground_truth": request.ground_truth},
    }
    arguments = {name: [value] for name, value in columns.items()}
    arguments |= {"prompts": [request.prompt], "completions": [completion]}
    if loaded.signature is not None:
        arguments = accepted(loaded.signature, arguments)
    return loaded.call(**arguments | function.kwargs)


def read(value: Any, function: Function) -> Scored:
    """Check what the function returned for one sample.

    Raises:
        RewardError: it has a wrong type.
        ValueError: the score is NaN or infinite, as float32.
    """
    name, extra, answer = function.name, {}, None
    if function.style == "trl":
        if isinstance(value, (str, dict)) or not hasattr(value, "__len__") or len(value) != 1:
            raise RewardError(
                f"{name} must return a list with one number per sample, not {value!r}"
            )
        value = value[0]
        if value is None:
            return Scored(None)
    elif isinstance(value, dict):
        if "score" not in value:
            keys = ", ".join(map(str, value)) or "nothing"
            raise RewardError(f'{name} returned a dict without "score"; it has {keys}')
        extra = {key: entry for key, entry in value.items() if key not in ("score", ANSWER)}
        value, answer = value["score"], _answer(value.get(ANSWER))
    if not _is_number(value):
        kind = type(value).__name__
        raise RewardError(f'{name} must return a float, a bool or a dict with "score", not {kind}')
    return Scored(_finite32(value, name), _metrics(extra), answer)


def _answer(entry: Any) -> str | None:
    """An answer as text that can be compared; a text without words is none."""
    if not isinstance(entry, str):
        entry = str(_item(entry)) if _is_number(entry) else ""
    return entry.strip().encode("utf-8", "backslashreplace").decode() or None


def combine(functions: Sequence[Function], scored: Sequence[Scored]) -> Scored:
    """The weighted sum over the functions that apply, as TRL sums; of several, each as a metric.

    Raises ValueError when the sum is infinite, as float32.
    """
    found = [(f, s, s.score) for f, s in zip(functions, scored, strict=True)]
    terms = [function.weight * score for function, _, score in found if score is not None]
    if not terms:
        return Scored(None)
    extra = dict(scored[0].extra)
    answer = next((one.answer for one in scored if one.answer is not None), None)
    if len(functions) > 1:
        extra = {function.label: score for function, _, score in found if score is not None}
        for function, one, _ in found:
            extra |= {f"{function.label}/{key}": number for key, number in one.extra.items()}
    return Scored(_finite32(sum(terms), "the sum of the functions"), extra, answer)


def _finite32(value: Any, what: str) -> float:
    try:
        score = float(_item(value))
    except OverflowError:  # a whole number of hundreds of digits
        score = math.inf
    if not abs(score) <= FLOAT32_MAX:
        raise ValueError(f"{what} returned {score}, which is no finite float32")
    return score


def _metrics(extra: Mapping[Any, Any]) -> dict[str, float]:
    """The finite numbers among the entries that came with a score, which they must not cost."""
    found: dict[str, float] = {}
    for key, value in extra.items():
        try:
            number = float(_item(value)) if _is_number(value) else math.nan
            name = str(key).encode("utf-8", "backslashreplace").decode()
        except Exception:  # objects of the user, with conversions of their own
            continue
        if math.isfinite(number):
            found[name] = number
    return found


def _is_number(value: Any) -> bool:
    """Python's numbers, bool, numpy's, and tensors of one element."""
    return isinstance(_item(value), numbers.Real)


def _item(value: Any) -> Any:
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1:
        return value.item()
    return value
