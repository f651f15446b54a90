"""Prompts from files: formats, errors that say where, filtering and truncation, order."""

import functools
import json
import math
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import normalizers

from ppo.config import CustomClassConfig, DataConfig
from ppo.data.columns import check_data_files
from ppo.data.dataset import Prompt, PromptDataset, custom_dataset
from ppo.data.rows import DataError
from ppo.data.sampler import PromptSampler
from ppo.data.tokenizer import load_tokenizer
from ppo.models.tiny import build_tiny_model, build_tiny_tokenizer
from ppo.plugin import PluginError

TOKENIZER = build_tiny_tokenizer()


def data_config(**changes) -> DataConfig:
    return DataConfig(**({"train_files": [], "seed": 7} | changes))


def load(files, **changes) -> PromptDataset:
    return PromptDataset(files, TOKENIZER, data_config(**changes))


def write_jsonl(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path: Path, rows) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def simple_row(text: object = "hi", **more) -> dict:
    return {"prompt": text, "data_source": "exact_match"} | more


VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
def test_a_row_as_verl_writes_it(tmp_path, write):
    path = write(tmp_path / f"a.{'parquet' if write is write_parquet else 'jsonl'}", [VERL_ROW])
    assert load(path)[0] == Prompt(
        uid=0,
        prompt_ids=[259, *b"1+1?", 257, 260],
        data_source="openai/gsm8k",
        ground_truth="2",
        extra_info={"ability": "math", "split": "train", "index": 0},
        messages=[{"role": "user", "content": "1+1?"}],
        where=f"{path}, row 0" + (" (line 1)" if write is write_jsonl else ""),
    )


def test_plain_text_prompts_without_optional_columns_become_user_messages(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [simple_row(ground_truth="x", level=3)])
    prompt = load(path)[0]
    assert prompt.prompt_ids == [259, *b"hi", 257, 260]
    assert (prompt.messages, prompt.ground_truth) == ("hi", "x")
    assert prompt.extra_info == {"level": 3}
    assert load(write_jsonl(tmp_path / "b.jsonl", [simple_row()]))[0].ground_truth is None
    parts = [{"type": "text", "text": text} for text in ("h", "i")]
    row = simple_row([{"role": "user", "content": parts}], images=[])
    assert load(write_jsonl(tmp_path / "c.jsonl", [row]))[0].prompt_ids == prompt.prompt_ids


def test_keys_that_a_parquet_struct_fills_with_null_were_not_written(tmp_path):
    first = simple_row([{"role": "user", "content": "a", "name": "n"}])
    second = simple_row([{"role": "user", "content": "b"}])
    dataset = load(write_parquet(tmp_path / "a.parquet", [first, second]))
    assert dataset[1].messages == [{"role": "user", "content": "b"}]


def test_lists_and_globs_keep_their_order_and_uids_count_over_all_files(tmp_path):
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [simple_row(name * 2)])
    dataset = load([str(tmp_path / "c.jsonl"), str(tmp_path / "[ab].jsonl")])
    assert [dataset[i].messages for i in range(3)] == ["cc", "aa", "bb"]
    assert [dataset[i].uid for i in range(3)] == [0, 1, 2]


def test_other_column_names_and_a_missing_data_source_where_it_is_not_needed(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "task": "t"}, {"question": "r"}])
    config = data_config(prompt_key="question", reward_fn_key="task")
    dataset = PromptDataset(path, TOKENIZER, config, need_data_source=False)
    assert [dataset[i].data_source for i in range(2)] == ["t", "unknown"]
    with pytest.raises(DataError, match=r"a\.jsonl, row 1 \(line 2\), column 'task': is missing"):
        PromptDataset(path, TOKENIZER, config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"prompt": "a", "data_source": "s"}\n\n{"data_source": "s"}',
            r"row 1 \(line 3\), column",
        ),
        ('{"prompt": 3, "data_source": "s"}', "column 'prompt': must be text or a list .* not int"),
        ('{"prompt": [], "data_source": "s"}', "column 'prompt': is an empty list"),
        ('{"prompt": [{"role": "user"}], "data_source": "s"}', "needs a text 'content', not null"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "data_source": "s"}',
            "message 0 holds a part of type 'image', and text alone is read",
        ),
        (
            '{"prompt": "<image>?", "images": ["a.png"], "videos": [], "data_source": "s"}',
            "column 'images': the prompt comes with images, and text alone is read",
        ),
        ('{"prompt": "a", "data_source": 1}', "column 'data_source': must be text, not int"),
        ('{"prompt": "a", "data_source": "s", "reward_model": "2"}', "column 'reward_model': must"),
        ('{"prompt": "a", "data_source": "s", "extra_info": [1]}', "column 'extra_info': must be"),
        ('{"prompt": "a"', r"row 0 \(line 1\): is not JSON: .* at character 15 of the line$"),
        ("[1]", "must be a JSON object, one per line, not a JSON array"),
        (
            '[\n  {"prompt": "a"}\n]',
            r"row 0 \(line 1\): must be .* not a JSON array \(jq -c '.\[\]'",
        ),
        ("\n", "is empty"),
    ],
)
def test_bad_rows_are_named_by_file_row_and_column(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=rf"bad\.jsonl, .*{message}|bad\.jsonl: {message}"):
        check_data_files(str(path), data_config())
    with pytest.raises(DataError, match=message):
        load(str(path))


