"""`--check` looks at the files that are there as a start does, without torch or transformers."""

import importlib.util
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from ppo.check.files import missing_files
from ppo.check.preflight import run_check
from ppo.config import PACKAGES_OF_LOGGERS, load_config, parse_args
from ppo.model_shapes import TINY


def test_files_that_are_there_are_checked_as_a_start_does(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"question": "?", "data_source": "x"}\n')
    (tmp_path / "reward.py").write_text("def compute_score(:\n")
    code = run_check(
        parse_args(
            ["--config", "ppo.yaml", "--check", f"data.train_files={tmp_path / 'rows.jsonl'}",
             f"reward.function.path={tmp_path / 'reward.py'}", "data.drop_last=false"]
        )
    )  # fmt: skip
    assert code == 2
    err = capsys.readouterr().err
    assert "2 problems" in err
    assert "rows.jsonl, row 0 (line 1), column 'prompt'" in err and "data.prompt_key" in err
    assert "reward.function.path" in err and "is not valid Python" in err


@pytest.mark.parametrize(
    ("keys", "engine", "refused"),
    [
        ({"model_type": "mistral", "sliding_window": 63}, "sglang", True),
        ({"model_type": "mistral", "sliding_window": 63}, "torch", False),
        ({"model_type": "mistral", "sliding_window": 64}, "sglang", False),
        ({"model_type": "mistral", "sliding_window": None}, "sglang", False),
        ({"model_type": "gemma3_text", "sliding_window": 63}, "sglang", False),
        ({"sliding_window": 63, "use_sliding_window": False}, "sglang", False),
        ({"sliding_window": 63, "layer_types": ["full_attention"] * 2}, "sglang", False),
        ({"sliding_window": 63, "use_sliding_window": True}, "sglang", True),
    ],
)
def test_windows_that_sglang_does_not_have_are_a_problem(tmp_path, capsys, keys, engine, refused):
    (tmp_path / "config.json").write_text(json.dumps(TINY | keys))
    overrides = [f"model.path={tmp_path}", f"rollout.engine={engine}", "rollout.dtype=float32"]
    code = run_check(parse_args(["--config", "ppo_tiny.yaml", "--check", *overrides]))
    said = capsys.readouterr().err
    assert (code == 2, "does not have the attention windows" in said) == (refused, refused), said


LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2},
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}


@pytest.mark.parametrize(
    ("keys", "override", "words"),
    [
        ({"model_type": "gemma2", "tie_word_embeddings": False}, "", "no head of gemma2 beside"),
        ({"model_type": "deepseek_v3"} | LATENT, "", "has no latent attention, which deepseek_v3"),
        ({"model_type": "qwen3_5_text"} | LINEAR, "", "on a CPU has no linear attention, Mamba"),
        ({"model_type": "gemma4_text"}, "", "on a CPU has no attention whose layers differ"),
        ({"model_type": "llama4_text"}, "", "loads the experts of llama4_text in the class"),
        (
            {
                "model_type": "ministral3",
                "rope_parameters": {
                    **{"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32},
                },
            },
            "",
            "SGLang scales the queries of ministral3 from position 16384 on",
        ),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "actor.ulysses_sequence_parallel_size=2",
            "it has layers of type linear_attention",
        ),
    ],
)
def test_what_a_start_refuses_of_a_family_is_a_problem_also_inside_of_a_multimodal_one(
    tmp_path, capsys, keys, override, words
):
    whole = {"model_type": "whole", "text_config": TINY | keys, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    overrides = [f"model.path={tmp_path}", "rollout.engine=sglang", "trainer.device=cpu"]
    overrides += [override] if override else []
    assert run_check(parse_args(["--config", "ppo_tiny.yaml", "--check", *overrides])) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("role", "positions", "override", "words"),
    [
        ("model", 63, None, "model.path = '{}': data.max_prompt_length + data.max"),
        ("model", 63, 64, ""),
        ("model", 64, 63, "set model.override_config.max_position_embeddings"),
        ("critic.model", 63, 64, "critic.model.path = '{}': data.max_prompt_length"),
        ("critic.model", 64, None, ""),
        ("reward.model", 63, None, ""),  # it gives longer conversations no score
    ],
)
def test_a_model_with_fewer_positions_than_sequences_have_tokens_is_a_problem(
    tmp_path, capsys, role, positions, override, words
):
    keys = TINY | {"max_position_embeddings": positions}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": keys}))
    overrides = [f"{role}.path={tmp_path}"]
    if role == "reward.model":
        overrides.append("reward.model.enable=true")
    if override is not None:
        overrides.append(f"model.override_config.max_position_embeddings={override}")
    code = run_check(parse_args(["--config", "ppo_tiny.yaml", "--check", *overrides]))
    said = capsys.readouterr().err
    assert (code == 2) == bool(words) and words.format(tmp_path) in said, said


