"""tests/gpu.sh: its trial without a GPU, and what is left of a part that fails or hangs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.__main__ import PARTS, main, table
from tests.gpu.parts import Options, Part, Row, run_part

SCRIPT = Path(__file__).with_name("gpu.sh")


@pytest.mark.distributed
def test_a_trial_runs_every_part_without_a_gpu(tmp_path):
    """So that a first run on a GPU does not end with a typing error."""
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    words = ["bash", str(SCRIPT), "--dry", "--out", str(tmp_path)]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    logs = "\n".join(path.read_text()[-1000:] for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert [part["name"] for part in parts] == [part.name for part in PARTS]
    assert all(part["state"] == "ok" and part["rows"] for part in parts)
    updates = next(part["rows"] for part in parts if part["name"] == "updates")
    assert [row["updated"] for row in updates] == ["actor", "critic"]
    assert (tmp_path / "results.md").read_text() in done.stdout


def fails(options: Options) -> Iterator[Row]:
    yield {"one": 1}
    raise ValueError("no such kernel")


def hangs(options: Options) -> Iterator[Row]:
    yield {"two": 2}
    subprocess.run(["sleep", "100"])


def test_a_part_that_fails_or_hangs_keeps_its_rows_and_nothing_of_it_is_left(tmp_path):
    options, started = Options(True, tmp_path), time.monotonic()
    failed = run_part(Part("fails", fails, 10), options, tmp_path, 10)
    hung = run_part(Part("hangs", hangs, 1), options, tmp_path, 0.5)
    assert time.monotonic() - started < 10
    assert (failed.state, failed.rows) == ("failed", [{"one": 1}])
    assert failed.error == "ValueError: no such kernel"
    assert (hung.state, hung.rows) == ("out of time", [{"two": 2}])
    assert "| fails | failed: ValueError: no such kernel |" in table([failed, hung])


def test_the_limits_of_all_parts_are_within_eight_minutes():
    assert sum(part.limit_s for part in PARTS) <= 480


def test_a_part_that_does_not_exist_is_refused_with_the_names_of_those_that_do(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--dry", "updats"])
    assert ended.value.code == 2
    assert "no part updats: there are machine, tests, agreement" in capsys.readouterr().err