def test_bad_parquet_files_are_named(tmp_path):
    bad_type = write_parquet(tmp_path / "t.parquet", [{"prompt": 1.5, "data_source": "s"}])
    with pytest.raises(DataError, match=r"t\.parquet, row 0, column 'prompt': must be text or"):
        check_data_files(bad_type, data_config())
    lacking = write_parquet(tmp_path / "l.parquet", [{"text": "a", "data_source": "s"}])
    with pytest.raises(DataError, match=r"column 'prompt': is missing .* found columns text, d"):
        check_data_files(lacking, data_config())
    empty = tmp_path / "e.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    with pytest.raises(DataError, match=r"e\.parquet: is empty"):
        check_data_files([str(empty)], data_config())
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(DataError, match=r"x\.parquet: cannot be read as parquet"):
        check_data_files(str(tmp_path / "x.parquet"), data_config())


def test_missing_files_folders_and_unknown_kinds_are_errors(tmp_path):
    for files, message in [
        (str(tmp_path / "no.parquet"), "no such file"),
        (str(tmp_path / "no*.parquet"), "no file matches"),
        (str(tmp_path), "is a folder"),
        ([], "none given"),
    ]:
        with pytest.raises(DataError, match=message):
            check_data_files(files, data_config())
    for name, advice in (("a.csv", "prepare csv makes"), ("a.jsonl.gz", "unpack it"), ("a", "")):
        (tmp_path / name).write_text("a")
        with pytest.raises(DataError, match=f"unknown kind of file .*{advice}"):
            check_data_files(str(tmp_path / name), data_config())
    for name in ("pointer.parquet", "pointer.jsonl"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        with pytest.raises(DataError, match=f"{name}.*`git lfs pull` fetches the file"):
            check_data_files(str(tmp_path / name), data_config())
    check_data_files(["tiny"], data_config())


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "dangling.jsonl").symlink_to("nowhere")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    for name, message in {
        "pipe.jsonl": "is no regular file",
        "dangling.jsonl": "cannot be read: No such file",
        "loop.jsonl": "cannot be read: Too many levels of symbolic links",
        "pi*.jsonl": r"pipe\.jsonl is no regular file",
        "d*.jsonl": r"dangling\.jsonl cannot be read",
    }.items():
        with pytest.raises(DataError, match=message):
            load(str(tmp_path / name))


def test_a_file_name_that_is_not_utf8_is_escaped_in_messages(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.jsonl")
    write_jsonl(path, [simple_row()])
    prompt = load(str(path))[0]
    assert prompt.where.endswith(r"\udcff.jsonl, row 0 (line 1)")
    path.write_text("[")
    with pytest.raises(DataError, match=r"\\udcff\.jsonl, row 0") as error:
        load(str(path))
    str(error.value).encode()


def test_a_file_that_the_system_will_not_read_is_named(tmp_path):
    (tmp_path / "a.jsonl").symlink_to("/proc/self/mem")  # regular, and an I/O error at its start
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read: Input/output error"):
        load(str(tmp_path / "a.jsonl"))


def test_a_name_with_brackets_is_a_name_where_it_exists_and_the_home_folder_is_known(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "a[1].jsonl", [simple_row("brackets")])
    write_jsonl(tmp_path / "a1.jsonl", [simple_row("glob")])
    assert load("~/a[1].jsonl")[0].messages == "brackets"
    assert load("~/a[1-9].jsonl")[0].messages == "glob"
    with pytest.raises(DataError, match=r"~nobody-of-that-name/a\.jsonl: no such file"):
        load("~nobody-of-that-name/a.jsonl")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (simple_row("a\ud800"), r"column 'prompt': has half a surrogate pair \(\\ud800\) at char"),
        (simple_row([{"role": "user", "content": "\udc00"}]), "column 'prompt': has half"),
        (simple_row(ground_truth="\udfff"), "column 'ground_truth': has half"),
        (simple_row(reward_model={"ground_truth": "\ud800"}), "column 'reward_model': has half"),
        (simple_row(extra_info={"\ud800": 1}), "column 'extra_info': has half"),
        (simple_row(**{"\ud800": 1}), r"column '\\ud800': has half"),
        (simple_row(ground_truth=float("nan")), "column 'ground_truth': the ground truth is nan"),
        (simple_row(reward_model={"ground_truth": -math.inf}), "column 'reward_model': the ground"),
        (
            simple_row(extra_info={"a": functools.reduce(lambda v, _: [v], range(900), 0)}),
            "column 'extra_info': is nested more than 100 deep",
        ),
    ],
)
def test_values_that_could_not_be_passed_on_are_named_by_row_and_column(tmp_path, row, message):
    path = write_jsonl(tmp_path / "a.jsonl", [simple_row(), row])
    with pytest.raises(DataError, match=rf"a\.jsonl, row 1 \(line 2\), {message}"):
        load(path)


