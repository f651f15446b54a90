"""The schema of a tool from its docstring (Google style) and types, as chat templates show it.

Owns the same rules as transformers' get_json_schema, which imports torch; a test compares them.
Must not know how tools are called.
"""

import inspect
import json
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

BASIC = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SECTION = re.compile(r"^\s*(Args|Returns|Raises):\s*", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s*(\w+):\s*(.*?)(?=^\s*\w+:|\Z)", re.MULTILINE | re.DOTALL)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def schema_of(function: Callable[..., Any], doc: str | None = None) -> dict[str, Any]:
    """A function or bound method as a tool. Raises ValueError, which names it and what it lacks.

    Args:
        doc: in the place of its docstring.
    """
    name = getattr(function, "__name__", "tool")
    doc = (doc or inspect.getdoc(function) or "").strip()
    if not doc:
        raise ValueError(f"the tool {name} has no docstring, which is what the model is told of it")
    what, arguments, returns = _sections(doc)
    try:
        hints = get_type_hints(function)
        parameters = inspect.signature(function).parameters
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(f"the tool {name}: its types cannot be read: {error}") from error
    parameters_schema: dict[str, Any] = {"type": "object", "properties": {}}
    required = []
    for key, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"the tool {name} takes *{key}: the model needs parameters with names")
        if key not in hints:
            raise ValueError(f"the tool {name}: its parameter {key} has no type")
        if parameter.default is parameter.empty:
            required.append(key)
        described = {**_of_type(hints[key], f"the tool {name}: parameter {key}")}
        parameters_schema["properties"][key] = _describe(described, arguments.get(key))
    if required:
        parameters_schema["required"] = required
    made = {"name": name, "description": what, "parameters": parameters_schema}
    if "return" in hints:
        returned = {**_of_type(hints["return"], f"the tool {name}: what it returns")}
        made["return"] = returned | ({"description": returns} if returns else {})
    return {"type": "function", "function": made}


def _sections(doc: str) -> tuple[str, dict[str, str], str]:
    """What comes first, the description of each argument, and of what is returned."""
    what, *parts = _SECTION.split(doc)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    found = _ARGUMENT.findall(sections.get("Args", ""))
    arguments = {key: re.sub(r"\s*\n+\s*", " ", text.strip()) for key, text in found}
    return what.strip(), arguments, sections.get("Returns", "").strip()


def _describe(schema: dict[str, Any], text: str | None) -> dict[str, Any]:
    if text is None:
        return schema
    choices = _CHOICES.search(text)
    if choices is not None:
        text = text[: choices.start()].strip()
        named = json.loads(choices[1])
        schema["enum"] = [each.strip() if isinstance(each, str) else each for each in named]
    return {**schema, "description": text}


def _of_type(hint: Any, where: str) -> dict[str, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin is None:
        return BASIC.get(hint, {"type": "object"}) if _is_hashable(hint) else {"type": "object"}
    if origin in (Union, types.UnionType):
        return _of_union([_of_type(arg, where) for arg in args if arg is not type(None)], args)
    if origin is Literal:
        kinds = list(dict.fromkeys(BASIC.get(type(arg), {}).get("type", "object") for arg in args))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(args)}
    if origin is list:
        return {"type": "array", "items": _of_type(args[0], where)}
    if origin is tuple and ... not in args:
        return {"type": "array", "prefixItems": [_of_type(arg, where) for arg in args]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_type(args[1], where)}
    raise ValueError(f"{where}: no schema for {hint}; use basic types, list, dict or Literal")


def _of_union(kinds: list[dict[str, Any]], args: tuple[Any, ...]) -> dict[str, Any]:
    if len(kinds) == 1:
        made = dict(kinds[0])
    elif all(kind.keys() == {"type"} and isinstance(kind["type"], str) for kind in kinds):
        names = sorted({kind["type"] for kind in kinds})
        made = {"type": names[0] if len(names) == 1 else names}
    else:
        made = {"anyOf": kinds}
    return made | ({"nullable": True} if type(None) in args else {})


def _is_hashable(hint: Any) -> bool:
    return getattr(type(hint), "__hash__", None) is not None
