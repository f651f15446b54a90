"""`--suggest`: what it prints passes `--check`, and nothing larger would fit."""

import json
import re

import pytest

from ppo.check.commands import run_check
from ppo.config import ConfigError, load_config, parse_args
from ppo.model_shapes import TINY

MODELS = (
    *("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-32B-Instruct"),
    *("Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B", "google/gemma-3-12b-it"),
    *("meta-llama/Llama-3.1-8B-Instruct", "mistralai/Mistral-Small-24B-Instruct-2501"),
    *("microsoft/phi-4", "zai-org/GLM-4-9B-0414", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
)
CLUSTERS = ((1, 24), (1, 80), (8, 80), (32, 80))


def suggest(capsys, *arguments: str) -> tuple[int, str, str]:
    code = run_check(parse_args(["--suggest", *arguments]))
    return (code, *capsys.readouterr())


def check(capsys, *arguments: str) -> str:
    """What --check prints of something that passes it."""
    assert run_check(parse_args(["--check", *arguments])) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize("model", MODELS)
def test_what_is_suggested_passes_the_check_or_it_is_said_what_would_fit(tmp_path, capsys, model):
    for gpus, gib in CLUSTERS:
        base = ["--model", model, "--gpus", str(gpus), "--device_memory_gib", str(gib)]
        code, out, err = suggest(capsys, *base)
        if code == 0:
            (tmp_path / "mine.yaml").write_text(out)
            said = check(capsys, "--config", str(tmp_path / "mine.yaml"))
            assert said.splitlines()[-1].startswith("fits: ") and "warnings" not in said
            assert f"GPU{'s' * (gpus > 1)} of {gib} GiB" in out
        else:
            assert (code, out) == (2, "") and f"does not fit on {gpus} x {gib} GiB" in err
            more = re.search(r"it fits on (\d+) ranks", err)
            assert more or "it fits on no number of ranks" in err
            if more:
                code, *_ = suggest(capsys, *base, "--gpus", more[1])
                assert code == 0, err


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_nothing_larger_would_fit(tmp_path, capsys, algorithm):
    """Half of a 32B model's optimizer on each of 4 nodes leaves no room for twice the tokens."""
    mine = tmp_path / "mine.yaml"
    base = ["--model=Qwen/Qwen2.5-32B-Instruct", "--gpus=32", "data.max_response_length=8192"]
    code, out, _ = suggest(capsys, *base, f"--algorithm={algorithm}")
    mine.write_text(out)
    config = load_config(mine)
    assert code == 0 and config.actor.ppo_max_token_len_per_gpu >= 8704
    assert not config.actor.fsdp.offload_policy
    budgets = {
        "actor.ppo_max_token_len_per_gpu": 2 * config.actor.ppo_max_token_len_per_gpu,
        "rollout.gpu_memory_utilization": config.rollout.gpu_memory_utilization + 0.05,
    }
    for key, value in budgets.items():
        assert run_check(parse_args(["--check", "--config", str(mine), f"{key}={value}"])) == 2
        capsys.readouterr()


def test_overrides_stay_as_they_are_and_the_rest_follows_them(tmp_path, capsys):
    given = {
        "data.max_response_length": 4096, "data.train_batch_size": 96, "rollout.n": 4,
        "actor.ppo_max_token_len_per_gpu": 5000, "rollout.tensor_model_parallel_size": 2,
        "rollout.gpu_memory_utilization": 0.31, "actor.fsdp.optimizer_offload": "true",
        "data.train_files": "mine.jsonl",
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in given.items()]
    code, out, err = suggest(
        capsys, "--model=Qwen/Qwen3-8B", "--gpus=8", "--algorithm=dapo", *overrides
    )
    assert code == 0, err
    (tmp_path / "mine.yaml").write_text(out)
    config = load_config(tmp_path / "mine.yaml")
    assert config == load_config(tmp_path / "mine.yaml", overrides)
    assert config.actor.ppo_mini_batch_size == 48 and config.reward.overlong_buffer.len == 1024
    assert config.algorithm.filter_groups.enable and config.actor.clip_ratio_high == 0.28
    check(capsys, "--config", str(tmp_path / "mine.yaml"))


def test_a_model_that_is_not_known_is_taken_from_its_config_json(tmp_path, capsys):
    base = ["--model=my/model", "--gpus=1", "--device_memory_gib=24"]
    code, _, err = suggest(capsys, *base)
    assert code == 2 and "--model_config" in err and "hf download my/model config.json" in err
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    sizes = f"--model_config={tmp_path}/config.json"
    code, out, _ = suggest(capsys, *base, sizes)
    assert code == 0 and "path: my/model" in out
    (tmp_path / "mine.yaml").write_text(out)
    said = check(capsys, "--config", str(tmp_path / "mine.yaml"), sizes)
    assert f"parameters ({tmp_path}/config.json)" in said
    (tmp_path / "config.json").write_text("{}")
    code, _, err = suggest(capsys, *base, sizes)
    assert code == 2 and "does not describe a language model" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suggest"], "--suggest needs --model NAME"),
        (["--suggest", "--model=tiny", "--config=ppo.yaml"], "and no --config"),
        (["--suggest", "--model=tiny", "--gpus=12"], "a multiple of 8"),
        (["--suggest", "--model=tiny", "--gpus=0"], "a multiple of 8"),
        (["--suggest", "--model=tiny", "--gpus=many"], "invalid int value: 'many'"),
        (["--config=ppo.yaml", "--model=tiny"], "--model belongs to --suggest"),
        (["--config=ppo.yaml", "--check", "--model_config=nowhere.json"], "no such file"),
        (["--check"], "required: --config"),
    ],
)
def test_a_wrong_command_line_is_answered_by_one_line(arguments, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--algorithm=pop"], "--algorithm = 'pop': must be one of ppo, grpo, dapo"),
        (["--algorithm=opd"], "ref.model.path"),
        (["rollout.num=2"], "rollout.num = '2': unknown key"),
        (["rollout.tensor_model_parallel_size=3"], "possible: 1, 2, 4, 8"),
    ],
)
def test_what_is_in_the_way_is_said_with_its_key(capsys, arguments, words):
    code, out, err = suggest(capsys, "--model=Qwen/Qwen3-8B", "--gpus=8", *arguments)
    assert (code, out) == (2, "") and words in err