@pytest.mark.parametrize(
    ("role", "length", "code"), [("model", 33, 2), ("model", 32, 0), ("critic.model", 33, 0)]
)
def test_the_actor_alone_needs_positions_for_longer_responses_of_a_validation_set(
    tmp_path, capsys, role, length, code
):
    keys = TINY | {"max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    sets = f"data.val_sets={{long: {{files: [tiny], max_response_length: {length}}}}}"
    overrides = [f"{role}.path={tmp_path}", sets, "rollout.max_model_len=128"]
    assert run_check(parse_args(["--config", "ppo_tiny.yaml", "--check", *overrides])) == code
    said = capsys.readouterr().err
    key = "data.max_prompt_length + data.val_sets.long.max_response_length = 65 tokens"
    assert (key in said) == (code == 2), said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("def compute_score(:", "is not valid Python"),
        ("x = " + "(" * 5000, "is not valid Python"),
        ("x = " + "-" * 100_000 + "1", "is not valid Python"),
        ("\0", "is not valid Python"),
        (None, "cannot be read"),
    ],
)
def test_a_reward_file_that_cannot_be_read_is_a_problem(tmp_path, capsys, content, words):
    file = Path("/proc/self/mem")  # a file that is there and cannot be read, by nobody
    if content is not None:
        file = tmp_path / "reward.py"
        file.write_text(content)
    base = ["--config", "ppo_tiny.yaml", "--check"]
    assert run_check(parse_args([*base, f"reward.function.path={file}"])) == 2
    assert words in capsys.readouterr().err
    assert run_check(parse_args([*base, "reward.function.path=~nobody-here/x.py"])) == 0
    assert "~nobody-here/x.py (no such file)" in capsys.readouterr().out


def test_prompts_that_are_all_too_long_are_warned_about_without_transformers(tmp_path, capsys):
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    rows = [{"data_source": "x", "prompt": "a " * n} for n in (30, 20, 40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    base = ["--config", "ppo_tiny.yaml", "--check", f"model.path={tmp_path}",
            "data.drop_last=false", f"data.train_files={tmp_path / 'rows.jsonl'}"]  # fmt: skip
    assert run_check(parse_args([*base, "data.max_prompt_length=19"])) == 0
    assert "the first 3 prompts of" in (out := capsys.readouterr().out)
    assert "20 to 40 tokens or more" in out
    run_check(parse_args([*base, "data.max_prompt_length=20"]))
    assert "the first 3 prompts" not in capsys.readouterr().out
    (tmp_path / "tokenizer.json").write_text("{")
    assert run_check(parse_args(base)) == 0
    assert "tokenizer.json cannot be read" in capsys.readouterr().out


def test_a_tracker_whose_package_is_missing_is_said_before_a_start(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    absent = [name for name in PACKAGES_OF_LOGGERS if importlib.util.find_spec(name) is None]
    for name in absent:
        (tmp_path / name).mkdir()  # as wandb leaves one in the folder of an offline run
    overrides = ["model.path=tiny", "data.train_files=tiny"]
    names = ", ".join(["jsonl", *absent])
    config = load_config(None, [*overrides, f"trainer.logger=[{names}]", "rollout.engine=torch"])
    found = [problem for problem in missing_files(config) if problem.path == "trainer.logger"]
    assert [problem.value for problem in found] == absent
    assert all(f"pip install -e '.[{p.value}]'" in str(p) for p in found)


SOURCES = [{"data_source": s, "prompt": "?", "ground_truth": "1"} for s in ("math", "gsm8k")] * 3


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.mix={math: 1, gsm8k: 2}"], None),
        (["data.mix={math: 1, gsm9k: 2}"], "data.mix.gsm9k: neither a data source nor a file"),
        (["data.mix={math: 1}"], "data.mix: has no weight for data source 'gsm8k'"),
        (["data.mix={'*/rows.*': 1, math: 1}"], "data.mix.math: means data source 'math'"),
        (["data.mix={math: 1, gsm8k: 0}"], "hold 3 rows to draw from, fewer than data.train_batch"),
        (["data.train_batch_size=8"], "hold 6 rows to draw from, fewer than data.train_batch_size"),
        (["data.train_batch_size=8", "data.drop_last=false"], None),
        (["data.train_max_samples=3"], "hold 3 rows to draw from"),
        (["data.train_files=tiny", "data.train_batch_size=1028"], "hold 1024 rows to draw from"),
        (["data.train_files=tiny", "data.mix={other: 1}"], "the data sources are 'tiny'"),
        (
            ["algorithm.filter_groups.enable=true", "rollout.n=2", "data.gen_batch_size=7"],
            "hold 6 rows to draw from, fewer than data.gen_batch_size = 7",
        ),
    ],
)
def test_training_rows_that_a_start_refuses_are_a_problem(
    tmp_path, capsys, suffix, overrides, words
):
    file = tmp_path / f"rows.{suffix}"
    table = pyarrow.Table.from_pylist(SOURCES)
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in SOURCES))
    sizes = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=4"]
    arguments = [f"data.train_files={file}", "reward.function.path=a.py", *sizes, *overrides]
    code = run_check(parse_args(["--config", "ppo_tiny.yaml", "--check", *arguments]))
    err = capsys.readouterr().err
    assert code == (0 if words is None else 2), err
    assert words is None or words in err


def test_a_row_behind_the_first_ones_that_cannot_be_read_is_a_problem(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in SOURCES * 20] + ["{"]
    file.write_text("\n".join(lines))
    mix = ["data.mix={math: 1, gsm8k: 1}", "reward.function.path=a.py"]
    arguments = ["--config", "ppo_tiny.yaml", "--check", f"data.train_files={file}"]
    assert run_check(parse_args([*arguments, *mix])) == 2
    assert "rows.jsonl, row 120 (line 121): is not JSON" in capsys.readouterr().err