def test_json_that_is_nested_too_deeply_to_be_read_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": ' + "[" * 100_000)
    with pytest.raises(DataError, match=r"row 0 \(line 1\): is nested too deeply"):
        load(str(path))


def test_text_of_a_parquet_file_that_is_not_utf8_is_named_by_row_and_column(tmp_path):
    bad = pa.array([b"ok", b"\xff"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, bad.buffers())
    columns = {"data_source": ["s", "s"], "prompt": text}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=r"a\.parquet, row 1, column 'prompt': is not readable: 'ut"
    ):
        load(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("reward_model", [{"style": "rule", "ground_truth": None}, None])
def test_a_null_in_reward_model_does_not_hide_the_column_ground_truth(tmp_path, reward_model):
    row = simple_row(reward_model=reward_model, ground_truth="7")
    assert load(write_jsonl(tmp_path / "a.jsonl", [row]))[0].ground_truth == "7"


def test_columns_keep_their_names_for_rewards_that_take_them_by_name(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "task": "t", "solution": "s"}])
    prompt = load(path, prompt_key="question", reward_fn_key="task")[0]
    assert prompt.extra_info == {"question": "q", "task": "t", "solution": "s"}


def test_a_column_of_tools_is_said_to_be_unused(tmp_path, caplog):
    load(write_jsonl(tmp_path / "a.jsonl", [simple_row(), simple_row(tools=[{"name": "f"}])]))
    (said,) = caplog.messages
    assert "a.jsonl, row 1 (line 2), column 'tools': not used" in said


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        ("left", [*b"xyz", 257, 260]),
        ("right", [259, *b"abcd"]),
        ("middle", [259, 97, 122, 257, 260]),
    ],
)
def test_a_prompt_of_many_megabytes_is_not_tokenized_to_be_cut(tmp_path, truncation, expected):
    class Counting:
        """The tokenizer, and how much it was given."""

        characters = 0

        def __getattr__(self, name):
            return getattr(TOKENIZER, name)

        def __call__(self, texts, **options):
            self.characters += sum(map(len, texts))
            return TOKENIZER(texts, **options)

    path = write_jsonl(tmp_path / "a.jsonl", [simple_row("abcd" + "-" * 5_000_000 + "xyz")])
    changes = {"max_prompt_length": 5, "filter_overlong_prompts": False, "truncation": truncation}
    tokenizer: Any = Counting()
    dataset = PromptDataset(path, tokenizer, data_config(**changes))
    assert dataset[0].prompt_ids == expected
    assert tokenizer.characters < 1000
    with pytest.raises(DataError, match="has at least 612 tokens with the chat template"):
        load(path, **changes | {"truncation": "error"})


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("left", [*b"ef", 257, 260]), ("right", [259, *b"abc"]), ("middle", [259, 97, 257, 260])],
)
def test_long_prompts_are_cut_at_the_side_that_is_asked_for(tmp_path, truncation, expected):
    path = write_jsonl(tmp_path / "a.jsonl", [simple_row("abcdef")])
    changes = {"filter_overlong_prompts": False, "max_prompt_length": 4}
    assert load(path, truncation=truncation, **changes)[0].prompt_ids == expected


