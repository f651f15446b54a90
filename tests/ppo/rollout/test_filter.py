"""Dynamic sampling: which groups of a round are kept, when there are enough, what waits."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ppo.batch.samples import Samples, joined, of_prompts
from ppo.config import ConfigError, load_config
from ppo.data.dataset import Prompt
from ppo.data.difficulty import Difficulty
from ppo.data.sampler import PromptSampler
from ppo.engines.contract import Completion, Completions
from ppo.metrics import Metrics
from ppo.rollout.filter import GroupPool, NothingToLearn, judge
from ppo.rollout.overlong import overlong_penalty, penalise_overlong
from sharding.mesh import build_mesh, init_distributed
from tests.ppo.batches import make_samples


def prompt(uid: int) -> Prompt:
    return Prompt(uid, [7, uid], "src", {"truth": uid}, {"index": uid}, "p", f"row {uid}")


def scored(scores: Sequence[float | None], n: int, first: int = 0, **extra: Any) -> Samples:
    """n responses of 1, 2, ... tokens a prompt; None: the reward failed. extra: its entries."""
    prompts = [prompt(first + i) for i in range(len(scores) // n)]
    samples = make_samples(
        prompts,
        [Completion([5 + i] * (i + 1), [-0.1 * i] * (i + 1), "stop") for i in range(len(scores))],
    )
    samples.failed = torch.tensor([score is None for score in scores])
    samples.scores = torch.tensor([score or 0.0 for score in scores])
    samples.failures = ["error" if score is None else None for score in scores]
    samples.components = [
        {"function": score or 0.0, **{f"extra/{k}": extra[k][i] for k in extra}}
        for i, score in enumerate(scores)
    ]
    return samples


def test_a_group_is_kept_when_two_of_its_responses_differ_and_else_told_why_not():
    scores = [1, 0, 1, 1, 0, 0, None, 1, None, None, -1, -1, 2, 3]
    values = torch.tensor([0.0 if s is None else s for s in scores], dtype=torch.float64)
    found = judge(values, torch.tensor([s is not None for s in scores]), 2)
    assert found.kept.tolist() == [True, False, False, False, False, False, True]
    assert found.right.tolist() == [False, True, False, False, False, False, False]
    assert found.wrong.tolist() == [False, False, True, False, False, True, False]
    assert found.failed.tolist() == [False, False, False, True, True, False, False]


def test_a_failed_response_leaves_the_judgement_to_its_siblings():
    values = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 1.0], dtype=torch.float64)
    known = torch.tensor([False, True, True, False, True, True])
    assert judge(values, known, 3).kept.tolist() == [False, True]


def test_samples_of_some_prompts_and_of_several_batches_keep_all_that_is_known_of_them():
    first, second = scored([0, 1, 2, None, 4, 5], 2), scored([6, 7], 2, first=9)
    first.greedy_scores, second.greedy_scores = torch.tensor([1.0, 2, 3]), torch.tensor([4.0])
    some = joined([of_prompts(first, [1, 2]), second])
    assert [p.uid for p in some.prompts] == [1, 2, 9] and some.numbers == [0, 1, 2, 3, 4, 5]
    assert some.scores.tolist() == [2, 0, 4, 5, 6, 7] and some.failed.tolist()[1]
    assert some.completions.lengths == [3, 4, 5, 6, 1, 2]
    assert [some.completions.ids[a] for a, _ in some.completions.borders()] == [7, 8, 9, 10, 5, 6]
    assert some.completions.logprobs[0] == pytest.approx(-0.2)
    assert some.components[-1] == {"function": 7.0} and some.failures[1] == "error"
    assert some.greedy_scores is not None and some.greedy_scores.tolist() == [2, 3, 4]
    assert [some.prompt(i).uid for i in range(6)] == [1, 1, 2, 2, 9, 9]


def test_a_rank_without_samples_follows_the_numbers_of_the_others():
    whole = scored([0, 1, 2, 3], 2)
    mine = Samples(prompts=whole.prompts, n=2, numbers=[], completions=Completions.of([]), texts=[])
    some = joined([of_prompts(mine, [1]), of_prompts(whole, [0])])
    assert (some.total, some.numbers, some.scores.tolist()) == (4, [2, 3], [0, 1])


def pool_of(mesh: Any, *overrides: str, rows: int = 64, surplus: Any = None) -> GroupPool:
    """A pool for iterations of 4 prompts, in rounds of 3; 2 responses each."""
    keys = ("enable=true", *overrides)
    config = load_config(
        "ppo_tiny.yaml",
        [
            *("data.train_batch_size=4", "data.gen_batch_size=3", "actor.ppo_mini_batch_size=2"),
            *("rollout.n=2", "trainer.total_training_steps=null"),
            *(f"algorithm.filter_groups.{key}" for key in keys),
        ],
    )
    prompts: Any = [prompt(i) for i in range(rows)]
    sampler = PromptSampler(prompts, batch_size=3, epochs=1)
    pool = GroupPool(config, mesh, sampler, surplus)
    return pool


def test_what_a_round_says_of_its_prompts_goes_to_the_sampler(mesh):
    config = load_config("ppo_tiny.yaml", ["rollout.n=2", "data.train_batch_size=4"])
    prompts: Any = [prompt(i) for i in range(4)]
    pooled = Difficulty(4, share=0.5, visits=1, seed=0)
    sampler = PromptSampler(prompts, batch_size=4, shuffle=False, difficulty=pooled)
    pool = GroupPool(config, mesh, sampler)
    rounds(pool, scored([1, 1, 1, 0, None, 2, None, None], 2))  # the last says nothing
    assert [pooled.skips(i, n) for i in range(4) for n in range(2)].count(True) == 2
    metrics = Metrics()
    pool.take(metrics)
    assert metrics.reduce() == {"training/pooled": 0.5}


def rounds(pool: GroupPool, *batches: Samples) -> None:
    for samples in batches:
        assert pool.wants_more()
        pool._sampler.next_batch()
        pool.add(samples)


@pytest.fixture(scope="module")
def mesh():
    with init_distributed(torch.device("cpu")):
        dims = load_config("ppo_tiny.yaml").dims(1, 1)
        yield build_mesh(dims, torch.device("cpu"))


def taken(pool: GroupPool) -> tuple[list[int], dict[str, float]]:
    """Prompts of the iteration, and what is logged."""
    metrics = Metrics()
    found = pool.take(metrics)
    values = {k.removeprefix("filter_groups/"): v for k, v in metrics.reduce().items()}
    return [p.uid for p in found.prompts], values


MIXED, EQUAL = [1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 1, 1]


def test_rounds_go_on_until_there_are_enough_and_the_rest_is_dropped(mesh):
    pool = pool_of(mesh)
    rounds(pool, scored(MIXED, 2), scored(EQUAL, 2, 3), scored([0, 1, 1, 0, 0, 2], 2, 6))
    assert not pool.wants_more()
    prompts, values = taken(pool)
    assert prompts == [0, 2, 6, 7]  # in the order in which they were drawn
    assert values == {
        **{"num_gen_batches": 3, "kept": 4, "surplus": 1},
        **{"dropped_right": 3, "dropped_wrong": 1, "dropped_failed": 0},
    }
    rounds(pool, scored([0, 1] * 3, 2, 9), scored([0, 1] * 3, 2, 12))
    assert taken(pool)[0] == [9, 10, 11, 12]  # nothing has waited


def test_the_rest_waits_for_the_next_iteration_and_for_a_restart(mesh):
    pool = pool_of(mesh, "surplus=keep")
    rounds(pool, scored([0, 1] * 3, 2), scored([0, 1, 1, 0, 0, 2], 2, 3))
    assert taken(pool)[0] == [0, 1, 2, 3]
    state = json.loads(json.dumps(pool.surplus()()))
    again = pool_of(mesh, "surplus=keep", surplus=state)
    found = []
    for each in (pool, again):
        rounds(each, scored([0, 1] * 3, 2, 6))
        samples = each.take(Metrics())
        found.append(samples)
        assert [p.uid for p in samples.prompts] == [4, 5, 6, 7]
    one, other = found
    dropped = pool_of(mesh, "surplus=keep", surplus=state)
    assert dropped.drop_surplus()() is None and dropped._waiting == []
    for changed in ({"n": 3}, {"samples": []}):  # accepted changes of the configuration
        assert pool_of(mesh, "surplus=keep", surplus=state | changed)._waiting == []
    assert pool_of(mesh, "enable=false", surplus=state)._waiting == []
    assert one.prompts == other.prompts and one.texts == other.texts
    assert one.scores.tolist() == other.scores.tolist() == [1, 0, 0, 2, 0, 1, 0, 1]
    assert one.completions.ids.tolist() == other.completions.ids.tolist()
    assert one.completions.logprobs.tobytes() == other.completions.logprobs.tobytes()
    assert one.components == other.components


def test_at_the_limit_of_rounds_an_iteration_trains_on_what_is_there(mesh, caplog):
    pool = pool_of(mesh, "max_num_gen_batches=2")
    rounds(pool, scored(MIXED, 2), scored(EQUAL, 2, 3))
    assert not pool.wants_more()
    prompts, values = taken(pool)
    assert prompts == [0, 2] and values["kept"] == 2
    assert "2 of 4 groups differ in the score after 2 rounds of 3 prompts" in caplog.text


@pytest.mark.parametrize(("limit", "most"), [(2, 2), (0, 21)])  # 64 prompts, 3 in a round
def test_an_iteration_without_any_group_is_an_error_and_never_goes_on_for_ever(mesh, limit, most):
    pool = pool_of(mesh, f"max_num_gen_batches={limit}")
    pool._sampler._epochs = 2
    rounds(pool, *(scored(EQUAL, 2, 3 * i) for i in range(most)))
    assert not pool.wants_more()
    said = rf"0 of 4 groups .* after {most} rounds .*\({2 * most} all right, {most} all wrong"
    with pytest.raises(NothingToLearn, match=said):
        pool.take(Metrics())


def test_at_the_end_of_the_prompts_an_iteration_without_a_group_counts_no_sample(mesh, caplog):
    pool = pool_of(mesh, rows=7)
    rounds(pool, scored(EQUAL, 2), scored(EQUAL, 2, 3))
    assert not pool.wants_more()  # one prompt is left of 7, and no batch
    samples = pool.take(Metrics())
    assert samples.failed.all() and "have come to their end" in caplog.text


def test_the_metric_may_be_an_entry_of_the_rewards_dict_and_must_be_there(mesh):
    pool = pool_of(mesh, "metric=acc")
    rounds(pool, scored([3, 4, 5, 5, 1, 1], 2, acc=[1, 1, 0, 1, 0, 0]))
    rounds(pool, scored([2, 2] * 3, 2, 3, acc=[0, 1] * 3))
    assert taken(pool)[0] == [1, 3, 4, 5]
    plain = pool_of(mesh, "metric=acc")  # of a function that returns a number
    rounds(plain, scored(MIXED, 2), scored(MIXED, 2, 3))
    assert taken(plain)[0] == [0, 2, 3, 5]
    other = pool_of(mesh, "metric=accuracy")
    with pytest.raises(ConfigError, match="no such entry; use score or acc or other"):
        other.add(scored(MIXED, 2, acc=[0] * 6, other=[0] * 6))


def test_without_filter_groups_an_iteration_has_one_round_and_takes_all_of_it(mesh):
    pool = pool_of(mesh, "enable=false")
    samples = scored(EQUAL, 2)
    rounds(pool, samples)
    assert not pool.wants_more() and pool.take(Metrics()) is samples and pool.wants_more()


def test_the_overlong_penalty_by_hand():
    lengths = torch.tensor([50, 80, 85, 90, 100])
    found = overlong_penalty(lengths, longest=100, buffer=20, factor=2.0)
    assert found.tolist() == pytest.approx([0, 0, -0.5, -1.0, -2.0])
    assert overlong_penalty(torch.zeros(0), longest=9, buffer=3, factor=1.0).shape == (0,)


def test_the_overlong_penalty_is_a_part_of_the_score_with_a_name():
    config = load_config("ppo_tiny.yaml", ["reward.overlong_buffer.len=31", "reward.manager=dapo"])
    samples, metrics = scored([1.0] * 4, 2), Metrics()  # of 1 to 4 tokens, of 32
    penalise_overlong(samples, config, metrics)
    assert samples.scores.tolist() == pytest.approx([1 - i / 31 for i in range(4)])
    assert samples.components[2] == {"function": 1.0, "overlong": pytest.approx(-2 / 31)}
    values = metrics.reduce()
    assert values["reward/overlong_penalty"] == pytest.approx(-6 / 31 / 4)
    assert values["reward/overlong"] == 0.75


def test_a_sampler_knows_when_its_epochs_hold_no_other_batch():
    prompts: Any = [prompt(i) for i in range(7)]
    sampler = PromptSampler(prompts, batch_size=3, epochs=2)
    left = []
    for _ in range(4):
        assert sampler.has_next()
        sampler.next_batch()
        left.append(sampler.has_next())
    assert left == [True, True, True, False]
    assert PromptSampler(prompts, batch_size=3).has_next()
