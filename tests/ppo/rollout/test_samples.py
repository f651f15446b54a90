"""pass@k by enumeration, summary, samples file, and rollout.py as a whole."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ppo.config import ConfigError
from ppo.data.tokenizer import load_tokenizer
from ppo.models.build import build_causal_lm
from ppo.models.tiny import build_tiny_model
from ppo.rollout.samples import pass_at_k, summarise, write_samples
from rollout import load_evaluation, main, parse_options
from sharding.checkpoint import Checkpointer
from sharding.mesh import build_mesh, init_distributed


@pytest.mark.parametrize(("num_samples", "num_passed"), [(1, 0), (1, 1), (5, 2), (6, 5), (4, 0)])
def test_pass_at_k_is_the_share_of_subsets_with_a_passing_sample(num_samples, num_passed):
    passed = [index < num_passed for index in range(num_samples)]
    for k in range(1, num_samples + 1):
        subsets = list(combinations(passed, k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(num_samples, num_passed, k) == pytest.approx(expected)


def row(index: int, score: float | None, length: int = 4, **more) -> dict:
    return {
        "prompt_index": index,
        "score": score,
        "response_length": length,
        "finish_reason": "stop",
        "data_source": "b",
    } | more


def test_a_summary_leaves_failed_samples_out_of_scores_and_counts_them():
    rows = [row(0, 1.0), row(0, 0.0), row(0, 0.5), row(1, None), row(1, 0.0), row(1, 0.0)]
    rows += [row(2, 1.0, 10, data_source="a", finish_reason="length")]
    summaries = summarise(rows)
    assert list(summaries) == ["a", "b"]
    assert summaries["a"].clip_ratio == 1.0 and summaries["a"].max_length == 10
    b = summaries["b"]
    assert (b.num_prompts, b.num_samples, b.num_failed) == (2, 6, 1)
    assert b.mean_score == pytest.approx(1.5 / 5)
    # prompt 0: one of three passes; prompt 1: none of two
    assert b.pass_at == pytest.approx({1: (1 / 3 + 0) / 2, 2: (2 / 3 + 0) / 2})
    assert summarise(rows, pass_score=0.5)["b"].pass_at[1] == pytest.approx((2 / 3 + 0) / 2)


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
    return pq.read_table(out).to_pylist()


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