def test_long_prompts_are_left_out_or_an_error_that_names_the_row(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [simple_row("abcdef"), simple_row("ab")])
    kept = load(path, max_prompt_length=5)
    assert (len(kept), kept[0].uid, kept.num_filtered) == (1, 1, 1)
    with pytest.raises(DataError, match=r"row 0 .*column 'prompt': has 9 tokens .* = 5"):
        load(path, max_prompt_length=5, filter_overlong_prompts=False)
    with pytest.raises(DataError, match="every prompt is longer"):
        load(path, max_prompt_length=2)


def test_chat_template_options_reach_it_and_its_refusal_names_the_row(tmp_path):
    template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        "{{ messages[0]['content'] }}{{ suffix }}"
    )
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = template
    path = write_jsonl(tmp_path / "a.jsonl", [simple_row("a")])
    config = data_config(apply_chat_template_kwargs={"suffix": "!?"})
    assert PromptDataset(path, tokenizer, config)[0].prompt_ids == list(b"a!?")
    bad = write_jsonl(tmp_path / "b.jsonl", [simple_row([{"role": "system", "content": "a"}])])
    with pytest.raises(DataError, match=r"b\.jsonl, row 0 .*refuses it: user first"):
        PromptDataset(bad, tokenizer, config)
    tokenizer.chat_template = "{{ messages[0]['content'] + 1 }}"  # not an error of Jinja's own
    with pytest.raises(DataError, match=r"a\.jsonl, row 0 .*can only concatenate str"):
        PromptDataset(path, tokenizer, config)


def test_the_length_that_a_tokenizer_is_saved_with_is_no_warning(tmp_path, caplog):
    tokenizer = build_tiny_tokenizer()
    tokenizer.model_max_length = 4
    path = write_jsonl(tmp_path / "a.jsonl", [simple_row("longer than four")])
    with caplog.at_level("WARNING", "transformers"):
        PromptDataset(path, tokenizer, data_config())
    assert not caplog.records


def test_a_tokenizer_without_chat_template_is_an_error_and_a_custom_one_heals_it(tmp_path):
    bare = build_tiny_tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"no chat template; .*model\.custom_chat_template"):
        load_tokenizer(tmp_path)
    healed = load_tokenizer(tmp_path, custom_chat_template="{{ messages[0]['content'] }}")
    message = [{"role": "user", "content": "ab"}]
    assert healed.apply_chat_template(message, tokenize=False) == "ab"
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_tokenizer_without_padding_pads_with_its_end_of_sequence_or_is_an_error(tmp_path):
    tokenizer = build_tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == tokenizer.eos_token_id
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="neither a padding nor an end-of-sequence token"):
        load_tokenizer(tmp_path)


def test_max_samples_take_the_first_rows_of_their_split():
    config = data_config(train_max_samples=5, val_max_samples=3)
    train = PromptDataset("tiny", TOKENIZER, config)
    val = PromptDataset(["tiny"], TOKENIZER, config, split="val")
    assert (len(train), len(val)) == (5, 3)
    assert train[0].messages != val[0].messages
    assert train[4] == PromptDataset("tiny", TOKENIZER, data_config())[4]


