"""The commands that documentation shows: of every README, preset and program, one by one.

Owns how they are found and what "accepted" means: the program's own parser takes the words, and the
configuration that they name loads with their overrides. A word in capitals stands for a path.
"""

import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from ppo.config import load_config
from ppo.config.cli import join_values

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ppo", "sharding", "configs", "launch", "tests")
STARTERS = ("python", "torchrun", "bash", "sbatch", "pip", "launch/local.sh")
PLACE = re.compile(r"\b[A-Z][A-Z_]+\b|\bmine\b")
"""stands for a path, a name, or a file of the reader's own"""
SUBCOMMANDS = ("ppo.data.prepare", "sharding.checkpoint")
"""programs whose first word has a --help of its own"""
OF_TORCHRUN = ("--nproc_per_node", "--nnodes", "--standalone", "--rdzv", "--master")


class Command(NamedTuple):
    """A command as it is written."""

    where: str
    """file and line"""
    text: str

    @property
    def words(self) -> list[str]:
        """As the shell sees them, without settings of variables before it and comments behind."""
        words = shlex.split(self.text, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        return words


def documents() -> list[Path]:
    """Every file that documents a command, but for programs."""
    pages = [path for name in FOLDERS for path in (ROOT / name).rglob("*.md")]
    presets = (ROOT / "configs").rglob("*.yaml")
    return sorted([*ROOT.glob("*.md"), *pages, *presets])


def programs() -> list[str]:
    """`train_ppo.py`, `ppo.report`, ...: what is started by a person."""
    found = ["train_ppo.py", "rollout.py"]
    for folder in ("ppo", "sharding", "tests/benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8"):
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found.append(name.removesuffix(".__main__"))
    # what a rank or another interpreter is told to do; ppo.rewards.try by its other name
    others = {"ppo.engines.sglang.host", "tests.benchmarks.trl_update", "ppo.check.try_reward"}
    return [name for name in found if name not in others]


def commands_of(path: Path) -> list[Command]:
    """Of a Markdown page, the header of a YAML file, or any other text."""
    text = path.read_text(encoding="utf-8")
    name = str(path.relative_to(ROOT))
    found = list(_lines(text, name, indent=4))
    if path.suffix == ".md":
        found += _inline(text, name)
    return found


def commands_in(text: str, name: str) -> list[Command]:
    """Of what --help prints."""
    return list(_lines(text, name, indent=0))


def _lines(text: str, name: str, *, indent: int) -> Iterator[Command]:
    """Lines that are commands, at least so far from the margin, or in the header of a YAML file."""
    header = r"|# +(?:\w+ {2,})?" if name.endswith(".yaml") else ""
    before = rf"^(?: {{{indent},}}{header})"
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        start = re.match(rf"{before}(?:[A-Z_]+=\S+ )*(\S+) ", line + " ")
        if start is None or start[1] not in STARTERS:
            continue
        command = re.sub(before, "", line)
        for more in lines[number:]:
            if not command.endswith("\\"):
                break
            command = command[:-1] + more.lstrip("# ")
        yield Command(f"{name}:{number}", command)


def _inline(text: str, name: str) -> Iterator[Command]:
    """`python -m ...` in a sentence, also over the end of a line."""
    prose = "\n".join("" if line.startswith("    ") else line for line in text.splitlines())
    for match in re.finditer(r"`((?:python|torchrun|bash|sbatch|pip) [^`]+)`", prose):
        number = prose[: match.start()].count("\n") + 1
        yield Command(f"{name}:{number}", " ".join(match[1].split()))


def check_command(command: Command) -> None:
    """Raise unless the program of the command accepts its words."""
    first, *rest = command.words
    if first == "pip":
        _check_pip(rest)
    elif first in ("bash", "sbatch") or first.endswith(".sh"):
        _check_script([first, *rest])
    elif first == "torchrun":
        while rest and rest[0].startswith(OF_TORCHRUN):
            rest.pop(0)
        _check_program(rest)
    else:
        _check_program(rest)


def _check_program(words: list[str]) -> None:
    """Words behind `python`."""
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
        return
    if words[0] == "-m":
        name, arguments = words[1], words[2:]
        if name in ("venv", "pip", "pytest") or PLACE.search(name):
            return
    else:
        name, arguments = words[0], words[1:]
        assert (ROOT / name).is_file(), f"no file {name}"
    options = {word.partition("=")[0] for word in arguments if re.match(r"--[a-z]\w+(=|$)", word)}
    if name.startswith("tests.benchmarks."):  # --help imports much: the options, as it names them
        shown = (ROOT / name.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    else:
        shown = help_of(name, *(arguments[:1] if name in SUBCOMMANDS else []))
    unknown = {option for option in options if option not in shown and "." not in option}
    assert not unknown, f"{name} has no {', '.join(sorted(unknown))}"
    if "--config" in arguments:
        config = arguments[arguments.index("--config") + 1]
        if not PLACE.search(config):
            load_config(config, ["data.train_files=tiny", *_overrides(arguments)])


def _overrides(arguments: list[str]) -> list[str]:
    return [word for word in join_values(arguments) if re.match(r"[a-z_]+\.[\w.]+=", word)]


def _check_script(words: list[str]) -> None:
    """`bash SCRIPT ...` and `sbatch [options] SCRIPT CONFIG ...`: a script says its own options."""
    scripts = [word for word in words if word.endswith((".sh", ".sbatch"))]
    assert scripts, words
    for word in scripts:
        assert (ROOT / word).is_file(), f"no file {word}"
    arguments = words[words.index(scripts[0]) + 1 :]
    configs = [word for word in arguments if word.endswith(".yaml")]
    for config in configs:
        load_config(config, _overrides(arguments))
    text = (ROOT / scripts[0]).read_text(encoding="utf-8")
    for word in arguments:
        if re.match(r"--[a-z]", word) and not configs:
            assert word in text, f"{scripts[0]} has no {word}"


def _check_pip(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.search(r"\.\[([\w,-]+)\]", " ".join(words))
    for extra in extras[1].split(",") if extras else ():
        assert extra in project["optional-dependencies"], f"pyproject.toml has no extra {extra}"


_HELP: dict[tuple[str, ...], str] = {}


def help_of(program: str, *subcommand: str) -> str:
    """What `python -m PROGRAM [SUBCOMMAND] --help` prints; its exit code is 0."""
    key = (program, *subcommand)
    if key not in _HELP:
        _HELP[key] = run_here(program, *subcommand, "--help")
    return _HELP[key]


def run_here(program: str, *arguments: str, exit_code: int = 0) -> str:
    """What the program prints when it is run, in this process."""
    said, code = StringIO(), 0
    with redirect_stdout(said), patch.object(sys, "argv", [program, *arguments]):
        try:
            if program.endswith(".py"):
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
    assert code == exit_code, (program, arguments, code, said.getvalue())
    return said.getvalue()
