"""Samples files, and rollout.py as a whole."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ppo.check.rules import check_config
from ppo.config import ConfigError
from ppo.data.tokenizer import load_tokenizer
from ppo.models.build import build_causal_lm
from ppo.models.tiny import build_tiny_model
from ppo.rollout.figures import metrics_of, summarise
from ppo.rollout.samples import write_samples
from ppo.rollout.scoring import RewardsFailed
from rollout import load_evaluation, main, parse_options
from sharding.checkpoint import Checkpointer
from sharding.mesh import build_mesh, init_distributed


def test_samples_are_written_whole_and_read_back(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "2+2?"}], "score": 1.0, "ground_truth": "4"},
        {"prompt": "plain", "score": None, "ground_truth": {"answer": 4}},
    ]
    write_samples(tmp_path / "deep" / "samples.parquet", rows)
    table = pq.read_table(tmp_path / "deep" / "samples.parquet").to_pylist()
    assert json.loads(table[0]["prompt"]) == rows[0]["prompt"]
    assert table[1] == {"prompt": "plain", "score": None, "ground_truth": '{"answer": 4}'}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["samples.parquet"]


def test_nothing_that_a_row_holds_costs_a_finished_evaluation(tmp_path):
    class Odd:
        def __str__(self) -> str:
            return "odd \ud800"

    circle: list[Any] = []
    circle.append(circle)
    truths = [5, "7/2", 10**30, None, True, {(1, 2): 3}, Odd(), circle, "half \ud800", 10**5000]
    rows = [{"score": 1, "uid": 0, "response": "a\udc00", "ground_truth": t} for t in truths]
    rows[3]["score"] = None
    for name in ("s.parquet", "s.jsonl"):
        write_samples(tmp_path / name, rows)
    table = pq.read_table(tmp_path / "s.parquet").to_pylist()
    assert [row["score"] for row in table] == [1.0, 1.0, 1.0, None, *[1.0] * 6]
    assert [row["ground_truth"] for row in table[:5]] == ["5", "7/2", str(10**30), None, "true"]
    assert table[8] == {
        "score": 1,
        "uid": 0,
        "response": "a\\udc00",
        "ground_truth": "half \\ud800",
    }
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text("utf-8").splitlines()]
    assert lines[:5] == rows[:5] and lines[8] == rows[8]
    assert [line["score"] for line in lines] == [row["score"] for row in rows]


def test_samples_are_json_lines_where_the_name_says_so(tmp_path):
    rows = [{"prompt": "é", "score": None, "ground_truth": {"answer": 4}}, {"prompt": "b"}]
    write_samples(tmp_path / "samples.jsonl", rows)
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows
    with pytest.raises(ConfigError, match=r"--out = '.*s\.csv': must end with"):
        load_evaluation(options_of(tmp_path, f"--out={tmp_path}/s.csv"), lambda config: [])


def options_of(folder: Path, *more: str):
    return parse_options(
        ["--config", "ppo_tiny.yaml", "--data", "tiny", "--out", f"{folder}/s.parquet", *more]
    )


def test_a_checkpoint_that_is_none_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"--checkpoint.*neither a run, nor a checkpoint"):
        load_evaluation(options_of(tmp_path, f"--checkpoint={tmp_path}"), lambda config: [])


def test_a_hugging_face_folder_becomes_the_model(tmp_path):
    folder = build_tiny_model(tmp_path / "model")
    options = options_of(tmp_path, f"--checkpoint={folder}", "rollout.val_kwargs.n=3")
    config = load_evaluation(options, lambda config: [])
    assert config.model.path == config.model.tokenizer_path == str(folder)
    assert config.rollout.val_kwargs.n == 3
    assert config.run_dir == tmp_path / "s.run"


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ((), 16),  # of the preset's validation
        (("data.val_max_samples=-1",), -1),
        (("data.train_max_samples=3",), 3),
        (("data.train_max_samples=30",), 16),
        (("data.val_max_samples=5", "data.train_max_samples=-1"), 5),
    ],
)
def test_an_evaluation_respects_the_limits_of_the_data(tmp_path, overrides, limit):
    config = load_evaluation(options_of(tmp_path, *overrides), lambda config: [])
    assert config.data.train_max_samples == limit


def test_a_run_that_watches_its_validation_can_be_evaluated(tmp_path):
    watched = ("trainer.early_stop.metric=val-core/tiny", "trainer.keep_best=val-core/tiny")
    check = partial(check_config, world_size=1, ranks_per_node=1)
    load_evaluation(options_of(tmp_path, *watched), check)


def evaluate_rows(folder: Path, data: Path, checkpoint: Path, *overrides: str) -> list[dict]:
    out = folder / f"{checkpoint.name}.parquet"
    code = main(
        [
            *("--config=ppo_tiny.yaml", f"--data={data}", f"--out={out}"),
            *(f"--checkpoint={checkpoint}", "rollout.val_kwargs.n=2", "trainer.device=cpu"),
            *("data.max_response_length=6", "data.val_batch_size=2", *overrides),
        ]
    )
    assert code == 0
    rows = pq.read_table(out).to_pylist()
    figures = json.loads(out.with_suffix(".metrics.json").read_text())
    assert figures == metrics_of(summarise(rows), 2)
    assert figures["val-core/tiny/reward/mean@2"] == sum(r["score"] for r in rows) / len(rows)
    return rows


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth == "b":
        raise ValueError("no such letter")
    return 1.0
"""


