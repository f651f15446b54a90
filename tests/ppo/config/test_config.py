"""The strict loader: types by annotation, suggestions, inheritance, one error that lists all."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

from ppo.config import (
    Config,
    ConfigError,
    CustomClassConfig,
    Problem,
    RewardConfig,
    changed_keys,
    from_yaml,
    load_config,
    parse_args,
    to_yaml,
)
from ppo.config.cli import build_parser
from ppo.config.fields import MayChange, may_change
from ppo.config.reference import docs
from ppo.config.schema import flatten, is_section, schema

REQUIRED = ["model.path=tiny", "data.train_files=tiny"]


def load(*overrides: str) -> Config:
    return load_config(None, [*REQUIRED, *overrides])


def problems(*overrides: str, path: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, [*REQUIRED, *overrides])
    return caught.value.problems


def write(folder: Path, text: str) -> Path:
    path = folder / "some.yaml"
    path.write_text(text)
    return path


def test_two_keys_are_enough():
    config = load()
    assert config.model.path == "tiny"
    assert config.data.train_files == ["tiny"]
    assert config.actor.optim.lr == 1e-6
    assert config.critic.optim.lr == 1e-5


def test_only_model_path_and_train_files_are_required():
    with pytest.raises(ConfigError) as caught:
        load_config(None)
    assert [line.split(":")[0] for line in caught.value.problems] == [
        "data.train_files",
        "model.path",
    ]


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("actor: {optim: {lr: 1e-5}}", "actor.optim.lr", 1e-5),
        ("actor: {optim: {lr: '1e-5'}}", "actor.optim.lr", 1e-5),
        ("actor: {optim: {lr: 1}}", "actor.optim.lr", 1.0),
        ("trainer: {total_training_steps: 1e3}", "trainer.total_training_steps", 1000),
        ("trainer: {total_training_steps: ~}", "trainer.total_training_steps", None),
        ("trainer: {total_training_steps:}", "trainer.total_training_steps", None),
        ("trainer: {val_only: on}", "trainer.val_only", True),
        ("trainer: {val_only: 'No'}", "trainer.val_only", False),
        ("trainer: {project_name: on}", "trainer.project_name", "on"),
        ("trainer: {project_name: 010}", "trainer.project_name", "010"),
        ("trainer: {project_name: 'null'}", "trainer.project_name", "null"),
        ("trainer: {max_wall_time: 12:30:45}", "trainer.max_wall_time", 45045.0),
        ("trainer: {max_wall_time: 1-00:00:10}", "trainer.max_wall_time", 86410.0),
        ("trainer: {max_wall_time: 90}", "trainer.max_wall_time", 90.0),
        ("trainer: {logger: console}", "trainer.logger", ["console"]),
        ("rollout: {verify_weights: 5}", "rollout.verify_weights", 5),
        ("rollout: {verify_weights: never}", "rollout.verify_weights", "never"),
        ("rollout: {stop: ['</a>', '12', on]}", "rollout.stop", ["</a>", "12", "on"]),
        ("model: {dtype: bfloat16}", "model.dtype", "bfloat16"),
        (
            "reward: {function: {kwargs: {a: 1e-3, b: on, c: '7', d: [1, true, null]}}}",
            "reward.function.kwargs",
            {"a": 1e-3, "b": "on", "c": "7", "d": [1, True, None]},
        ),
    ],
)  # fmt: skip
def test_a_value_is_read_by_the_type_of_its_key(tmp_path, text, path, value):
    config = load_config(write(tmp_path, text), REQUIRED)
    found = flatten(config)[path]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.n=010", "rollout.n = '010': must be a whole number; write it without the lead"),
        ("rollout.n=2.5", "rollout.n = '2.5': must be a whole number"),
        ("rollout.n=12:30:45", "rollout.n = '12:30:45': must be a whole number"),
        ("rollout.n=on", "rollout.n = 'on': must be a whole number"),
        ("rollout.n=null", "rollout.n = 'null': must be a whole number, null is not allowed"),
        ("rollout.n=[1, 2]", "must be a whole number"),
        ("rollout.n=0", "rollout.n = 0: must be at least 1"),
        (
            "rollout.temperature=-1",
            "rollout.temperature = -1.0: must be 0, or at least 0.01",
        ),
        ("rollout.temperature=nan", "must be a number"),
        ("actor.optim.lr=fast", "actor.optim.lr = 'fast': must be a number"),
        ("actor.optim.betas=[0.9, 1.5]", "must be at least 0 and below 1"),
        ("trainer.val_only=2", "trainer.val_only = '2': must be true or false"),
        ("trainer.val_only=1", "must be true or false"),
        ("reward.function.kwargs=3", "reward.function.kwargs = '3': must be a mapping"),
        ("actor.optim=3", "actor.optim = '3': is a section; its keys are betas, eps, lr"),
        ("algorithm.adv_estimator=gea", "must be one of gae, grpo, rloo"),
        ("algorithm.adv_estimator=gea", "did you mean gae?"),
        ("rollout.stop=[a, 12]", "rollout.stop = ['a', '12']: must be a list of text; put 12 in"),
        ("rollout.stop=[true]", "put true in quotes"),
        ("rollout.stop=1e-3", "put 1e-3 in quotes"),
        ("actor.policy_loss.loss_mode=ppo", "actor.policy_loss.loss_mode = 'ppo': must be"),
        ("rollout.verify_weights=0", "rollout.verify_weights = 0: must be at least 1"),
        ("rollout.verify_weights=often", "must be one of first, never or a whole number"),
        ("lr", "'lr' is not understood; overrides read key.sub=value"),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(override, message):
    found = problems(override)
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("zzz.weight_decay", "optim.weight_decay?"),
        ("actor.optim.zzz", "the keys of actor.optim are betas"),
        ("actor.optim.weigth_decay", "did you mean actor.optim.weight_decay?"),
        ("actor.lr", "did you mean actor.optim.lr?"),
        ("critic.lr", "did you mean critic.optim.lr?"),
        ("rolout.n", "did you mean rollout.n?"),
        ("rollout", "is a section"),
        ("train_batch_size", "did you mean data.train_batch_size?"),
        ("trainer.total_epoch", "did you mean trainer.total_epochs?"),
        ("zzz.qqq", "the sections are actor, algorithm"),
    ],
)
def test_an_unknown_key_suggests_the_right_one(path, suggestion):
    (found,) = problems(f"{path}=1")
    assert suggestion in found


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("trainer.nnodes", "torchrun --nnodes"),
        ("trainer.n_gpus_per_node", "torchrun --nproc_per_node"),
        ("ray_kwargs.ray_init.num_cpus", "no Ray"),
        ("rollout.name", "rollout.engine"),
        ("hybrid_engine", "share the devices"),
        ("actor_rollout_ref.hybrid_engine", "share the devices"),
        ("global_pool.x", "no Ray"),
        ("actor_rollout_ref.rollout.name", "rollout.engine"),
        ("actor_rollout_ref.rollout.n", "write rollout.n"),
        ("actor_rollout_ref.model.path", "write model.path"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", "write actor.fsdp.param_offload"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload", "write ref.fsdp.param_offload"),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size",
            "write actor.ppo_micro_batch_size_per_gpu",
        ),
        ("critic.model.fsdp_config.fsdp_size", "write critic.fsdp.fsdp_size"),
        ("custom_reward_function.path", "write reward.function.path"),
        ("actor.use_dual_clip", "actor.clip_ratio_c"),
        ("vf_clip_param", "critic.cliprange_value"),
        ("actor.vf_clip_param", "critic.cliprange_value"),
        ("algorithm.policy_kl_penalty", "algorithm.kl_penalty"),
        ("algorithm.kl_target", "algorithm.kl_ctrl.target_kl"),
        ("actor.early_stop_kl", "guards"),
        ("rollout.inference_engine", "rollout.engine"),
        ("actor.fsdp.limit_all_gathers", "FSDP2"),
        ("parallel.data_parallel_size", "world size"),
    ],
)
def test_a_key_of_another_trainer_says_what_replaces_it(path, advice):
    found = problems(f"{path}=1")[0]
    assert "another trainer" in found
    assert advice in found


def test_a_key_of_another_trainer_whose_feature_is_missing_says_so():
    (found,) = problems("actor_rollout_ref.actor.router_replay=rollout")
    assert "not built yet" in found
    load("actor_rollout_ref.actor.router_replay=off")  # asks for nothing


@pytest.mark.parametrize(
    "override",
    ["actor.expert_parallel_size=2", "actor.router_replay=rollout"],
)
def test_a_feature_that_is_not_built_is_refused_by_name(override):
    (found,) = problems(override)
    assert "not built yet" in found
    assert found.startswith(override.split("=")[0])


def test_validation_sets_have_names_and_follow_the_sampling_of_validation(tmp_path):
    text = "data: {val_files: a.jsonl, val_sets: {aime: {files: b.jsonl, n: 8, temperature: 1}}}"
    overrides = ("rollout.val_kwargs.top_p=0.9", "data.val_sets.aime.max_response_length=64")
    overrides += ("data.val_sets.hard={files: [c.jsonl, d.jsonl]}",)
    config = load_config(write(tmp_path, text), [*REQUIRED, *overrides])
    assert from_yaml(to_yaml(config)) == config
    assert {name: tuple(vars(val).values()) for name, val in config.val_sets.items()} == {
        "": (["a.jsonl"], 1, 0.0, 0.9, 512),
        "aime": (["b.jsonl"], 8, 1.0, 0.9, 64),
        "hard": (["c.jsonl", "d.jsonl"], 1, 0.0, 0.9, 512),
    }


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{a: {n: 4}}", "data.val_sets.a.files: is required"),
        ("{a: {files: x, n: many}}", "data.val_sets.a.n = 'many': must be a whole number"),
        ("{a: {files: x, top_q: 1}}", "data.val_sets.a.top_q = '1': unknown key; did you mean top"),
        ("{a: {files: x, n: 0}}", "data.val_sets.a.n = '0': must be at least 1"),
        ("{a: [x]}", "data.val_sets.a = ['x']: must be a mapping with files, n"),
        ("[x]", "data.val_sets = ['x']: must be a mapping"),
    ],
)
def test_what_is_wrong_inside_a_mapping_is_named_by_its_dotted_key(value, words):
    (found,) = problems(f"data.val_sets={value}")
    assert found.startswith(words)


def test_weights_of_a_mix_are_numbers_by_names_that_may_have_dots():
    config = load("data.mix={openai/gsm8k: 2}", "data.mix.data/a.b.parquet=0.5")
    assert config.data.mix == {"openai/gsm8k": 2.0, "data/a.b.parquet": 0.5}
    assert from_yaml(to_yaml(config)) == config
    for value, words in (("-1", "must be at least 0"), ("much", "must be a number")):
        (found,) = problems(f"data.mix.a.jsonl={value}")
        assert found.startswith(f"data.mix.a.jsonl = '{value}': {words}")


def test_the_value_that_asks_for_no_unbuilt_feature_is_accepted():
    assert load("actor.expert_parallel_size=1", "reward.manager=naive") == load()


def test_every_problem_is_listed_at_once(tmp_path):
    path = write(tmp_path, "actor: {optim: {lr: x}, nope: 1}\nrollout: {top_p: 3}\nray_init: {}\n")
    found = problems("trainer.seed=-1", "foo", path=path)
    assert len(found) == 6
    for part in (
        "actor.optim.lr",
        "actor.nope",
        "rollout.top_p",
        "ray_init",
        "trainer.seed",
        "foo",
    ):
        assert any(part in line for line in found)


def test_further_checks_are_reported_with_the_loaders_problems_unless_they_follow_from_them():
    def check(config):
        return [
            Problem("data.train_batch_size", 1024, "must be a multiple of rollout.n"),
            Problem("trainer.seed", 42, "is odd in its way"),
        ]

    with pytest.raises(ConfigError) as caught:
        load_config(None, [*REQUIRED, "rollout.n=x"], check=check)
    assert [line.split(" ")[0] for line in caught.value.problems] == ["rollout.n", "trainer.seed"]


def test_yaml_errors_name_the_line(tmp_path):
    assert "line 2" in problems(path=write(tmp_path, "a: 1\nb: }\n"))[0]
    assert "'lr' stands twice" in problems(path=write(tmp_path, "actor: {lr: 1, lr: 2}"))[0]
    assert "mapping of sections" in problems(path=write(tmp_path, "- 1"))[0]
    assert "no such file" in problems(path=tmp_path / "absent.yaml")[0]


def test_a_file_that_is_not_there_is_told_with_a_name_that_is_near_it_alone(tmp_path):
    assert "did you mean ppo_tiny.yaml? configs/ has" in problems(path=Path("ppo_tinny"))[0]
    assert "did you mean tiny/grpo.yaml?" in problems(path=Path("grop.yaml"))[0]
    assert "no such file; configs/ has" in problems(path=Path("nope.yaml"))[0]
    assert "is a folder: name the file" in problems(path=tmp_path)[0]


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(tmp_path):
    path = write(tmp_path, "rollout: {n: 2, top_p: 0.5}\nreward: {function: {kwargs: {a: 1}}}")
    config = load_config(
        path, [*REQUIRED, "rollout.n=3", "--rollout.n=4", "reward.function.kwargs.b.c=1e-3"]
    )
    assert (config.rollout.n, config.rollout.top_p) == (4, 0.5)
    assert config.reward.function.kwargs == {"a": 1, "b": {"c": 1e-3}}


def test_ref_and_critic_follow_the_actor_unless_they_say_otherwise():
    config = load(
        "actor.fsdp.param_offload=true", "actor.optim.eps=1e-5", "actor.optim.lr=3e-6",
        "actor.ppo_epochs=3", "actor.ppo_max_token_len_per_gpu=1000", "critic.grad_clip=0.5",
        "critic.fsdp.mixed_precision.param_dtype=float32", "critic.fsdp.fsdp_size=null",
        "model.path=m", "actor.clip_ratio=0.1", "actor.clip_ratio_high=0.3",
    )  # fmt: skip
    assert config.critic.fsdp.param_offload
    assert config.ref.fsdp.param_offload
    assert config.critic.fsdp.mixed_precision.param_dtype == "float32"
    assert config.ref.fsdp.mixed_precision.param_dtype == "bfloat16"
    assert config.critic.fsdp.fsdp_size == -1
    assert (config.critic.optim.eps, config.critic.optim.lr) == (1e-5, 1e-5)
    assert (config.critic.ppo_epochs, config.critic.grad_clip) == (3, 0.5)
    assert config.actor.log_prob_max_token_len_per_gpu == 2000
    assert config.ref.log_prob_max_token_len_per_gpu == 2000
    assert config.critic.ppo_max_token_len_per_gpu == 2000
    assert (config.critic.model.path, config.model.tokenizer_path) == ("m", "m")
    assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high) == (0.1, 0.3)
    assert config.rollout.max_model_len == 1024
    assert load("trainer.seed=7").data.seed == 7


def test_no_derived_key_is_none_after_loading():
    values = flatten(load())
    nullable = {"critic.ppo_micro_batch_size_per_gpu", "critic.optim.state_dtype"}
    inherited_nulls = {
        f"{name}.fsdp.sharding_strategy" for name in ("ref", "critic", "reward.model")
    }
    for path, key in schema().items():
        if key.derive and path not in nullable | inherited_nulls:
            assert values[path] is not None, path


def test_the_resolved_configuration_reloads_equal(tmp_path):
    config = load(
        "trainer.project_name=010", "trainer.max_wall_time=1:00:00", "rollout.stop=['on', '~']",
        'model.override_config={a: "1e-5", b: 1e-5, c: "null", d: {e: [1, "2", true]}}',
        "actor.optim.betas=[0.9, 0.95]", "algorithm.rollout_correction.icepop=[0.5, 5]",
    )  # fmt: skip
    assert from_yaml(to_yaml(config)) == config
    assert load_config(write(tmp_path, to_yaml(config))) == dataclasses.replace(
        config, trainer=dataclasses.replace(config.trainer, experiment_name="some")
    )


def test_the_run_folder_is_named_after_project_and_file(tmp_path):
    path = write(tmp_path, "trainer: {project_name: math}")
    assert load_config(path, REQUIRED).run_dir == Path("runs/math/some")
    other = load_config(path, [*REQUIRED, "trainer.default_local_dir=/x/y"])
    assert other.run_dir == Path("/x/y")


def test_the_critic_exists_only_for_gae():
    assert load().critic_enabled
    assert not load("algorithm.adv_estimator=grpo").critic_enabled
    assert not load("critic.enable=false").critic_enabled


def test_a_resume_may_change_sharding_and_lengths_but_not_the_algorithm():
    old = load()
    harmless = load(
        "trainer.total_epochs=3", "trainer.save_freq=1", "actor.fsdp.fsdp_size=2",
        "actor.fsdp.param_offload=true", "actor.ppo_max_token_len_per_gpu=99",
        "actor.ppo_micro_batch_size_per_gpu=2", "rollout.tensor_model_parallel_size=2",
        "actor.ulysses_sequence_parallel_size=2", "trainer.logger=[console]",
    )  # fmt: skip
    assert changed_keys(old, harmless) == []
    new = load("actor.optim.lr=1e-5", "data.train_batch_size=512", "rollout.n=2",
               "actor.fsdp.mixed_precision.param_dtype=float32")  # fmt: skip
    assert changed_keys(old, new) == [
        "data.train_batch_size: 1024 -> 512",
        "data.gen_batch_size: 1024 -> 512",
        "actor.optim.lr: 1e-06 -> 1e-05",
        "actor.fsdp.mixed_precision.param_dtype: 'bfloat16' -> 'float32'",
        "ref.fsdp.mixed_precision.param_dtype: 'bfloat16' -> 'float32'",
        "critic.fsdp.mixed_precision.param_dtype: 'bfloat16' -> 'float32'",
        "reward.model.fsdp.mixed_precision.param_dtype: 'bfloat16' -> 'float32'",
        "rollout.n: 1 -> 2",
    ]


def test_the_command_line_separates_options_from_overrides():
    options = parse_args(
        ["--config", "ppo.yaml", "a.b=1", "--check", "--nnodes=2", "--nproc-per-node", "4",
         "--c.d=2"]
    )  # fmt: skip
    assert options.config == "ppo.yaml"
    assert options.overrides == ["a.b=1", "--c.d=2", "check.nnodes=2", "check.nproc_per_node=4"]
    assert options.check and not options.verbose
    said = build_parser("Train.").format_help()
    assert "configs/ppo.yaml lists every key" in said and "--config ppo_tiny.yaml" in said
    with pytest.raises(ConfigError, match="--config"):
        parse_args(["a=1"])


def test_sections_are_frozen_and_check_their_own_bounds():
    config = load()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rollout.n = 2  # type: ignore[misc]
    with pytest.raises(ConfigError, match="must be 0, or at least"):
        dataclasses.replace(config.rollout, temperature=-1.0)


def test_the_models_of_a_run_are_those_that_its_algorithm_uses() -> None:
    def models(*overrides: str) -> list[tuple[str, str, bool]]:
        config = load_config(None, ["model.path=a/policy", "data.train_files=tiny", *overrides])
        return [(role.name, role.path, role.is_trained) for role in config.models.values()]

    actor, critic = ("actor", "a/policy", True), ("critic", "a/policy", True)
    ref, reward_model = ("ref", "a/policy", False), ("reward model", "a/judge", False)
    assert models() == [actor, critic, ref]
    assert models("critic.model.path=a/value") == [actor, ("critic", "a/value", True), ref]
    grpo = ["algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false"]
    assert models(*grpo) == [actor]
    judged = ["reward.model.path=a/judge"]
    assert models(*grpo, *judged) == [actor]
    assert models(*grpo, *judged, "reward.model.enable=true") == [actor, reward_model]


def sections(cls: type = Config) -> Iterator[type]:
    """The class of every section, also of those inside others."""
    for hint in get_type_hints(cls).values():
        if is_section(hint):
            yield hint
            yield from sections(hint)


def test_every_section_and_every_field_has_a_docstring():
    found = set(sections())
    assert len(found) > 15 and {"RewardModelConfig", "FsdpConfig"} <= {c.__name__ for c in found}
    for section in found:
        # a dataclass without a docstring gets its signature as one
        assert not str(section.__doc__).startswith(f"{section.__name__}("), section
        missing = {field.name for field in dataclasses.fields(section)} - docs(section).keys()
        assert not missing, f"{section.__name__}: no docstring below {missing}"


def test_docstrings_of_fields_are_read_in_one_line():
    assert docs(CustomClassConfig)["path"] == "Python file; null = the built-in class"
    assert docs(RewardConfig)["weights"] == "how scores are summed; 0 = the score is a metric only"


def test_the_home_folder_is_written_out_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(
        None,
        [
            *("model.path=~/m", "data.train_files=[~/a.jsonl, b.jsonl]"),
            *("reward.function.path=~/r.py", "trainer.default_local_dir=~/run"),
            "data.custom_cls.path=~",  # null
        ],
    )
    assert (
        config.model.path == config.model.tokenizer_path == config.critic.model.path == "/home/me/m"
    )
    assert config.data.train_files == ["/home/me/a.jsonl", "b.jsonl"]
    assert config.reward.function.path == ["/home/me/r.py"]
    assert config.run_dir == Path("/home/me/run") and config.data.custom_cls.path is None
    assert from_yaml(to_yaml(config)) == config


def test_a_mark_counts_wherever_it_stands_in_an_annotation():
    assert may_change(MayChange[int | None]) and may_change(MayChange[int] | None)
    assert may_change(list[MayChange[int]]) and not may_change(list[int] | None)
