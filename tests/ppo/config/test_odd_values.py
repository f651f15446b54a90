"""Whatever a file or a command line holds: a configuration, or problems with key and rule."""

import time
from pathlib import Path
from typing import get_args

import pytest

from ppo.check.warnings import config_warnings
from ppo.config import ConfigError, from_yaml, load_config, to_yaml
from ppo.config.bounds import Bound, bare, rules
from ppo.config.schema import schema

REQUIRED = ["model.path=tiny", "data.train_files=tiny"]
# one key of each type
KEYS = (
    "rollout.n",
    "actor.optim.lr",
    "actor.optim.betas",
    "rollout.verify_weights",
    "trainer.max_wall_time",
    "model.path",
    "data.train_files",
    "rollout.stop",
    "data.prompt_key",
    "model.override_config",
    "reward.function.kwargs.deep.er",
    "algorithm.adv_estimator",
    "trainer.shuffle",
)
VALUES = (
    *("9" * 5000, "-" + "9" * 5000, "1e308", "-1e308", "1e999", "1e18", "1e-30", "nan", "-1", "''"),
    *("99999999999999-00:00:01", "a/" * 3000, "a" * 300, '"a\\nb"', '"a\\0b"', "\udcff", "**", "~"),
    *("[[a]]", "{a: {b: [1]}}", "? [a, b]", "{? {a: 1} : 1}", "[a", "[" * 60, "&a [*a]", "*a"),
    *("!!int x", "!!set {a}", "!!binary x", "!!python/object/apply:os.getcwd []", "x: y: z"),
)


def problems(*overrides: str, path: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, [*REQUIRED, *overrides])
    return str(caught.value).splitlines()[1:]


