"""The tiny model and the copy task: the same everywhere, loadable like any HF folder."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo.data.tiny import tiny_rows
from ppo.model_shapes import TINY
from ppo.models.tiny import build_tiny_model
from ppo.rewards.scorers import tiny as copy_scorer
from tests.distributed import fork_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=3)


def weights_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def build_in_child(folder: Path, results) -> None:
    results.put(weights_digest(build_tiny_model(folder, seed=3)))


def test_model_has_the_shapes_of_the_specification(folder):
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 512,
    }
    assert {key: config[key] for key in expected} == expected
    assert {key: config[key] for key in TINY} == TINY  # what --check takes it for
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # embedding 512*64; per layer q 64*64+64, k and v 2*(64*32+32), o 64*64, MLP 3*64*128, 2 norms
    layer = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert sum(p.numel() for p in model.parameters()) == 512 * 64 + 2 * layer + 64


def test_tokenizer_maps_bytes_to_their_values_and_survives_loading(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.is_fast
    assert len(tokenizer) == 512
    text = "copy é\n\t  x"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.decode([97, 300, 98, 257, 511], skip_special_tokens=True) == "ab"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == [258, ord("s"), 257, 259, ord("u"), 257, 260]


def test_weights_depend_on_the_seed_alone_and_leave_the_callers_generator_alone(folder, tmp_path):
    torch.manual_seed(123)
    expected_next = torch.rand(3, generator=torch.Generator().manual_seed(123))
    same = build_tiny_model(tmp_path / "same", seed=3)
    assert torch.equal(torch.rand(3), expected_next)
    assert weights_digest(same) == weights_digest(folder)
    other = build_tiny_model(tmp_path / "other", seed=4)
    assert weights_digest(other) != weights_digest(folder)


def test_several_processes_may_build_the_same_folder_at_once(folder, tmp_path):
    context = fork_server()
    results = context.Queue()
    target = tmp_path / "shared"
    children = [
        context.Process(target=build_in_child, args=(target, results), daemon=True)
        for _ in range(2)
    ]
    for child in children:
        child.start()
    assert {results.get(timeout=120) for _ in children} == {weights_digest(folder)}
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]


def test_a_folder_that_holds_something_else_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="not the tiny model of seed 5"):
        build_tiny_model(folder, seed=5)
    with pytest.raises(ValueError, match="it holds None"):
        build_tiny_model(tmp_path)


def test_copy_task_is_ragged_seeded_and_within_64_tokens(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = tiny_rows("train", seed=1)
    assert rows == tiny_rows("train", seed=1)
    assert rows != tiny_rows("train", seed=2)
    assert rows[:128] != tiny_rows("val", seed=1)
    totals = set()
    for row in rows[:200]:
        answer = row["reward_model"]["ground_truth"]
        assert row["prompt"] == [{"role": "user", "content": f"copy {answer}"}]
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)
        totals.add(len(prompt["input_ids"]) + len(tokenizer.encode(answer)) + 1)
    assert len(totals) > 15
    assert max(totals) == 57  # 1 + len("copy ") + 24 + 2 of the prompt, 24 + 1 of the answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abcd", 1.0),
        ("", 0.0),
        ("zzzz", 0.0),
        ("dcba", 0.5),  # right letters, none in its place
        ("abzz", 0.25 / 2 + 0.25 / 2 + 0.5 / 2),
        ("abcdabcd", 0.25 + 0.25 / 2 + 0.5 / 2),  # went on too long
        ("ab", 0.25 / 2 + 0.25 / 2 + 0.5 / 2),  # stopped too early
    ],
)
def test_copy_score_is_graded(text, expected):
    assert copy_scorer.score(text, "abcd") == pytest.approx(expected)
