"""Rules over several keys, ranks and files: every violation is found and says what to change."""

import json
import os

import pytest

from ppo.check.files import missing_files, to_download, wrong_contents
from ppo.check.rules import check_config
from ppo.check.warnings import config_warnings
from ppo.config import Config, load_config
from ppo.model_shapes import file_of_model

REQUIRED = ["model.path=tiny", "data.train_files=tiny"]


def load(*overrides: str) -> Config:
    return load_config(None, [*REQUIRED, *overrides])


def problems(*overrides: str, world_size: int = 8, ranks_per_node: int = 8) -> list[str]:
    found = check_config(load(*overrides), world_size=world_size, ranks_per_node=ranks_per_node)
    return [str(problem) for problem in found]


def skip(metric: str) -> str:
    return f"guards.rules=[{{metric: {metric}, above: 5, action: skip_update}}]"


def test_the_defaults_are_right():
    assert problems() == []
    assert config_warnings(load(), world_size=8) == []


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (["data.train_batch_size=100", "actor.ppo_mini_batch_size=30"],
         "actor.ppo_mini_batch_size", ["divide data.train_batch_size (100)", "use 25 or 50"]),
        (["critic.ppo_mini_batch_size=100"],
         "critic.ppo_mini_batch_size", ["(1024)", "use 64 or 128"]),
        (["actor.ulysses_sequence_parallel_size=3"],
         "actor.ulysses_sequence_parallel_size", ["possible: 1, 2, 4, 8"]),
        (["actor.fsdp.fsdp_size=3"], "actor.fsdp.fsdp_size", ["possible: 1, 2, 4, 8"]),
        (["actor.fsdp.sharding_strategy=NO_SHARD", "actor.ulysses_sequence_parallel_size=2"],
         "actor.fsdp.sharding_strategy", ["multiple of sp 2"]),
        (["rollout.tensor_model_parallel_size=3"],
         "rollout.tensor_model_parallel_size", ["8 ranks of a node", "possible: 1, 2, 4, 8"]),
        (["critic.fsdp.fsdp_size=2"], "critic.fsdp.fsdp_size", ["actor.fsdp.fsdp_size (8)"]),
        (["ref.fsdp.fsdp_size=2"], "ref.fsdp.fsdp_size", ["share one mesh"]),
        (["critic.ulysses_sequence_parallel_size=2"],
         "critic.ulysses_sequence_parallel_size", ["share one mesh"]),
        (["critic.enable=false"], "critic.enable", ["needs a critic"]),
        (["algorithm.adv_estimator=grpo"], "rollout.n", ["grpo compares", "rollout.n=8"]),
        (["algorithm.adv_estimator=rloo"], "rollout.n", ["rloo compares", "rollout.n=8"]),
        (["rollout.engine_process=rank", "trainer.deterministic=true", "trainer.device=cuda"],
         "rollout.engine_process", ["the trainer's", "engine_process=host"]),
        (["rollout.temperature=0"], "rollout.temperature", ["training needs samples"]),
        (["rollout.episode.path=x.py", "rollout.ignore_eos=true"],
         "rollout.ignore_eos", ["no turn would end"]),
        (["rollout.episode.path=x.py", "algorithm.adv_estimator=remax"],
         "algorithm.adv_estimator", ["greedy", "use rloo"]),
        (["rollout.episode.path=x.py", "rollout.episode.timeout_s=20"],
         "rollout.episode.tool_timeout_s", ["30", "timeout_s (20)"]),
        (["rollout.episode.replay=runs/x"], "rollout.episode.replay", ["names none"]),
        (["rollout.max_model_len=512"], "rollout.max_model_len", ["1024"]),
        (["model.use_remove_padding=false", "actor.ulysses_sequence_parallel_size=2"],
         "model.use_remove_padding", ["packed"]),
        (["actor.optim.betas=[0.9]", "critic.optim.betas=[0.9, 0.95]"],
         "actor.optim.betas", ["two numbers"]),
        (["algorithm.rollout_correction.icepop=[5, 0.5]"],
         "algorithm.rollout_correction.icepop", ["lo < hi"]),
        (["algorithm.rollout_correction.icepop=[1.5, 2]"],
         "algorithm.rollout_correction.icepop", ["where engine and trainer agree"]),
        (["algorithm.rollout_correction.reject={seq_mean_k1: [0.5, 0.9]}"],
         "algorithm.rollout_correction.reject", ["where engine and trainer agree"]),
        (["algorithm.rollout_correction.reject={geometric: 2}"],
         "algorithm.rollout_correction.reject", ["geometric is none of the rules token_k1"]),
        (["algorithm.rollout_correction.reject.seq_mean_k1=[2, 1]"],
         "algorithm.rollout_correction.reject", ["seq_mean_k1: [2, 1] must be [lo, hi]"]),
        (["algorithm.rollout_correction.reject.token_k1=0.5"],
         "algorithm.rollout_correction.reject", ["one number above 1"]),
        (["algorithm.rollout_correction.reject.token_k3=[0.1, 1]"],
         "algorithm.rollout_correction.reject", ["must be one number"]),
        (["algorithm.rollout_correction.reject.token_k3=[]"],
         "algorithm.rollout_correction.reject", ["must be above 0"]),
        (["algorithm.rollout_correction.preset=bypass_pg_is"],
         "algorithm.rollout_correction.preset", ["set actor.policy_loss.loss_mode=gpg"]),
        (["algorithm.rollout_correction.preset=bypass_ppo_clip",
          "algorithm.rollout_correction.rollout_is=token"],
         "algorithm.rollout_correction.rollout_is", ["count the mismatch twice", "leave it out"]),
        (["algorithm.filter_groups.enable=true"], "rollout.n", ["compares", "rollout.n=8"]),
        (["algorithm.filter_groups.enable=true", "rollout.n=4",
          "algorithm.filter_groups.metric=seq_final_reward"],
         "algorithm.filter_groups.metric", ["KL penalty", "use seq_reward"]),
        (["algorithm.filter_groups.enable=true", "rollout.n=4", "data.gen_batch_size=500",
          "algorithm.filter_groups.max_num_gen_batches=2"],
         "algorithm.filter_groups.max_num_gen_batches", ["never make", "use 3 or more"]),
        (["algorithm.filter_groups.enable=true", "rollout.n=4", "data.gen_batch_size=1025",
          "algorithm.filter_groups.surplus=keep"],
         "algorithm.filter_groups.surplus", ["longer than one iteration"]),
        (["algorithm.filter_groups.enable=true", "rollout.n=4",
          "algorithm.filter_groups.metric=accuracy"],
         "algorithm.filter_groups.metric", ["no such entry", "use score or acc"]),
        (["algorithm.filter_groups.enable=true", "rollout.n=4", "reward.function.style=trl",
          "reward.function.path=a.py", "reward.function.name=[long, right]",
          "algorithm.filter_groups.metric=acc"],
         "algorithm.filter_groups.metric", ["use score or long or right"]),
        (["algorithm.filter_groups.enable=true", "rollout.n=4", "reward.model.enable=true",
          "reward.model.path=tiny", "algorithm.filter_groups.metric=acc"],
         "algorithm.filter_groups.metric", ["use score"]),
        (["guards.rules=[{metric: actor/lr, above: 5, action: [scale_lr 0.5, set_lr 1e-6]}]"],
         "guards.rules[0]", ["scale_lr and set_lr", "leave one out"]),
        (["guards.rules=[{metric: actor/grad_norm, above: 5, action: [warn, rollback, warn]}]"],
         "guards.rules[0]", ["warn stands twice"]),
        (["guards.rules=[{metric: .inf, above: 5, action: warn}]"], "guards.rules[0]", ["a name"]),
        ([skip("rollout_corr/is_mean")], "guards.rules[0]", ["neither weighs", "rollout_is=token"]),
        ([skip("rollout_corr/eff_sample_size"),
          "algorithm.rollout_correction.preset=bypass_ppo_clip_geo_rs"],
         "guards.rules[0]", ["before the updates", "bypass_old_logprob"]),
        ([skip("actor/ref_kl"), "algorithm.use_kl_in_reward=false"],
         "guards.rules[0]", ["no reference", "actor.use_kl_loss=true"]),
        ([skip("actor/reward_kl_penalty"), "algorithm.use_kl_in_reward=false"],
         "guards.rules[0]", ["use_kl_in_reward is false"]),
        ([skip("reward/alone")], "guards.rules[0]", ["gae compares no samples"]),
        (["reward.overlong_buffer.len=513"], "reward.overlong_buffer.len", ["(512)"]),
        (["algorithm.kl_ctrl.type=step", "algorithm.kl_ctrl.min=11"],
         "algorithm.kl_ctrl.min", ["algorithm.kl_ctrl.max"]),
        (["actor.policy_loss.loss_mode=clip_cov", "actor.policy_loss.clip_cov_lb=5"],
         "actor.policy_loss.clip_cov_lb", ["clip_cov_ub (5.0)"]),
        (["trainer.val_only=true"], "data.val_files", ["validation data"]),
        (["trainer.keep_best=val-core/tiny/reward/mean@1"], "trainer.keep_best", ["val_files"]),
        (["data.val_sets={a: {files: tiny, max_response_length: 513}}"],
         "data.val_sets.a.max_response_length", ["at most", "(512)", "max_model_len=1025"]),
        (["data.val_sets={a/b: {files: tiny}}"], "data.val_sets.a/b", ["letters, digits"]),
        (["data.val_sets.a.files=[]"], "data.val_sets.a.files", ["at least one"]),
        (["trainer.early_stop.metric=-val-core/tiny/reward/mean@1"],
         "trainer.early_stop.metric", ["needs data.val_files"]),
        (["data.mix={a: 0, b: 0}"], "data.mix", ["every weight is 0"]),
        (["reward.function.style=trl"], "reward.function.style", ["reward.function.path"]),
        (["reward.function.path=[a.py, b.py]", "reward.function.weights=[1]"],
         "reward.function", ["2 in path", "do not fit together"]),
        (["reward.function.path=a.py", "reward.function.weights=[0]"],
         "reward.weights", ["nothing is rewarded"]),
        (["data.apply_chat_template_kwargs={tokenize: true, return_tensors: pt, thinking: 1}"],
         "data.apply_chat_template_kwargs", ["must not set return_tensors, tokenize:"]),
        (["data.apply_chat_template_kwargs={add_generation_prompt: false}"],
         "data.apply_chat_template_kwargs", ["must not set add_generation_prompt:"]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_named_with_a_way_out(overrides, path, words):
    (found,) = problems(*overrides)
    assert found.startswith(path)
    for word in words:
        assert word in found


@pytest.mark.parametrize(
    ("strategy", "size", "reshard", "nodes", "fix"),
    [
        ("FULL_SHARD", -1, True, 1, None),
        ("FULL_SHARD", -1, True, 2, None),
        ("FULL_SHARD", 4, True, 2, "fsdp_size=8"),
        ("FULL_SHARD", 8, True, 2, None),
        ("HYBRID_SHARD", -1, True, 2, None),
        ("HYBRID_SHARD", -1, True, 1, "fsdp_size=1 < F < all ranks"),
        ("HYBRID_SHARD", 2, True, 1, None),
        ("NO_SHARD", -1, True, 1, None),
        ("NO_SHARD", -1, True, 2, None),
        ("NO_SHARD", 1, True, 1, None),
        ("NO_SHARD", 4, True, 1, "fsdp_size=1"),
        ("SHARD_GRAD_OP", -1, False, 1, None),
        ("SHARD_GRAD_OP", -1, True, 1, None),
        ("SHARD_GRAD_OP", 4, True, 2, None),
        ("SHARD_GRAD_OP", 1, True, 1, "fsdp_size=8"),
        ("FULL_SHARD", -1, False, 1, "reshard_after_forward=true"),
    ],
)
def test_an_explicit_strategy_must_be_what_the_sizes_amount_to(strategy, size, reshard, nodes, fix):
    found = problems(
        f"actor.fsdp.sharding_strategy={strategy}", f"actor.fsdp.fsdp_size={size}",
        f"actor.fsdp.reshard_after_forward={reshard}",
        "critic.enable=false", "algorithm.adv_estimator=grpo", "rollout.n=2",
        "algorithm.use_kl_in_reward=false",
        ranks_per_node=8 // nodes,
    )  # fmt: skip
    assert len(found) == (fix is not None)
    assert all(fix in line and "contradicts" in line for line in found)


@pytest.mark.parametrize(
    ("strategy", "size", "reshards"),
    [
        ("NO_SHARD", 1, True),
        ("FULL_SHARD", 16, True),
        ("SHARD_GRAD_OP", 16, False),
        ("HYBRID_SHARD", 8, True),
        (None, 8, True),
    ],
)
def test_a_strategy_alone_decides_what_the_defaults_would(strategy, size, reshards):
    name = "null" if strategy is None else strategy
    config = load(f"actor.fsdp.sharding_strategy={name}")
    dims = config.dims(16, 8)
    assert (dims.shard_size, config.actor.fsdp.reshards) == (size, reshards)
    assert check_config(config, world_size=16, ranks_per_node=8) == []
    for role in config.models.values():  # all follow the actor's
        assert (role.fsdp.shard_size(16), role.fsdp.reshards) == (dims.fsdp_size, reshards)


def test_one_rank_may_be_called_full_shard_or_no_shard():
    for strategy in ("FULL_SHARD", "NO_SHARD", "SHARD_GRAD_OP"):
        override = f"actor.fsdp.sharding_strategy={strategy}"
        assert problems(override, world_size=1, ranks_per_node=1) == []


def test_all_problems_are_found_at_once():
    found = problems(
        "data.train_batch_size=100", "algorithm.adv_estimator=grpo", "rollout.temperature=0",
        "actor.ulysses_sequence_parallel_size=3", "rollout.tensor_model_parallel_size=16",
    )  # fmt: skip
    assert len(found) == 5


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["model.trust_remote_code=true"], "trust_remote_code"),
        (["model.dtype=bfloat16"], "small updates are rounded away"),
        (["actor.ppo_micro_batch_size_per_gpu=2"], "no effect with use_dynamic_bsz"),
        (["actor.use_kl_loss=true"], "counts twice"),
        (["algorithm.kl_ctrl.kl_coef=0"], "only measures"),
        (["data.truncation=left"], "data.truncation has no effect"),
        (["reward.function.name=f"], "without reward.function.path"),
        (["rollout.val_kwargs.n=4"], "equal responses"),
        (["rollout.engine=torch", "rollout.engine_kwargs={a: 1}"], "engine_kwargs has no effect"),
        (["parallel.align_to_rollout=true"], "align_to_rollout has no effect"),
        (["rollout.episode.max_turns=3"], "rollout.episode has no effect"),
        (["actor.ppo_max_token_len_per_gpu=512", "critic.ppo_max_token_len_per_gpu=4096"],
         "micro-batch of its own"),
        (["actor.ppo_mini_batch_size=4", "critic.ppo_mini_batch_size=8"], "compute nothing"),
        (["actor.optim.min_lr_ratio=0.1", "critic.optim.min_lr_ratio=0"], "min_lr_ratio"),
        (["actor.checkpoint.save_contents=[model]"], "new Adam moments"),
        (["critic.checkpoint.save_contents=[model]"], "critic.checkpoint.save_contents"),
        (["data.custom_cls.name=Rows"], "custom_cls.name has no effect"),
        (["trainer.critic_warmup=5", "trainer.total_training_steps=5"], "critic_warmup"),
        (["rollout.engine=torch", "rollout.free_cache_engine=false"], "free_cache_engine has no"),
        (["trainer.device=cpu", "rollout.enforce_eager=true"], "effect with rollout.engine torch"),
        (["data.gen_batch_size=64"], "no effect without algorithm.filter_groups.enable"),
        (["algorithm.filter_groups.surplus=keep"], "filter_groups has no effect without enable"),
        (["algorithm.rollout_correction.rollout_is_threshold=3"], "has no effect without rollout_"),
        (["data.difficulty.visits=3"], "no effect without data.difficulty.pool"),
        (["data.difficulty.pool=1"], "come as often as others"),
        (["trainer.early_stop.patience=2"], "no effect without trainer.early_stop.metric"),
        (["trainer.early_stop.metric=val-core/a/reward/mean@1", "trainer.test_freq=0",
          "data.val_files=tiny"], "early_stop.metric has no effect with trainer.test_freq = 0"),
        (["actor.kl_loss_type=full"], "no effect without actor.use_kl_loss"),
        (["actor.tau_pos=2"], "no effect with actor.policy_loss.loss_mode vanilla"),
        (["actor.policy_loss.loss_mode=gspo", "actor.clip_ratio_c=9"], "clip_ratio_c has no"),
        (["actor.policy_loss.loss_mode=gpg", "actor.clip_ratio_high=0.28"], "clip_ratio_high has"),
        (["reward.manager=dapo"], "have no effect without each other"),
        (["reward.overlong_buffer.len=8"], "have no effect without each other"),
        (["algorithm.filter_groups.enable=true", "reward.manager=dapo",
          "reward.overlong_buffer.len=8"], "lengths alone make scores differ; use acc"),
        (["reward.model.path=tiny"], "without reward.model.enable"),
        (["model.lora_alpha=32"], "model.lora_alpha has no effect without model.lora_rank"),
        (["model.lora_rank=8", "critic.model.lora_rank=0", "critic.model.lora_dropout=0.1"],
         "critic.model.lora_dropout has no effect"),
        (["model.lora_rank=8", "model.lora_dropout=0.1"], "the first ratio is not 1"),
        (["algorithm.adv_estimator=remax", "algorithm.gamma=0.9"], "adv_estimator remax"),
        (["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.lam=0.9"], "algorithm.lam"),
    ],
)  # fmt: skip
def test_an_option_without_effect_is_warned_about(overrides, word):
    found = config_warnings(load(*overrides), world_size=8)
    assert any(word in line for line in found), found
    assert len({line.split()[0] for line in found}) <= 2