@pytest.mark.parametrize("key", KEYS)
def test_no_value_ends_in_anything_but_a_configuration_or_short_problems(key):
    for value in VALUES:
        try:
            config = load_config(None, [*REQUIRED, f"{key}={value}"])
        except ConfigError as error:
            lines = str(error).splitlines()
            assert all(len(line) < 1200 for line in lines) and len(lines) < 10, (key, value)
        else:
            assert from_yaml(to_yaml(config)) == config, (key, value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("? [a, b]\n: 1", "a key must be a text, not a list or a mapping"),
        ("actor: {? {a: 1} : 1}", "a key must be a text"),
        ("actor: &a {lr: *a}", "an alias must not stand inside of what it stands for"),
        ("a: !!python/object/apply:os.getcwd []", "have no meaning here"),
        ("a: " + "[" * 60 + "]" * 60, "50 inside each other"),
        ("a: " + "[" * 500, "inside each other"),
        ("#" * ((1 << 20) + 1), "is longer than 1 MiB"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_one_rule(tmp_path, text, words):
    (tmp_path / "odd.yaml").write_text(text)
    (found,) = [line for line in problems(path=tmp_path / "odd.yaml") if "--config" in line]
    assert words in "\n".join(problems(path=tmp_path / "odd.yaml"))
    assert len(found) < 1200


@pytest.mark.parametrize("merge", [False, True])
def test_ten_lines_of_aliases_do_not_become_gigabytes(tmp_path, merge):
    nine = "{{<<: [{}]}}" if merge else "[{}]"
    lines = ["a0: &a0 {x: y}"]
    lines += [f"a{n}: &a{n} {nine.format(', '.join([f'*a{n - 1}'] * 9))}" for n in range(1, 11)]
    (tmp_path / "laughs.yaml").write_text("\n".join(lines))
    started = time.process_time()
    assert "what its aliases stand for" in "\n".join(problems(path=tmp_path / "laughs.yaml"))
    assert time.process_time() - started < 5


def test_aliases_that_stay_small_are_followed(tmp_path):
    (tmp_path / "fine.yaml").write_text(
        "actor: {fsdp: &small {param_offload: on}}\ncritic: {fsdp: {<<: *small, fsdp_size: 1}}"
    )
    config = load_config(tmp_path / "fine.yaml", REQUIRED)
    assert config.critic.fsdp.param_offload and config.critic.fsdp.fsdp_size == 1


def test_of_thousands_of_problems_the_first_twenty_are_said_and_how_many_more(tmp_path):
    (tmp_path / "many.yaml").write_text("\n".join(f"unknown_key_{n}: 1" for n in range(40_000)))
    started = time.process_time()
    found = problems(path=tmp_path / "many.yaml")
    assert time.process_time() - started < 10
    assert len(found) == 21 and found[-1].strip() == "and 39980 more"
    assert "unknown_key_0" in found[0] and "the sections are" in found[0]


def test_a_path_that_no_file_system_takes_is_said_as_that(tmp_path):
    for value in ("a/" * 3000, "a" * 300, '"a\\nb"', '""'):
        for key in ("model.path", "data.val_files", "trainer.resume_mode", "reward.function.path"):
            (found,) = problems(f"{key}={value}")
            assert key in found and "must be a path: one line of 1 to 4095 bytes" in found
    with pytest.raises(ConfigError, match="must be a path"):
        load_config("a" * 300)


def bounds_of(path: str) -> list[Bound]:
    return [rule for rule in rules(schema()[path].hint) if isinstance(rule, Bound)]


def holds_numbers(hint: object) -> bool:
    return bare(hint) in (int, float) or any(map(holds_numbers, get_args(hint)))


def test_every_number_has_bounds_on_both_sides_and_a_default_that_is_usual():
    for path, key in schema().items():
        bounds = bounds_of(path)
        assert len(bounds) == holds_numbers(key.hint), path
        for bound in bounds:
            assert None not in (bound.ge if bound.gt is None else bound.gt,), path
            assert None not in (bound.le if bound.lt is None else bound.lt,), path
            for number in key.default if isinstance(key.default, list) else [key.default]:
                if bound.concerns(number):
                    assert bound.holds(number) and bound.is_usual(number), path


def test_what_a_key_follows_from_keeps_it_within_its_bounds():
    for path, key in schema().items():
        if key.derive is None:
            continue
        times = key.derive.times * len(key.derive.paths)
        for source in key.derive.paths:
            for mine, theirs in zip(bounds_of(path), bounds_of(source), strict=True):
                ends = (x for x in (theirs.le, theirs.lt, theirs.ge, theirs.gt) if x is not None)
                for end in ends:
                    open_too = end * times in (mine.lt, mine.gt)
                    assert mine.holds(end * times) or open_too, (path, source, end)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.optim.lr=1e9", "actor.optim.lr = 1e9: must be at least 0 and at most 1"),
        ("rollout.temperature=1e-30", "must be 0, or at least 0.01 and at most 100"),
        ("rollout.temperature=1e9", "must be 0, or at least 0.01 and at most 100"),
        ("actor.ppo_epochs=1e18", "at most 1000"),
        ("rollout.n=1e18", "at most 10000"),
        ("reward.num_workers=1e18", "at most 4096"),
        ("rollout.max_num_seqs=1e18", "at most 1e6"),
        ("check.nnodes=1e18", "at most 4096"),
        ("actor.ppo_max_token_len_per_gpu=1e18", "at most 1e8"),
        ("reward.timeout_s=1e-30", "at least 0.01"),
        ("rollout.gpu_memory_utilization=1e-30", "at least 0.01"),
        ("actor.grad_clip=1e-30", "at least 1e-6"),
        ("rollout.top_k=0", "must be -1, or at least 1"),
        ("trainer.early_stop.metric=''", "must be the name of a metric"),
        ("trainer.keep_best=' - '", "must be the name of a metric"),
        ("trainer.keep_best='-'", "must be the name of a metric"),
        ("trainer.logger=[]", "must name each only once, and at least one"),
        ("trainer.logger=[console, console]", "must name each only once"),
        ("actor.checkpoint.save_contents=[model, model]", "must name each only once"),
        ("algorithm.rollout_correction.rollout_is_threshold=0.5", "at least 1 and at most 1e9"),
        ("rollout.stop=['']", "a text that is not empty"),
        ("data.prompt_key=' '", "a text with a word in it"),
        ("reward.function.name=['']", "a Python name"),
        ("data.custom_cls.name=-1", "a Python name"),
        ("model.custom_chat_template=template.jinja", "a Jinja template, the text itself"),
        ("model.attn_implementation=2", "the name of a function"),
        ("trainer.keep_best=1_000", "must be the name of a metric"),
        ("model.path=' '", "must be a path"),
        ("algorithm.kl_ctrl.kl_coef=1e-400", "must be 0, or a number of at least 1e-308"),
        ("algorithm.filter_groups.max_num_gen_batches=1e-400", "must be a whole number"),
        ("algorithm.filter_groups.metric=''", "a text with a word in it"),
    ],
)
def test_nonsense_is_refused_with_the_bounds(override, words):
    (found,) = problems(override)
    assert words in found.replace("1000000000.0", "1e9")


def test_what_is_possible_but_unusual_is_warned_about_once():
    config = load_config(
        None, [*REQUIRED, "actor.ppo_epochs=50", "actor.optim.lr=0.01", "rollout.temperature=0.05"]
    )
    assert config_warnings(config, world_size=8) == [
        "actor.ppo_epochs = 50: usually up to 20",
        "actor.optim.lr = 0.01: usually 1e-8 to 0.001",
        "rollout.temperature = 0.05: usually 0.1 to 2",
    ]
