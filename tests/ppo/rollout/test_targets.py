"""Several checkpoints evaluated with one engine: each has the values that it has alone."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from ppo.config import ConfigError
from ppo.errors import InputError
from ppo.models.build import build_causal_lm
from ppo.models.tiny import build_tiny_model
from ppo.report.page import build_page
from ppo.report.record import load_records
from ppo.rollout.figures import summarise, table
from ppo.run.run import Run
from rollout import evaluate, load_evaluation, parse_options
from sharding.checkpoint import Checkpointer
from sharding.mesh import build_mesh, init_distributed
from tests.distributed import run_distributed

SAMPLING = (
    *("rollout.val_kwargs.n=2", "rollout.val_kwargs.temperature=1", "trainer.device=cpu"),
    *("data.max_response_length=6", "data.val_max_samples=3", "rollout.dtype=float32"),
)


def options_of(out: Path, *more: str):
    common = ["--config=ppo_tiny.yaml", "--data=tiny", f"--out={out}", *SAMPLING]
    return parse_options([*common, *more])


def evaluated(rank: int, world_size: int, jobs: list[tuple[str, ...]]) -> None:
    """Each job is an --out and more of the command line, one after the other on the same ranks."""
    for out, *more in jobs:
        options = options_of(Path(out), *more)
        config = load_evaluation(options, lambda config: [])
        mesh = build_mesh(config.dims(world_size, world_size), torch.device("cpu"))
        with Run(config, mesh, command=["test"]) as run:
            evaluate(config, run, options)


def alone(*jobs: tuple[str, ...]) -> None:
    with init_distributed(torch.device("cpu")):
        evaluated(0, 1, [*jobs])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run/ with checkpoints of steps 10 and 20, and the Hugging Face folders a and b."""
    folder = tmp_path_factory.mktemp("targets")
    for seed, name in enumerate(("a", "b")):
        model = build_tiny_model(folder / name)
        weights = load_file(model / "model.safetensors")
        torch.manual_seed(seed)
        changed = {name: x + 0.1 * torch.randn_like(x) for name, x in weights.items()}
        save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
    config = load_evaluation(options_of(folder / "x.parquet"), lambda config: [])
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(config.dims(1, 1), torch.device("cpu"))
        with Checkpointer(folder / "run" / "checkpoints", mesh) as checkpoints:
            for step, name in ((10, "a"), (20, "b")):
                module = build_causal_lm(
                    *(folder / name, mesh),
                    model_config=config.model,
                    fsdp_config=config.actor.fsdp,
                    checkpointing=False,
                    forward_only=False,
                    dtype=torch.float32,
                )
                checkpoints.save(step, {"actor": module}, {}, {})
    return folder


@pytest.fixture(scope="module")
def one(folder: Path) -> Path:
    """Where both steps are evaluated on one rank."""
    alone((f"{folder}/one.parquet", f"--checkpoint={folder / 'run'}", "--steps=20,10"))
    return folder


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def test_steps_and_folders_have_the_values_that_each_has_alone(one, tmp_path, caplog):
    caplog.set_level("INFO")
    folders = [f"--checkpoint={one / name}" for name in ("run", "a", "b")]
    alone((f"{tmp_path}/alone.parquet", folders[2]), (f"{tmp_path}/folders.parquet", *folders))
    first, second = (rows_of(one / f"one.step_000000{step}.parquet") for step in (10, 20))
    assert first != second == rows_of(tmp_path / "alone.parquet")
    assert [rows_of(tmp_path / f"folders.{name}.parquet") for name in ("a", "b", "run")] == [
        first, second, second
    ]  # fmt: skip
    figures = json.loads((one / "one.metrics.json").read_text())
    assert figures["step_00000020"] == json.loads((tmp_path / "alone.metrics.json").read_text())
    lines = next(m for m in caplog.messages if m.startswith("3 evaluated")).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["run", "a", "b"]
    assert "pass@2" in lines[1] and f"{summarise(second)['tiny'].mean_score:.3f}" in lines[3]

    (record,) = load_records([one / "one.run"])
    series = record.series["val-core/tiny/reward/mean@2"]
    assert list(series.steps) == [10, 20]
    assert series.last == figures["step_00000020"]["val-core/tiny/reward/mean@2"]
    assert "Validation: pass@k" in build_page([record])


@pytest.mark.distributed
def test_two_ranks_evaluate_as_one_does(one):
    run_distributed(evaluated, 2, [(f"{one}/two.parquet", f"--checkpoint={one / 'run'}",
                                    "--steps=all")])  # fmt: skip
    for step in (10, 20):
        mine, its = (rows_of(one / f"{n}.step_000000{step}.parquet") for n in ("one", "two"))
        assert mine == its and len(mine) == 6


def test_what_cannot_be_evaluated_is_refused_before_it_is_loaded(folder, tmp_path):
    def refused(*more: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_evaluation(options_of(tmp_path / "s.parquet", *more), lambda config: [])
        return str(caught.value)

    assert "neither a run" in refused(f"--checkpoint={tmp_path}")
    assert "of one run" in refused("--steps=all") and "of one run" in refused(
        "--steps=1", f"--checkpoint={folder / 'a'}"
    )
    with pytest.raises(ConfigError, match="invalid steps value"):
        options_of(tmp_path / "s.parquet", "--steps=x")
    with pytest.raises(InputError, match=r"--steps = \[15\].*it has 10, 20"):
        alone((f"{tmp_path}/s.parquet", f"--checkpoint={folder / 'run'}", "--steps=10,15"))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"is no adapter of peft: .*adapter_model"):
        alone((f"{tmp_path}/s.parquet", f"--checkpoint={tmp_path}"))


def test_another_model_is_not_taken_for_the_first_one(folder, tmp_path):
    other = build_tiny_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(InputError, match=r"rms_norm_eps differ; evaluate it alone"):
        alone((f"{tmp_path}/s.parquet", f"--checkpoint={folder / 'a'}", f"--checkpoint={other}"))
    assert (tmp_path / "s.a.parquet").is_file()  # what was done is kept


def test_a_table_has_a_column_for_what_any_of_them_has():
    def row(**more):
        return {"prompt_index": 0, "score": 1.0, "response_length": 3, "finish_reason": "stop",
                "data_source": "x", **more}  # fmt: skip

    answered = summarise([row(answer="4"), row(score=0.0, finish_reason="length")])
    assert table([("step_1", answered), ("b", summarise([row()]))]).splitlines() == [
        "        data source  prompts  failed  score  pass@1  pass@2    maj  length  clipped",
        "step_1  x                  1       0  0.500   0.500   1.000  1.000     3.0    0.500",
        "b       x                  1       0  1.000   1.000                    3.0    0.000",
    ]