def test_an_evaluation_whose_rewards_fail_writes_its_samples_with_what_went_wrong(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": "x", "ground_truth": t}) + "\n" for t in "abaa")
    )
    out = tmp_path / "s.parquet"
    with pytest.raises(RewardsFailed, match=r"(?s)failed for 1 of 2 .*row 1 .*no such letter"):
        main(
            [
                *("--config=ppo_tiny.yaml", f"--data={tmp_path / 'p.jsonl'}", f"--out={out}"),
                *(f"reward.function.path={tmp_path / 'reward.py'}", "trainer.device=cpu"),
                *("data.max_response_length=3", "data.val_batch_size=2"),
            ]
        )
    rows = pq.read_table(out).to_pylist()
    assert [row["score"] for row in rows] == [1.0, None, None, None]
    assert rows[0]["failure"] is None and "no such letter" in rows[1]["failure"]
    assert all("not scored" in row["failure"] for row in rows[2:])
    assert all(row["response_length"] == 3 for row in rows)


def test_the_program_samples_from_a_hugging_face_folder_and_from_a_run(tmp_path):
    folder = build_tiny_model(tmp_path / "changed")
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    changed = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    data = tmp_path / "prompts.jsonl"
    texts = ["copy: a", "copy: bc", "copy: d"]
    data.write_text(
        "".join(
            json.dumps({"prompt": text, "data_source": "tiny", "ground_truth": "a"}) + "\n"
            for text in texts
        )
    )
    rows = evaluate_rows(tmp_path, data, folder)

    tokenizer: Any = load_tokenizer(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for index, text in enumerate(texts):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=False,
        )
        output = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        expected = tokenizer.decode(output, skip_special_tokens=True)
        mine = [row["response"] for row in rows if row["prompt_index"] == index]
        assert mine == [expected, expected]  # greedy

    options = options_of(tmp_path, "trainer.device=cpu")
    config = load_evaluation(options, lambda config: [])
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(config.dims(1, 1), torch.device("cpu"))
        module = build_causal_lm(
            folder,
            mesh,
            model_config=config.model,
            fsdp_config=config.actor.fsdp,
            checkpointing=False,
            forward_only=False,
            dtype=torch.float32,
        )
        with Checkpointer(tmp_path / "run" / "checkpoints", mesh) as checkpoints:
            checkpoints.save(3, {"actor": module}, {}, {})
    assert evaluate_rows(tmp_path, data, tmp_path / "run") == rows