def test_a_dataset_class_of_the_user_replaces_ours(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text(
        "from ppo.data.dataset import Prompt\n"
        "class Mine(list):\n"
        "    def __init__(self, files, tokenizer, data, *, split):\n"
        "        super().__init__([Prompt(0, [1], split, None, {}, files)])\n"
        "class Wrong(Mine):\n"
        "    def __getitem__(self, index): return 1\n"
        "class Empty(Mine):\n"
        "    def __len__(self): return 0\n"
        "class Holds(list):\n"
        "    ids = []\n"
        "    def __init__(self, files, tokenizer, data, *, split):\n"
        "        super().__init__(Prompt(0, x, split, None, {}, '') for x in self.ids)\n"
        "class NoTokens(Holds): ids = [[1], []]\n"
        "class Long(Holds): ids = [[1], [1], [1] * 513]\n"
        "class Outside(Holds): ids = [[511], [3, 512]]\n"
    )

    def build(name):
        custom = CustomClassConfig(path=str(source), name=name)
        return custom_dataset("f", TOKENIZER, data_config(custom_cls=custom), split="val")

    assert build("Mine")[0] == Prompt(0, [1], "val", None, {}, "f")
    for name, message in {
        "Wrong": "item 0 of Wrong .* must be a ppo.data.dataset.Prompt, not int",
        "Empty": "holds no prompt",
        "NoTokens": "item 1 of NoTokens .* has no tokens",
        "Long": "item 2 of Long .* has 513 tokens, over data.max_prompt_length = 512",
        "Outside": "item 1 of Outside .* has token ids from 3 to 512: there are 512",
    }.items():
        with pytest.raises(PluginError, match=message):
            build(name)
    with pytest.raises(PluginError, match="defines no 'Gone'; it has Prompt, Mine, Wrong, Empty"):
        build("Gone")


def prompts(count: int) -> list[Prompt]:
    return [Prompt(i, [1], "s", None, {}, "p") for i in range(count)]


def uids(batch) -> list[int]:
    return [prompt.uid for prompt in batch]


def test_every_epoch_holds_every_prompt_once_in_a_new_seeded_order():
    def epochs(seed):
        sampler = PromptSampler(prompts(12), batch_size=4, seed=seed)
        drawn = [uid for _ in range(6) for uid in uids(sampler.next_batch())]
        return [drawn[:12], drawn[12:]]

    first, second = epochs(1)
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second != list(range(12))
    assert epochs(1) == [first, second]
    assert epochs(2) != [first, second]


def test_the_short_last_batch_is_dropped_with_one_warning_or_used(caplog):
    dropped = PromptSampler(prompts(5), batch_size=2, shuffle=False)
    assert [uids(dropped.next_batch()) for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the last 1 of 5 prompts" in caplog.text
    used = PromptSampler(prompts(5), batch_size=2, shuffle=False, drop_last=False)
    drawn = [(uids(used.next_batch()), used.epoch) for _ in range(4)]
    assert drawn == [([0, 1], 0), ([2, 3], 0), ([4], 0), ([0, 1], 1)]
    assert (len(dropped), len(used)) == (2, 3)
    with pytest.raises(DataError, match="hold 5 usable prompts, fewer than"):
        PromptSampler(prompts(5), batch_size=6)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("stop_after", range(7))
def test_a_restart_neither_skips_nor_repeats_at_any_position(drop_last, stop_after):
    def sampler():
        return PromptSampler(prompts(7), batch_size=3, seed=5, drop_last=drop_last)

    whole = sampler()
    expected = [(uids(whole.next_batch()), whole.epoch) for _ in range(8)]
    before = sampler()
    for _ in range(stop_after):
        before.next_batch()
    state = json.loads(json.dumps(before.state_dict()))
    after = sampler()
    after.load_state_dict(state)
    assert [(uids(after.next_batch()), after.epoch) for _ in range(8 - stop_after)] == expected[
        stop_after:
    ]


def test_data_that_changed_since_the_checkpoint_is_said(caplog):
    state = PromptSampler(prompts(8), batch_size=4).state_dict()
    PromptSampler(prompts(12), batch_size=4).load_state_dict(state)
    assert "the data changed since the checkpoint: 12 usable prompts, then 8" in caplog.text


def test_a_token_that_the_model_does_not_have_is_named_by_file_row_and_token(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [simple_row("aa"), simple_row("az")])
    [a], [z] = (TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in ("a", "z"))
    assert a < z
    with pytest.raises(
        DataError, match=rf"a\.jsonl, row \d.*'prompt'.*the id \d+.*has {z} ids.* 512: enlarge"
    ):
        PromptDataset(path, TOKENIZER, data_config(), vocabulary=z)
    highest = max(PromptDataset(path, TOKENIZER, data_config())[1].prompt_ids)
    assert len(PromptDataset(path, TOKENIZER, data_config(), vocabulary=highest + 1)) == 2


def test_a_prompt_of_which_the_tokenizer_makes_nothing_is_named(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [simple_row("aa"), simple_row("  ")])
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()  # pyright: ignore
    with pytest.raises(DataError, match=r"a\.jsonl, row 1 .*makes no token of it"):
        PromptDataset(path, tokenizer, data_config())


def test_a_tokenizer_without_its_vocabulary_is_refused_at_load(tmp_path):
    folder = build_tiny_model(tmp_path / "model")
    load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"no known token of plain text.*tokenizer\.json"):
        load_tokenizer(folder)


def test_other_data_with_as_many_prompts_is_said(caplog):
    state = PromptSampler(prompts(8), batch_size=4).state_dict()
    PromptSampler(prompts(8), batch_size=4).load_state_dict(state)
    PromptSampler(prompts(8), batch_size=4).load_state_dict(
        {key: value for key, value in state.items() if key != "checksum"}  # of an earlier version
    )
    assert not caplog.records
    others = prompts(8)
    others[5] = others[5]._replace(ground_truth="another answer")
    PromptSampler(others, batch_size=4).load_state_dict(state)
    assert "as many prompts (8), but other ones" in caplog.text
