"""Every file in configs/ loads, and ppo.yaml is the reference of all keys."""

import re
from pathlib import Path

import pytest

from ppo.config import load_config
from ppo.config.reference import reference
from ppo.config.schema import flatten, schema
from ppo.config.text import parse
from ppo.config.values import coerce

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
IN_FOLDERS = [path for name in ("tiny", "episodes") for path in (CONFIGS / name).glob("*.yaml")]


def annotated_lines(text: str):
    """(dotted path, value as text, comment) of every key of ppo.yaml, in order."""
    sections: list[tuple[int, str]] = []
    comments: list[str] = []
    for line in text.splitlines():
        body, _, comment = line.partition("#")
        if not body.strip():
            comments = [*comments, comment.strip()] if comment else []
            continue
        indent = len(body) - len(body.lstrip())
        name, _, value = body.strip().partition(":")
        sections = [entry for entry in sections if entry[0] < indent]
        path = ".".join([*(entry[1] for entry in sections), name])
        if value.strip():
            yield path, value.strip(), " ".join([*comments, comment.strip()])
        else:
            sections.append((indent, name))
        comments = []


def test_ppo_yaml_is_what_the_command_writes():
    command = "python -m ppo.config reference > configs/ppo.yaml"
    written = (CONFIGS / "ppo.yaml").read_text(encoding="utf-8")
    assert written == reference(), f"run: {command}"
    assert command in written


def test_ppo_yaml_lists_every_key_with_its_default_and_a_comment():
    lines = list(annotated_lines((CONFIGS / "ppo.yaml").read_text()))
    assert [path for path, _, _ in lines] == list(schema())
    bare = load_config(None, ["model.path=tiny", "data.train_files=tiny"])
    for path, value, comment in lines:
        key = schema()[path]
        inherited = path.startswith(("ref.", "critic.", "reward.model.fsdp.")) and value == "null"
        assert comment or inherited, path
        if re.search(r"[(;] ?(default \S+|required)\)$", comment.strip()):
            continue
        if key.derive:
            assert value == "null", path
        else:
            assert coerce(parse(value), key.hint) == flatten(bare)[path], path


@pytest.mark.parametrize("path", sorted([*CONFIGS.glob("*po*.yaml"), *IN_FOLDERS]), ids=str)
def test_every_preset_loads_and_says_how_it_is_run(path):
    config = load_config(path)
    header = path.read_text().split("\n\n")[0]
    assert f"--config {path.relative_to(CONFIGS)}" in header
    assert "hardware" in header
    assert "data" in header
    if config.trainer.device != "cpu":
        assert "not run by us" in header
        nodes, ranks = config.check.nnodes, config.check.nproc_per_node
        assert f"--nproc_per_node={ranks} " in header
        assert nodes == 1 or f"--nnodes={nodes} " in header
        assert f"{config.check.device_memory_gib:g} GB" in header
        if path.name != "ppo.yaml":
            words = re.findall(r"^#   (\w+) ", header, re.MULTILINE)
            assert {"hardware", "data", "check", "train", "expect", "values", "run"} <= {*words}


def readme() -> str:
    return (CONFIGS / "README.md").read_text(encoding="utf-8")


def test_the_readme_lists_every_file():
    for path in [*CONFIGS.glob("*.yaml"), *IN_FOLDERS]:
        assert path.name in readme(), path.name


def test_the_thresholds_of_the_readme_are_those_of_alarms_and_guards():
    rows = [line.split("|")[1:4] for line in readme().partition("## Thresholds")[2].splitlines()]
    of_metric = {
        name: (alarm, guard)
        for metrics, alarm, guard in (row for row in rows if len(row) == 3)
        for name in re.findall(r"`([\w/]+)`", metrics)
    }
    config = load_config(None, ["model.path=tiny", "data.train_files=tiny"])
    for rule in config.trainer.alarms.rules():
        if rule.condition == "above":
            assert f"{rule.threshold:g}" in of_metric[rule.metric][0], rule
    for rule in config.guards.all_rules():
        if rule.condition == "above":
            assert f"{rule.threshold:g}" in of_metric[rule.metric][1], rule