def test_absent_files_are_named_with_their_keys(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({}))
    found = missing_files(
        load(
            f"data.train_files=[{tmp_path}/a.parquet, tiny]", f"data.val_files={tmp_path}/*.jsonl",
            f"model.path={tmp_path}/nope", f"model.tokenizer_path={tmp_path}/model",
            f"critic.model.path={tmp_path}/empty", f"reward.function.path={tmp_path}/f.py",
            f"trainer.resume_mode={tmp_path}/step_1",
        )
    )  # fmt: skip
    assert {(problem.path, problem.rule) for problem in found} == {
        ("data.train_files", "no such file"),
        ("data.val_files", "no file matches"),
        ("model.path", "no such folder"),
        ("critic.model.path", "the folder has no config.json"),
        ("reward.function.path", "no such file"),
        ("trainer.resume_mode", "no such folder"),
    }
    assert missing_files(load()) == []


def test_data_that_the_loader_would_take_is_not_missing_and_its_contents_are_checked(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a[1].jsonl").write_text('{"question": "q"}\n')
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "b.jsonl").write_text('{"prompt": 5}\n')
    (tmp_path / "f.py").write_text("def compute_score(text): ...\n")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for files, said in {
        "~/a[1].jsonl": "column 'prompt': is missing",
        "~/deep/**/b.jsonl": "column 'prompt': must be text",
    }.items():
        config = load(f"data.train_files={json.dumps([files])}", "reward.function.path=~/f.py")
        assert missing_files(config) == []
        data, function = wrong_contents(config)
        assert data.path == "data.train_files" and said in data.rule
        assert function.path == "reward.function.path" and "wrong signature" in function.rule
    (problem,) = missing_files(load(f"data.train_files={tmp_path}/pipe.jsonl"))
    assert "is no regular file" in problem.rule


def test_a_config_json_in_the_hubs_cache_is_not_the_model(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--Some--Model"
    snapshot = cached / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("c0ffee")
    hub = load("model.path=Some/Model")
    for name, paths in {
        "config.json": ["model.path"],
        "tokenizer_config.json": ["model.path"],
        "model.safetensors.index.json": [],
    }.items():
        (snapshot / name).write_text("{}")
        assert file_of_model("Some/Model", name) is not None
        assert [problem.path for problem in to_download(hub)] == paths


def test_a_hub_name_is_downloaded_but_a_missing_folder_of_ours_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub = load("model.path=SomeOrganisation/no-such-model")
    assert missing_files(hub) == []
    assert [problem.path for problem in to_download(hub)] == ["model.path"]
    for path in ("models/smollm2", "./org/name", "/org/name", "name", "a/b/c"):
        assert [problem.path for problem in missing_files(load(f"model.path={path}"))] == [
            "model.path"
        ]
