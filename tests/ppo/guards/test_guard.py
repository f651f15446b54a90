"""When rules hold and fire, what they change, and what survives a restart and a rollback."""

import json
import math
from typing import Any

import pytest
import torch

from ppo.check.rules import check_config
from ppo.config import ConfigError, GuardsConfig, Rule, from_yaml, load_config, parse_rule, to_yaml
from ppo.guards.guard import Guard, GuardAbort

REQUIRED = ("model.path=tiny", "data.train_files=tiny")
NORM = torch.tensor(1.0)


def rule(**raw: Any) -> Rule:
    return parse_rule(raw, max_fires=3)


def guard_of(*rules: Rule) -> Guard:
    return Guard(rules)


def end(guard: Guard, step: int, **values: float) -> dict[str, float]:
    """One iteration of which only its end is looked at."""
    guard.before_update(step, {})
    return guard.after_step(step, {name.replace("__", "/"): x for name, x in values.items()})


def judge(guard: Guard, model: str, norm: float = 1.0, memory: float = 0.0, **sums: Any) -> Any:
    known = {name: sums.get(name.rpartition("/")[2], (0.0, 0.0)) for name in guard.watched(model)}
    return guard.judge(model, torch.tensor(norm), known, memory)


@pytest.mark.parametrize(
    ("condition", "value", "before", "holds"),
    [
        ({"above": 1.0}, 1.0, None, False),
        ({"above": 1.0}, 1.01, None, True),
        ({"above": 1.0}, math.inf, None, True),
        ({"above": 1.0}, math.nan, None, False),
        ({"below": 0.5}, 0.49, None, True),
        ({"below": 0.5}, math.nan, None, False),
        ({"not_finite": True}, math.nan, None, True),
        ({"not_finite": True}, -math.inf, None, True),
        ({"not_finite": True}, 1e30, None, False),
        ({"change": 0.2}, 5.0, None, False),
        ({"change": 0.2}, 0.79, 1.0, True),
        ({"change": 0.2}, 1.19, 1.0, False),
        ({"change": 0.2}, -1.3, -1.0, True),
        ({"change": 0.2}, 1e-4, 0.0, False),  # of nothing everything would be a swing
        ({"change": 0.2}, math.nan, 1.0, False),
    ],
)
def test_when_a_rule_holds(condition, value, before, holds):
    assert (
        rule(metric="critic/score/mean", action="warn", **condition).holds(value, before) == holds
    )


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"metric": "a", "above": 1, "action": "warn", "step": 2}, "step is no key of a rule"),
        ({"above": 1, "action": "warn"}, "needs metric"),
        ({"metric": "a", "action": "warn"}, "needs one of above, below, not_finite, change"),
        ({"metric": "a", "above": 1, "below": 2, "action": "warn"}, "needs one of"),
        ({"metric": "a", "above": "x", "action": "warn"}, "above needs a number"),
        ({"metric": "a", "change": 0, "action": "warn"}, "a number above 0"),
        ({"metric": "a", "not_finite": False, "action": "warn"}, "not_finite is true"),
        ({"metric": "a", "above": 1}, "action is one or several of"),
        ({"metric": "a", "above": 1, "action": "explode"}, "not 'explode'"),
        ({"metric": "a", "above": 1, "action": "scale_lr"}, "scale_lr needs a factor"),
        ({"metric": "a", "above": 1, "action": "set_lr -1"}, "needs a learning rate"),
        ({"metric": "a", "above": 1, "action": "set_lr 5"}, "above 0 and at most 1: set_lr 1e-6"),
        ({"metric": "a", "above": 1, "action": []}, "action is one or several of"),
        ({"metric": "", "above": 1, "action": "warn"}, "needs metric"),
        ({"metric": "a", "above": 1, "action": "abort 1"}, "abort takes no number"),
        ({"metric": "a", "above": 1, "action": "warn", "for_steps": 0}, "for_steps is a whole"),
        ({"metric": "a", "above": 1, "action": "warn", "max_fires": 1.5}, "max_fires is a whole"),
        ({"metric": "critic/score/mean", "above": 1, "action": "stop_epoch"}, "each mini-batch"),
        ({"metric": "actor/grad_norm", "change": 1, "action": "stop_epoch"}, "each mini-batch"),
        ({"metric": "actor/entropy", "above": 1, "action": "halve_budget"}, "each mini-batch"),
        ({"metric": "perf/mfu/actor", "below": 1, "action": "skip_update"}, "before an update"),
    ],
)
def test_a_rule_that_cannot_work_is_a_problem_of_the_configuration(raw, words):
    with pytest.raises(ValueError, match=words.replace("(", ".")):
        parse_rule(raw, max_fires=3)
    text = json.dumps([raw])

    def check(config):
        return check_config(config, world_size=1, ranks_per_node=1)

    with pytest.raises(ConfigError) as caught:
        load_config(None, [*REQUIRED, f"guards.rules={text}"], check=check)
    assert caught.value.problems[0].startswith("guards.rules[0] = ")


