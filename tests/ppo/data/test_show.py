"""python -m ppo.data.show: what is printed of good, long and wrong rows."""

import json
from pathlib import Path

import pytest

from ppo.data.show import histogram, main, visible
from ppo.models.tiny import build_tiny_tokenizer

CONFIG = "--config=ppo_tiny.yaml"


def write(folder: Path, *rows: object) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(prompt: object, **more: object) -> dict:
    return {"prompt": prompt, "data_source": "tiny", "ground_truth": "a"} | more


def test_rows_are_shown_as_the_model_sees_them(tmp_path, capsys) -> None:
    system = [{"role": "system", "content": "Be\nbrief"}, {"role": "user", "content": "hé"}]
    file = write(tmp_path, row("copy a", level=3), row(system), row("\x1b[31mred"), row("late"))
    assert main([file, CONFIG, "data.train_batch_size=3", "actor.ppo_mini_batch_size=3"]) == 0
    out = capsys.readouterr().out
    assert "[<|user|>]copy a[<|im_end|>][<|assistant|>]" in out and "level=3" in out
    assert "[<|system|>]Be\nbrief[<|im_end|>][<|user|>]hé[<|im_end|>][<|assistant|>]" in out
    assert "row 0 (line 1): 9 tokens" in out and "·[31mred" in out and "\x1b" not in out
    assert "late" not in out  # three rows are shown
    assert "4 rows, tokens of a prompt: 7 to 16" in out
    assert "4 prompts: 1 batches of 3 in an epoch; the last 1 of each epoch's order are" in out


def test_rows_that_are_left_out_cut_or_wrong_are_named(tmp_path, capsys) -> None:
    rows = [row("a"), row("b" * 40), row(None), row([{"role": "user"}]), row("c", data_source=7)]
    file = write(tmp_path, *rows)
    small = ("data.train_batch_size=1", "actor.ppo_mini_batch_size=1")
    assert main([CONFIG, file, "--rows", "0", *small]) == 2
    out = capsys.readouterr().out
    assert "1 left out, longer than data.max_prompt_length = 32" in out
    assert f"    {file}, row 1 (line 2) (43 tokens)" in out
    assert "3 wrong: a run would refuse them" in out and "'data_source': must be text" in out
    cut = ("data.filter_overlong_prompts=false", "data.truncation=left")
    assert main([CONFIG, write(tmp_path, *rows[:2]), "--rows", "2", *small, *cut]) == 0
    out = capsys.readouterr().out
    assert "1 cut to data.max_prompt_length = 32" in out and "32 tokens, cut from 43" in out
    assert main([CONFIG, write(tmp_path, *rows[:2]), *small, cut[0]]) == 2  # truncation: error
    assert "has 43 tokens with the chat template" in capsys.readouterr().out


def test_a_file_of_wrong_rows_alone_is_told_row_by_row(tmp_path, capsys) -> None:
    file = write(tmp_path, {"question": "a"}, {"question": "b"})
    assert main([CONFIG, file]) == 2
    out = capsys.readouterr().out
    assert "2 wrong: a run would refuse them" in out and "row 1 (line 2), column 'prompt'" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.jsonl",), "nowhere.jsonl: no such file"),
        (("--split=val", "data.val_files=[]"), "data.val_files: none given"),
        (("data.custom_cls.path=x.py",), "data.custom_cls makes prompts of its own"),
        (("data.max_prompt_lenght=3",), "max_prompt_length"),
    ],
)
def test_what_cannot_be_shown_is_one_message(arguments, said, capsys) -> None:
    assert main([CONFIG, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_long_row_is_shown_without_its_middle() -> None:
    tokenizer = build_tiny_tokenizer()
    text = visible([97] * 1000 + [98] * 1000, tokenizer)
    assert text == "a" * 600 + "\n... 800 tokens ...\n" + "b" * 600
    assert visible([257], tokenizer, colour=True) == "\x1b[7m<|im_end|>\x1b[0m"


def test_a_histogram_by_hand() -> None:
    lines = histogram([1, 1, 2, 30], mark=20)
    assert lines[0].split()[:4] == ["1", "to", "3", "3"]
    assert lines[0].count("#") == 40 and lines[-1].endswith(" too long")
    assert sum(int(line.split()[3]) for line in lines) == 4
