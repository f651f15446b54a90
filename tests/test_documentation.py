"""What is documented is true: commands are accepted, programs explain themselves, links lead
somewhere. The long commands run in the full tier."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import memory_table
from tests.documented import (
    ROOT,
    Command,
    check_command,
    commands_in,
    commands_of,
    documents,
    help_of,
    programs,
)

PAGES = [path for path in documents() if path.suffix == ".md"]


def wrong(commands: list[Command]) -> list[str]:
    problems = []
    for command in commands:
        try:
            check_command(command)
        except Exception as error:  # of any kind: all are listed
            problems.append(f"{command.where}: {command.text}\n    {error}")
    return problems


def test_commands_of_the_documentation_are_accepted_by_their_programs() -> None:
    found = [command for path in documents() for command in commands_of(path)]
    assert len(found) > 60
    assert wrong(found) == []


def test_a_command_that_is_wrong_is_found() -> None:
    for text in (
        "python train_ppo.py --config ppo_tiny.yaml actor.optim.lrr=1",
        "python train_ppo.py --config nosuch.yaml --check",
        "torchrun --nproc_per_node=2 nosuch.py --config ppo.yaml",
        "python -m ppo.report RUN --port 80",
        "python -m ppo.data.prepare jsonl --outt x",
        "bash launch/nosuch.sh",
        "bash tests/run.sh --fulll",
        "sbatch --nodes=4 launch/slurm/ppo.sbatch ppo.yaml trainer.sede=1",
        "pip install -e .[nosuch]",
    ):
        assert wrong([Command("here:1", text)]), text
    page = "    X=1 python a.py \\\n        --b c  # d\n\ntext `bash e\nf` text"
    assert [c.words for c in commands_in(page, "x")] == [["python", "a.py", "--b", "c"]]


BENCHMARKS = [  # import much
    pytest.param(name, marks=pytest.mark.full) for name in programs() if "benchmarks" in name
]


@pytest.mark.parametrize("program", [n for n in programs() if "benchmarks" not in n] + BENCHMARKS)
def test_a_program_explains_itself_with_an_example_that_it_accepts(program: str) -> None:
    said = help_of(program)
    called = program if program.endswith(".py") else f"-m {program}"
    usage, _, rest = said.partition("\n\n")
    assert usage.startswith(f"usage: {'python ' if '-m' in called else ''}{called}"), usage
    examples = [c for c in commands_in(rest, program) if called in c.text]
    assert examples, f"--help of {program} has no example"
    assert wrong(examples) == []
    assert "Owns " not in said and "Must not know" not in said


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"", text):
        link = "".join(target)
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        place = (path.parent / file).resolve() if file else path
        assert place.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", place.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, link


def test_a_folder_s_readme_names_its_files() -> None:
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if page.parent in (ROOT, ROOT / "tests") or page.name != "README.md":
            continue
        for file in page.parent.glob("*.py"):
            if file.name != "__init__.py" and not re.search(rf"\b{file.stem}\b", text):
                missing.append(str(file.relative_to(ROOT)))
    assert missing == []


def clean_clone(folder: Path) -> dict[str, str]:
    """A checkout of what is committed here, and an environment in which `python` is this one."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def shell(script: str, folder: Path, environment: dict[str, str]) -> str:
    """What it says; its exit code is 0."""
    command = ["bash", "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{script}\n{said}"
    return said


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("page", "section"),
    [
        ("README.md", "## Your own data, reward and configuration"),
        ("configs/examples/README.md", "# Your own data"),
    ],
)
def test_the_first_steps_run_as_they_are_written(tmp_path: Path, page: str, section: str) -> None:
    folder = tmp_path / "clone"
    environment = clean_clone(folder)
    text = (folder / page).read_text(encoding="utf-8")
    text = text[text.index(section) :].partition("\n## ")[0]
    commands = commands_in(text, page)
    assert len(commands) >= 7
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command.text],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command.text}\n{done.stdout}\n{done.stderr}"
    rows = (folder / "runs/letters/metrics.jsonl").read_text().splitlines()
    scores = {row["step"]: row.get("critic/score/mean") for row in map(json.loads, rows)}
    assert max(scores) == 18 and scores[18] > 0.05 > scores[1]
    assert (folder / "runs/letters/report.html").stat().st_size > 10_000


@pytest.mark.full
def test_the_table_of_memory_is_what_check_predicts() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\n".join(memory_table.table()) in readme, "run: python -m tests.memory_table"


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_a_clean_clone_installs_and_trains_on_each_python(tmp_path: Path, version: str) -> None:
    """Without extras, in a new environment; what pip is told (an index, links) is the caller's."""
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    for python in filter(None, (*map(str, pyenv), shutil.which(f"python{version}"))):
        if subprocess.run([python, "-m", "venv", "-h"], capture_output=True).returncode == 0:
            break
    else:
        pytest.skip(f"no Python {version} with venv on this machine")
    folder = tmp_path / "clone"
    environment = clean_clone(folder) | {"VENV": str(tmp_path / "venv"), "PYTHON": python}
    del environment["PYTHONPATH"]
    script = """set -eu
. launch/environment.sh
VENV_BIN=$VENV/bin VENV_PYTHON=$VENV/bin/python
make_venv
has_gpu || install_cpu_torch
"$VENV_PYTHON" -m pip install -qq --no-compile -e .
"$VENV_PYTHON" train_ppo.py --config ppo_tiny.yaml trainer.total_training_steps=1
"""
    assert "done after step 1" in shell(script, folder, environment)