def test_rules_are_read_from_yaml_and_written_again():
    text = "[{metric: actor/grad_norm, above: 1e4, action: [scale_lr 0.5, rollback]}]"
    config = load_config(None, [*REQUIRED, "guards.preset=none", f"guards.rules={text}"])
    [found] = from_yaml(to_yaml(config)).guards.all_rules()
    assert str(found) == "actor/grad_norm above 10000: scale_lr 0.5, rollback"
    assert (found.max_fires, found.for_steps) == (3, 1)


def test_the_presets_are_what_the_specification_says():
    default = [str(r) for r in GuardsConfig().all_rules()]
    assert default == [
        "actor/pg_loss not finite: skip_update",
        "critic/vf_loss not finite: skip_update",
        "actor/grad_norm not finite: skip_update",
        "critic/grad_norm not finite: skip_update",
        "perf/max_memory_share above 0.92: halve_budget",
        "actor/ppo_kl_k3 above 0.15: stop_epoch",
    ]
    strict = [str(r) for r in GuardsConfig(preset="strict", target_ppo_kl=0.2).all_rules()]
    assert strict[:5] == default[:5] and strict[5:] == [
        "actor/ppo_kl_k3 above 0.3: stop_epoch",
        "actor/ppo_kl_k3 above 1: stop_epoch, rollback",
        "actor/ref_kl above 0.05: scale_kl_coef 1.5",
        "actor/ref_kl above 0.1: skip_update",
        "actor/ref_kl above 0.2: set_lr 1e-06",
        "critic/score/mean changed by more than 20 %: scale_lr 0.5, rollback",
        "actor/pg_loss not finite: halve_budget",
        "critic/vf_loss not finite: halve_budget",
        "actor/grad_norm above 10000: skip_update",
        "critic/grad_norm above 10000: skip_update",
        "critic/vf_loss not finite: reset_critic",
    ]
    assert GuardsConfig(preset="none").all_rules() == []


def test_a_mini_batch_is_left_out_where_a_loss_or_gradient_is_not_finite():
    guard = Guard(GuardsConfig().all_rules())
    guard.before_update(1, {})
    assert not judge(guard, "actor", pg_loss=(1.0, 1.0)).skip
    verdict = judge(guard, "actor", norm=math.nan, pg_loss=(torch.tensor(math.nan), 1.0))
    assert (verdict.skip, verdict.stop) == (True, False) and math.isnan(verdict.norm)
    assert judge(guard, "critic", vf_loss=(math.inf, 1.0)).skip
    assert guard.after_step(1, {}) == {"guard/skip_update": 2.0}
    nothing = Guard()
    nothing.before_update(1, {})
    assert judge(nothing, "actor", norm=math.inf).skip  # whatever the rules


