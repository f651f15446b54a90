"""Presets with one random edit: a configuration whose values are as documented, or problems."""

import json
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from ppo.check.preflight import problems_of, report
from ppo.config import ConfigError, load_config, values_of
from ppo.config.schema import schema
from ppo.config.text import Plain, parse
from tests.ppo.config.test_presets import CONFIGS, annotated_lines

ODD = [
    *("", "''", "' '", "~", "true", "no", "x", "é", "'1'", "-", ".inf", "-.inf", ".nan", "inf"),
    *("-1", "0", "1", "2", "1.5", "1e999", "-1e999", "1e-400", "9" * 40, "0x10", "010", "1_000"),
    *("[]", "{}", "[1, 2]", "[[1]]", "[~]", "['']", "[.nan]", "[a, b]", "[x, x]", "{a: 1}"),
    *("{a: {b: []}}", "12:30:45", "2026-01-01"),
]
FACTORS = (-1, 0, 0.5, 2, 1e-3, 1e3, 1e-9, 1e9, 1e300)
PRESETS = sorted([*CONFIGS.glob("*po*.yaml"), *CONFIGS.glob("*/*.yaml")])
Tree = dict[str, Any]


def written(value: Any) -> str:
    """A tree as YAML in one line; what is Plain stands as it is."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    return value if isinstance(value, Plain) else json.dumps(value)


def keys_of(tree: Tree, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key and section of a file."""
    for name, value in tree.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from keys_of(value, (*above, name))


def edited(tree: Tree, rng: random.Random) -> tuple[str, Any]:
    """Edit the tree; the key that was edited and what stands there now."""
    known = [tuple(path.split(".")) for path in schema()]
    *above, leaf = rng.choice(known if rng.random() < 0.6 else list(keys_of(tree)))
    node = tree
    for name in above:
        node[name] = node = dict(node[name]) if isinstance(node.get(name), dict) else {}
    path, old = ".".join([*above, leaf]), node.get(leaf)
    usual = schema()[path].default if old is None and path in schema() else old
    match rng.choice(("drop", "odd", "odd", "odd", "scale", "scale", "sink", "lift")):
        case "drop":
            node.pop(leaf, None)
        case "odd":
            node[leaf] = Plain(rng.choice(ODD))
        case "scale":
            number = re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", str(usual))
            node[leaf] = Plain((float(number[0]) if number else 1.0) * rng.choice(FACTORS))
        case "sink":
            node[leaf] = {leaf: old or Plain("1")}
        case "lift" if above:
            tree[leaf] = node.pop(leaf, Plain("1"))
    return path, node.get(leaf)


def documented(path: str) -> str:
    """What configs/ppo.yaml says of a key, or of the one that it follows."""
    key = schema()[path]
    return documented(key.derive.paths[0]) if key.is_inherited and key.derive else SAID[path]


SAID = {path: said for path, _, said in annotated_lines((CONFIGS / "ppo.yaml").read_text())}
RANGE = re.compile(r"\((above )?(-?[\d.e-]+)(?: to |, )(below )?(-?[\d.e-]+)")


def is_as_documented(path: str, value: Any) -> bool:
    """Whether each number is in the range that is written beside its key, or named there."""
    numbers = value if isinstance(value, list) else [value]
    said = documented(path)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        bounds = re.findall(RANGE, said)
        if not bounds or not math.isfinite(number):
            return False
        above, low, below, high = bounds[-1]
        inside = float(low) <= number <= float(high)
        inside &= not (above and number == float(low)) and not (below and number == float(high))
        if not inside and f"{number:g} = " not in said:
            return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_an_edited_preset_is_as_documented_or_refused_without_a_traceback(tmp_path, capsys, seed):
    rng, file, accepted = random.Random(seed), tmp_path / "edited.yaml", 0
    for _ in range(75):
        preset = rng.choice(PRESETS)
        tree = parse(preset.read_text())
        path, given = edited(tree, rng)
        file.write_text(written(tree))
        case = f"{preset.name}: {path} = {given}"
        try:
            config = load_config(file)
        except ConfigError as error:
            assert all(len(line) < 1200 for line in str(error).splitlines()), case
            continue
        if not problems_of(config):
            code = report(config, verbose=False)
            said = capsys.readouterr()
            assert code == (2 if "problem" in said.err else 0), (case, said.err)
            assert "nan" not in said.out, case
            accepted += code == 0
        values = values_of(config)
        assert not [key for key, value in values.items() if not is_as_documented(key, value)], case
        if isinstance(given, Plain) and isinstance(values.get(path), float):
            assert float(given.strip("'") or values[path]) == values[path], case
    assert accepted > 5


def test_the_documentation_of_a_range_is_understood():
    assert is_as_documented("actor.clip_ratio", 0.2) and not is_as_documented("actor.clip_ratio", 1)
    assert is_as_documented("rollout.top_k", -1) and not is_as_documented("rollout.top_k", 0)
    assert is_as_documented("critic.optim.betas", [0.9, 0.5])
    assert not is_as_documented("critic.optim.betas", [0.9, 1.0])
    assert not is_as_documented("actor.optim.lr", math.nan)
