"""data.mix and data.difficulty: exact shares, an order that is a function of the place in it."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ppo.data.dataset import Prompt
from ppo.data.difficulty import Difficulty
from ppo.data.mix import turns
from ppo.data.rows import DataError
from ppo.data.sampler import PromptSampler
from tests.ppo.data.test_data import load


def prompts(**sizes: int) -> list[Prompt]:
    sources = [name for name, size in sizes.items() for _ in range(size)]
    return [Prompt(uid, [1], source, "", {}, "") for uid, source in enumerate(sources)]


def sources_of(batches: list[list[Prompt]]) -> Counter[str]:
    return Counter(prompt.data_source for batch in batches for prompt in batch)


def uids(batch: list[Prompt]) -> list[int]:
    return [prompt.uid for prompt in batch]


def test_turns_are_those_of_websters_method_and_exact_where_shares_are_whole() -> None:
    weights, counts, expected = [5, 3, 2], [0, 0, 0], []
    for _ in range(40):  # the highest quotient w / (2 n + 1) is next
        best = max(range(3), key=lambda i: (weights[i] / (2 * counts[i] + 1), -i))
        counts[best] += 1
        expected.append(best)
    found = turns(weights, 40)
    assert found.tolist() == expected
    assert np.bincount(found[:10]).tolist() == [5, 3, 2]
    assert np.bincount(found).tolist() == [20, 12, 8]
    for size in range(1, 40):
        shares = np.array(weights) / 10 * size
        assert np.abs(np.bincount(found[:size], minlength=3) - shares).max() <= 1


def test_an_epoch_has_the_shares_of_the_mix_and_small_sources_come_again() -> None:
    data = prompts(small=4, large=20)
    sampler = PromptSampler(data, batch_size=6, mix={"large": 1, "small": 1}, epochs=2)
    assert len(sampler) == 4  # an epoch is as many prompts as there are
    batches = [sampler.next_batch() for _ in range(8)]
    assert not sampler.has_next() and sampler.epoch == 1
    assert all(sources_of([batch]) == {"small": 3, "large": 3} for batch in batches)
    drawn = [p.uid for batch in batches for p in batch]
    small = [uid for uid in drawn if uid < 4]
    for start in range(0, 24, 4):  # pass after pass, each in an order of its own
        assert sorted(small[start : start + 4]) == [0, 1, 2, 3]
    assert len({tuple(small[start : start + 4]) for start in range(0, 24, 4)}) > 1
    large = [uid for uid in drawn if uid >= 4]
    assert sorted(large[:20]) == list(range(4, 24))  # the rest of a pass comes in the next epoch


def test_a_weight_of_zero_leaves_prompts_out_of_the_epoch() -> None:
    sampler = PromptSampler(prompts(a=6, b=9), batch_size=2, mix={"a": 2.5, "b": 0})
    assert len(sampler) == 3
    assert sources_of([sampler.next_batch() for _ in range(6)]) == {"a": 12}


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        (
            {"a": 1, "c": 1},
            r"data\.mix\.c: neither a data source .*; the data sources are 'a', 'b'",
        ),
        ({"a": 1}, r"data\.mix: has no weight for data source 'b'; 0 leaves"),
    ],
)
def test_names_that_the_prompts_do_not_have_are_refused(mix, words) -> None:
    with pytest.raises(DataError, match=words):
        PromptSampler(prompts(a=3, b=3), batch_size=2, mix=mix)


def write(path: Path, **sizes: int) -> Path:
    rows = [{"prompt": f"x{i}", "data_source": n} for n, size in sizes.items() for i in range(size)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_mix_may_name_files_and_no_prompt_twice(tmp_path, monkeypatch) -> None:
    files = [write(tmp_path / "one.jsonl", a=4, b=2), write(tmp_path / "two.jsonl", b=6)]
    data = load([str(file) for file in files])
    monkeypatch.chdir(tmp_path)
    sampler = PromptSampler(data, batch_size=4, mix={"./one.jsonl": 3, f"{tmp_path}/t*.jsonl": 1})
    drawn = [p for _ in range(len(sampler)) for p in sampler.next_batch()]
    assert Counter(p.where.split(",")[0] for p in drawn) == {str(files[0]): 9, str(files[1]): 3}
    with pytest.raises(DataError, match=r"data\.mix\.b: means data source 'b' in .*one.*jsonl\.?"):
        PromptSampler(data, batch_size=4, mix={"one.jsonl": 1, "b": 1})


def difficulty(size: int = 12, share: float = 0.25) -> Difficulty:
    return Difficulty(size, share=share, visits=2, seed=1)


def test_what_was_always_right_comes_in_every_fourth_pass_until_it_is_wrong() -> None:
    sampler = PromptSampler(prompts(a=12), batch_size=3, difficulty=difficulty(), seed=3)
    easy, seen = set(range(6)), Counter[int]()
    for step in range(400):
        batch = sampler.next_batch()
        sampler.note(batch, [uid in easy for uid in uids(batch)])
        if step >= 40:
            seen.update(uids(batch))
    assert sampler.pooled == 0.5
    passes = np.mean([seen[uid] for uid in range(6, 12)])
    for uid in range(12):
        assert seen[uid] == pytest.approx(passes * (0.25 if uid in easy else 1), abs=2)
    easy.clear()  # forgotten: at its next turn each leaves the pool
    for _ in range(40):
        batch = sampler.next_batch()
        sampler.note(batch, [False] * 3)
    assert sampler.pooled == 0.0


def test_one_visit_is_not_enough_and_a_failed_reward_is_no_visit() -> None:
    sampler = PromptSampler(prompts(a=2), batch_size=2, difficulty=difficulty(2))
    for right, pooled in ((True, 0.0), (None, 0.0), (True, 1.0), (None, 1.0), (False, 0.0)):
        sampler.note(sampler.next_batch(), [right, right])
        assert sampler.pooled == pooled


@pytest.mark.parametrize("mix", [None, {"a": 1, "b": 3}])
def test_a_restart_goes_on_bitwise_from_any_batch(mix) -> None:
    def make() -> PromptSampler:
        return PromptSampler(
            prompts(a=5, b=7), batch_size=5, drop_last=False, mix=mix, difficulty=difficulty()
        )

    def step(sampler: PromptSampler) -> list[int]:
        batch = sampler.next_batch()
        sampler.note(batch, [p.uid % 3 == 0 for p in batch])
        return uids(batch)

    whole, first = make(), make()
    expected = [step(whole) for _ in range(40)]
    for stop in range(40):
        saved = json.loads(json.dumps(first.state_dict()))
        again = make()
        again.load_state_dict(saved)
        assert [step(again) for _ in range(3)][: 40 - stop] == expected[stop : stop + 3]
        step(first)
    assert whole.state_dict()["epoch"] == 13  # three batches of 5, 5, 2 an epoch


def test_the_state_of_many_prompts_is_small_and_that_of_others_begins_anew(caplog) -> None:
    large = Difficulty(1_800_000, share=0.1, visits=3, seed=0)
    generator = np.random.default_rng(0)
    large.note((int(i), True) for i in generator.integers(0, 1_800_000, 20_000))
    assert len(large.state()) < 100_000
    sampler = PromptSampler(prompts(a=12), batch_size=3, difficulty=difficulty())
    state = sampler.state_dict()
    state["streaks"] = difficulty(8).state()
    sampler.load_state_dict(state)
    assert "of 8 prompts, not 12: they begin anew" in caplog.text
