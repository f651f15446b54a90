"""Prompts come back from the file that they are kept in as they were read, in any process."""

import datetime
import decimal
import json
import pickle
import random
import subprocess
import sys
import tempfile
import tracemalloc
import zlib
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppo.config import DataConfig
from ppo.data.dataset import Prompt, PromptDataset, facts_of, kinds_of
from ppo.data.facts import Kind
from ppo.data.reading import read_prompts
from ppo.data.sampler import PromptSampler
from ppo.data.table import Table
from ppo.errors import InputError
from ppo.models.tiny import build_tiny_tokenizer

TOKENIZER = build_tiny_tokenizer()
DATA = DataConfig(train_files=[], max_prompt_length=40)


def load(path) -> PromptDataset:
    return PromptDataset(str(path), TOKENIZER, DATA)


def all_of(prompts: PromptDataset) -> list[Prompt]:
    return [prompts[index] for index in range(len(prompts))]


def test_every_type_of_a_parquet_file_comes_back_as_it_was(tmp_path):
    values = {
        "reward_model": {"ground_truth": 7},
        "when": datetime.datetime(2026, 11, 30, 7, 20, tzinfo=datetime.UTC),
        "price": decimal.Decimal("1.10"),
        "raw": b"\xff\x00",
        "pairs": [{"a": [1.5, None], "b": {"c": True}}],
        "none": None,
        "large": 2**62 + 1,
    }
    rows = [{"prompt": f"q{i}", "data_source": "s"} | values for i in range(3)]
    table = pa.Table.from_pylist(rows).append_column(
        "map", pa.array([[("k", 1)]] * 3, pa.map_(pa.string(), pa.int64()))
    )
    pq.write_table(table, tmp_path / "a.parquet")
    prompt = load(tmp_path / "a.parquet")[2]
    del values["reward_model"]
    assert prompt == Prompt(
        uid=2,
        prompt_ids=[259, *b"q2", 257, 260],
        data_source="s",
        ground_truth=7,
        extra_info=values | {"map": [("k", 1)]},
        messages="q2",
        where=f"{tmp_path}/a.parquet, row 2",
    )
    assert all(type(each) is int for each in prompt.prompt_ids)
    kinds = {name: type(value) for name, value in prompt.extra_info.items()}
    assert kinds["large"] is int and kinds["raw"] is bytes and kinds["pairs"] is list


def test_prompts_that_are_left_out_leave_the_others_their_numbers_and_no_fact(tmp_path):
    rows = [
        {"prompt": "long " * 20, "data_source": "other", "only_here": 1, "ground_truth": None},
        {"prompt": "a", "data_source": "s", "ground_truth": 1, "x": [1, 2.0, {"y": None}]},
        {"prompt": "long " * 20, "data_source": "s"},
        {"prompt": "b", "data_source": "t", "ground_truth": "\u00e9", "z": 0},
        {"prompt": "c", "data_source": "s"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load(tmp_path / "a.jsonl")
    assert [(p.uid, p.messages, p.ground_truth, p.extra_info) for p in all_of(prompts)] == [
        (1, "a", 1, {"x": [1, 2.0, {"y": None}]}),
        (3, "b", "\u00e9", {"z": 0}),
        (4, "c", None, {}),
    ]
    assert (prompts[-1], prompts.num_filtered) == (prompts[2], 2)
    with pytest.raises(IndexError):
        prompts[3]
    facts = prompts.facts
    asked = "('a', 1)('b', '\u00e9')('c', None)"
    assert facts.checksum == zlib.crc32(asked.encode())
    assert (facts.columns, facts.first_of_source) == ({"x", "z"}, {"s": 0, "t": 1})
    assert (facts.num_null_truths, facts.first_null_truth, facts.num_tokens) == (1, 2, 12)
    kinds = {Kind("", kind.source): number for kind, number in facts.kinds.items()}
    assert facts_of(all_of(prompts)) == replace(facts, kinds=kinds)
    assert kinds_of(prompts)[1].tolist() == kinds_of(all_of(prompts))[1].tolist() == [0, 1, 0]


def test_a_class_of_the_user_that_is_made_of_ours_has_facts_of_its_own():
    class Numbered(PromptDataset):
        def __getitem__(self, index: int, /) -> Prompt:
            return super().__getitem__(index)._replace(extra_info={"number": index})

    assert facts_of(Numbered("tiny", TOKENIZER, DATA)).columns == {"number"}


def test_another_process_of_the_machine_maps_the_same_prompts_and_no_file_has_a_name(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    steps, seen = read_prompts("tiny", TOKENIZER, DATA), 0
    try:
        while True:
            next(steps)
            seen += len(list(tmp_path.iterdir()))
    except StopIteration as end:
        table: Table = end.value
    assert seen == 0
    program = (
        "import pickle, sys\n"
        "from ppo.data.dataset import PromptDataset\n"
        "from ppo.data.table import Table\n"
        "prompts = PromptDataset.of(Table.at(pickle.loads(sys.stdin.buffer.read())))\n"
        "sys.stdout.buffer.write(pickle.dumps(list(prompts)))\n"
    )

    told = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(table.place), capture_output=True
    )
    assert pickle.loads(told.stdout) == all_of(PromptDataset.of(table)), told.stderr
    with pytest.raises(InputError, match=r"cannot be shared: .*must see each other in /proc"):
        Table.at(table.place._replace(file=10_000))


def test_a_folder_that_cannot_keep_the_prompts_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(InputError, match=r"gone: the prompts cannot be kept there: No such .*TMP"):
        load("tiny")


def test_prompts_take_no_memory_of_the_process_but_a_few_bytes_each(tmp_path):
    row = {"prompt": "one two three", "data_source": "s", "ground_truth": "x", "extra": [1, 2]}
    lines = (json.dumps(row | {"index": index}) + "\n" for index in range(3000))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    load("tiny")  # what is made once
    tracemalloc.start()
    try:
        sampler = PromptSampler(load(tmp_path / "a.jsonl"), batch_size=8)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / 3000 < 100  # an object of a prompt takes 1 to 3 KB
    assert len(sampler.next_batch()) == 8


def test_the_order_of_a_seed_is_that_of_a_shuffled_list():
    prompts = PromptDataset("tiny", TOKENIZER, DATA)
    order = list(range(len(prompts)))
    random.Random("5-0").shuffle(order)
    sampler = PromptSampler(prompts, batch_size=20, seed=5)
    assert [prompt.uid for prompt in sampler.next_batch()] == order[:20]