def test_an_epoch_stops_by_the_mean_over_tokens_and_memory_halves_the_budget():
    guard = Guard(GuardsConfig().all_rules())
    guard.before_update(1, {})
    assert not judge(guard, "actor", ppo_kl_k3=(torch.tensor(1.4), 10)).stop
    verdict = judge(guard, "actor", ppo_kl_k3=(torch.tensor(1.6), 10))
    assert (verdict.stop, verdict.skip, verdict.halve) == (True, True, False)
    verdict = judge(guard, "critic", memory=0.93)
    assert (verdict.stop, verdict.skip, verdict.halve) == (False, False, True)
    assert guard.after_step(1, {}) == {"guard/halve_budget": 1.0, "guard/stop_epoch": 1.0}


def test_factors_stay_and_act_on_the_model_of_the_metric(caplog):
    guard = guard_of(
        rule(metric="actor/ref_kl", above=0.2, action=["scale_lr 0.5", "scale_kl_coef 1.5"]),
        rule(metric="critic/vf_explained_var", below=0, action="set_lr 1e-6"),
    )
    found = end(guard, 1, actor__ref_kl=0.3, critic__vf_explained_var=-1.0)
    assert found["guard/scale_lr"] == 1 and found["guard/lr_factor/actor"] == 0.5
    end(guard, 2, actor__ref_kl=0.3)
    assert guard.adjusted_lr("actor", 8.0) == 2.0 and guard.adjusted_lr("critic", 8.0) == 1e-6
    assert guard.state.kl_factor == 2.25
    text = "step 1: actor/ref_kl = 0.3, above 0.2: scale_lr 0.5, scale_kl_coef 1.5"
    assert text in caplog.text


def test_a_rule_for_several_steps_fires_when_they_were_in_a_row_and_is_said_once(caplog):
    guard = guard_of(rule(metric="m", above=1, for_steps=3, action="warn"))
    for step, value in enumerate([2, 2, 0, 2, 2, 2, 2, 0], start=1):
        end(guard, step, m=value)
        assert bool(guard.alarms) == (value == 2)
    assert [record.message[:7] for record in caplog.records] == ["step 6:"]
    end(guard, 9)  # not measured: nothing is known
    assert not guard.alarms


def test_a_rule_that_says_what_another_one_says_takes_its_place():
    raw = {"metric": "a", "above": 1, "action": "scale_lr 0.5", "for_steps": 2}
    guard = guard_of(rule(**raw), rule(**raw, max_fires=None))
    assert end(guard, 1, a=2) == {}
    assert end(guard, 2, a=2) == {"guard/scale_lr": 1, "guard/lr_factor/actor": 0.5}
    assert guard.state.held == {"a above 1 for 2 steps: scale_lr 0.5": 2}
    assert guard.state.fires == {}


def test_a_swing_is_of_the_last_step_that_was_not_undone():
    guard = guard_of(rule(metric="m", change=0.2, action="rollback", max_fires=None))
    swings = []
    for step, value in enumerate([1.0, 1.1, 0.5, 1.0, 1.15, 2.0], start=1):
        end(guard, step, m=value)
        swings.append(guard.rolls_back)
    assert swings == [False, False, True, False, False, True]


def test_a_rule_that_fires_for_ever_ends_the_run_and_an_alarm_does_not():
    guard = guard_of(
        rule(metric="m", above=1, action="rollback"), rule(metric="n", above=1, action="warn")
    )
    for step in (1, 2, 3, 22, 23):  # 1 and 2 are forgotten by then
        end(guard, step, m=2.0, n=2.0)
        guard.raise_abort()
    end(guard, 24, n=2.0)
    guard.raise_abort()
    end(guard, 25, m=2.0)
    end(guard, 26, m=2.0)
    with pytest.raises(GuardAbort, match="m above 1: rollback fired 4 times within 20 steps"):
        guard.raise_abort()


def test_abort_names_the_rule_and_the_value():
    guard = guard_of(rule(metric="m", below=0, action="abort"))
    end(guard, 1, m=-3.0)
    with pytest.raises(GuardAbort, match=r"m below 0: abort: m = -3"):
        guard.raise_abort()


