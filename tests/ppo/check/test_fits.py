"""The largest budgets are the last that fit, and engines size their caches by the plan's rule."""

from dataclasses import replace

import pytest

from ppo.check.fits import fits, largest_budgets, largest_cache
from ppo.check.memory_phases import Plan, kv_cache, phases
from ppo.check.preflight import find_models, plan_of
from ppo.config import load_config, with_values
from ppo.model_shapes import embedded_cache, held_sequences


def plan_for(*overrides: str, gib: float = 80.0) -> Plan:
    config = load_config("ppo.yaml", [f"check.device_memory_gib={gib}", *overrides])
    return plan_of(config, config.dims(8, 8), find_models(config).shapes)


def with_value(plan: Plan, key: str, value: float) -> Plan:
    return replace(plan, config=with_values(plan.config, {key: value}))


def test_the_largest_token_budget_fits_and_one_token_more_does_not() -> None:
    plan = plan_for(
        *("data.max_response_length=7680", "model.checkpoint_policy=selective"),
        *("actor.ppo_max_token_len_per_gpu=8192", "critic.ppo_max_token_len_per_gpu=8192"),
    )
    found = largest_budgets(plan)
    assert [each.key.partition(".")[0] for each in found] == ["actor", "critic"]
    for each in found:
        assert each.value is not None and 8192 <= each.value < each.tokens == 32 * 8192
        assert fits(with_value(plan, each.key, each.value))
        assert not fits(with_value(plan, each.key, each.value + 1))
    small = largest_budgets(plan_for())
    assert all(each.value == each.tokens == 32 * 1024 for each in small)
    assert all(each.value is None for each in largest_budgets(plan_for(gib=16)))


def test_the_largest_cache_fits_and_one_per_cent_more_does_not() -> None:
    plan = plan_for()
    best = largest_cache(plan)
    assert best is not None and best.value is not None and best.value > 0.5
    made = with_value(plan, best.key, best.value)
    assert fits(made) and kv_cache(made).tokens == best.tokens > kv_cache(plan).tokens
    assert not fits(with_value(plan, best.key, best.value + 0.01))
    assert largest_cache(plan_for(gib=20)) is None


def test_an_engine_generates_as_many_sequences_as_its_cache_holds_of_a_quarter_of_the_longest():
    assert held_sequences(483_328, 1032) == 4 * 483_328 // 1032
    assert held_sequences(10_000, 8192) == 256
    assert held_sequences(10**7, 1024) == 4096
    plan = plan_for("data.max_response_length=1536", "data.train_batch_size=16384")
    assert kv_cache(plan).sequences == 4 * kv_cache(plan).tokens // (2048 + 8)
    assert kv_cache(plan_for("rollout.max_num_seqs=64")).sequences == 64


def test_rows_of_the_embedded_engine_fill_its_share_of_what_is_free() -> None:
    keys = {"longest": 1024, "token_bytes": 1 << 20, "max_num_seqs": None, "utilization": 0.6}
    gib = 1 << 30
    for sequences, rows in ((8, 8), (100, 38)):  # 80 - 10 used - 32 for the others
        found = embedded_cache(sequences, **keys, device_bytes=80 * gib, free_bytes=70 * gib)
        assert found[:3] == (rows * 1024, rows * gib, rows)
    # a state of 1 GiB beside the 1 GiB of tokens: 28 GiB hold half as many rows
    states = embedded_cache(
        100, **keys, device_bytes=80 * gib, free_bytes=70 * gib, state_bytes=gib
    )
    assert states[:3] == (19 * 1024, 38 * gib, 19)
    assert embedded_cache(9, **keys, device_bytes=80 * gib, free_bytes=30 * gib).tokens == 0
    assert embedded_cache(900, **keys, device_bytes=None, free_bytes=0).sequences == 256


@pytest.mark.parametrize("key", ["actor.fsdp.optimizer_on_host", "actor.fsdp.optimizer_offload"])
def test_moments_on_the_host_are_no_part_of_the_device(key: str) -> None:
    def train(plan: Plan) -> dict[str, float]:
        [phase] = [phase for phase in phases(plan) if phase.name == "train actor"]
        kinds: dict[str, float] = {}
        for item in phase.items:
            kinds[item.kind] = kinds.get(item.kind, 0) + item.bytes
        return kinds

    usual, moved = train(plan_for()), train(plan_for(f"{key}=true"))
    if key.endswith("offload"):
        assert moved["optimizer"] == pytest.approx(usual["optimizer"] / 2, rel=0.1)  # the critic's
    else:
        assert "optimizer" not in moved and moved["gradients"] < usual["gradients"]