def test_the_state_survives_as_json_and_goes_on_bitwise():
    rules = (
        rule(metric="m", above=1, for_steps=2, action="scale_lr 0.3"),
        rule(metric="m", change=0.5, action=["rollback"]),
    )
    one = guard_of(*rules)
    values = [0.0, 2.0, 2.0, 2.5, 0.1, 2.0]
    for step, value in enumerate(values, start=1):
        end(one, step, m=value)
        if step == 3:
            other = guard_of(*rules)
            other.load_state_dict(json.loads(json.dumps(one.state_dict())))
        elif step > 3:
            end(other, step, m=value)
    assert other.state == one.state and one.state.lr_factor == {"actor": 0.09}


def test_a_rollback_takes_back_the_schedule_and_the_critics_age_alone():
    guard = guard_of(rule(metric="m", above=1, action=["scale_lr 0.5", "rollback"]))
    saved = {"step": 4, "guard": json.loads(json.dumps(guard.state_dict()))}
    guard.critic_is_new(5)
    end(guard, 7, m=2.0)
    guard.rolled_back(7, saved)
    assert guard.schedule_step(8) == 5 and guard.state.critic_since == 0
    assert guard.state.lr_factor == {"actor": 0.5} and len(guard.state.fires) == 1
    later = {"step": 9, "guard": json.loads(json.dumps(guard.state_dict()))}  # place 6
    guard.rolled_back(10, later)
    assert guard.schedule_step(11) == 7


def test_a_new_critic_warms_up_again():
    guard = Guard((), critic_warmup=2)
    assert [guard.trains_actor(step) for step in (1, 2, 3)] == [False, False, True]
    guard.critic_is_new(5)
    assert [guard.trains_actor(step) for step in (6, 7, 8)] == [False, False, True]


def test_an_update_is_left_out_by_what_is_known_before_it():
    guard = Guard(GuardsConfig(preset="strict").all_rules())
    assert not guard.before_update(1, {"actor/ref_kl": 0.09})
    assert guard.before_update(2, {"actor/ref_kl": 0.11})
    assert guard.after_step(2, {"actor/ref_kl": 0.11}) == {
        "guard/scale_kl_coef": 1.0,
        "guard/skip_update": 1.0,
        "guard/kl_factor": 1.5,
    }


def test_an_engine_that_disagrees_is_said_once_with_what_to_do(caplog):
    config = load_config(None, [*REQUIRED, "trainer.alarms.ref_kl=null"])
    assert not [r for r in config.trainer.alarms.rules() if r.metric == "actor/ref_kl"]
    guard = Guard(config.trainer.alarms.rules())
    for step, value in enumerate([0.009, 0.02, 0.3, 0.009, math.nan, 0.0], start=1):
        end(guard, step, training__rollout_probs_diff_mean=value)
        assert bool(guard.alarms) == (step in (2, 3, 5))
    first, second = (record.message for record in caplog.records)
    assert first.startswith("step 2: training/rollout_probs_diff_mean = 0.02, above 0.01: compare")
    assert second.startswith("step 5: training/rollout_probs_diff_mean = nan, not finite")


def test_lengths_may_drift_up_or_down(caplog):
    guard = Guard(load_config(None, list(REQUIRED)).trainer.alarms.rules())
    for step, value in enumerate([1.0, 3.1, 0.3, 0.4], start=1):
        end(guard, step, response_length__drift=value)
    assert [record.message[:6] for record in caplog.records] == ["step 2", "step 3"]


def test_trainer_and_engine_that_differ_in_float32_end_the_run():
    def ends(*overrides: str) -> bool:
        config = load_config("ppo_tiny.yaml", list(overrides))
        guard = Guard(config.watched_rules())
        guard.before_update(1, {})
        guard.after_step(1, {"training/rollout_probs_diff_mean": 0.02})
        try:
            guard.raise_abort()
        except GuardAbort as error:
            assert "training/rollout_probs_diff_mean above 0.01" in str(error)
            return True
        return False

    assert ends()
    assert not ends("rollout.dtype=bfloat16")
    assert not ends("actor.fsdp.mixed_precision.param_dtype=bfloat16")
    assert not ends("guards.preset=none")
    assert not ends("trainer.alarms.rollout_probs_diff_mean=0.05")
