"""verl's example scripts and YAML files become configurations of ours that mean the same."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppo.check.preflight import run_check
from ppo.check.try_reward import main as try_reward
from ppo.config import ConfigError, load_config, parse_args
from ppo.config.__main__ import main
from ppo.config.migrate.from_verl import dialect
from ppo.config.migrate.given import read_given
from ppo.config.migrate.show import show
from ppo.config.migrate.translate import Translation, translate
from ppo.config.text import inline
from tests.ppo.config.migrate.verl_examples import EXAMPLES

# two models of 7B that configs/model_shapes.yaml does not know, and one that is as large
KNOWN = "Qwen/Qwen2.5-7B-Instruct"
UNKNOWN = re.compile(r"(deepseek-ai/deepseek-llm-7b-chat|Qwen/Qwen2-7B-Instruct)\b")


def translated(*words: str) -> Translation:
    given = read_given(words)
    return translate(dialect(given), given)


def script(tmp_path, text: str) -> str:
    (tmp_path / "run.sh").write_text(text)
    return str(tmp_path / "run.sh")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_pass_check_on_their_cluster(name, tmp_path, capfd):
    text = UNKNOWN.sub(KNOWN, EXAMPLES[name]).replace("FsfairX-LLaMA3-RM-v0.1", "Llama-3.1-8B")
    assert main(["from-verl", script(tmp_path, text)]) == 0
    found = capfd.readouterr()
    (tmp_path / "mine.yaml").write_text(found.out)
    code = run_check(parse_args(["--config", str(tmp_path / "mine.yaml"), "--check"]))
    said = capfd.readouterr()
    assert code == 0, said.err
    assert "fits: " in said.out.splitlines()[-1]
    gaps = {
        "reward_model": "critic.model.enable_gradient_checkpointing = False: all models share "
        "model.enable_gradient_checkpointing\n"
    }
    assert found.err == gaps.get(name, "")


def test_values_and_defaults_are_those_of_the_run_there(tmp_path):
    found = {name: translated(script(tmp_path, text)) for name, text in EXAMPLES.items()}
    ppo, grpo, rm = (found[name] for name in ("ppo", "grpo", "reward_model"))
    assert ppo.values["trainer.logger"] == ["console", "jsonl"]
    assert ppo.values["data.train_files"] == ["~/data/gsm8k/train.parquet"]
    assert "critic.model.path" in ppo.values and "critic.optim.lr" not in grpo.values
    assert grpo.defaults["algorithm.use_kl_in_reward"] is False
    assert (grpo.values["actor.kl_loss_coef"], grpo.values["rollout.n"]) == (0.001, 5)
    assert grpo.values["check.nproc_per_node"] == 8
    # the critic's optimizer does not follow the actor's there
    assert rm.values["actor.optim.lr_warmup_steps_ratio"] == 0.1
    assert rm.defaults["critic.optim.lr_warmup_steps_ratio"] == 0.0
    assert rm.values["reward.model.path"] == "sfairXC/FsfairX-LLaMA3-RM-v0.1"
    assert len(rm.values["data.train_files"]) == 2
    dapo = found["dapo"].values
    assert dapo["reward.overlong_buffer.len"] == 4096 and dapo["reward.manager"] == "dapo"
    assert dapo["model.override_config"] == {"max_position_embeddings": 32768}
    assert dapo["rollout.val_kwargs.temperature"] == 1.0 and dapo["rollout.top_k"] == -1
    assert dapo["actor.ppo_max_token_len_per_gpu"] == 20480 and dapo["check.nnodes"] == 8
    assert dapo["model.path"] == "~/verl/models/Qwen2.5-7B"
    assert translated(script(tmp_path, EXAMPLES["dapo"]), "NNODES=2").values["check.nnodes"] == 2


def test_what_the_yaml_says_is_what_the_translation_holds(tmp_path):
    found = translated(script(tmp_path, EXAMPLES["dapo"]), "trainer.keep_best=null")
    (tmp_path / "mine.yaml").write_text(show(found, "verl"))
    config = load_config(tmp_path / "mine.yaml")
    assert config.actor.clip_ratio_high == 0.28 and config.actor.optim.lr_warmup_steps == 10
    assert config.algorithm.use_kl_in_reward is False and config.guards.preset == "none"
    assert config.trainer.max_ckpt_to_keep is None and config.trainer.total_epochs == 10


# of verl/trainer/config/ppo_trainer.yaml: what refers to something else, what is off, what is named
WHOLE = """
data:
  tokenizer: null
  train_files: ~/data/rlhf/gsm8k/train.parquet
  filter_overlong_prompts: False
  image_key: images
  custom_cls: {path: null, name: null}
  apply_chat_template_kwargs: {}
actor_rollout_ref:
  hybrid_engine: True
  model:
    path: ~/models/deepseek-llm-7b-chat
    external_lib: null
    override_config: { }
    lora_rank: 0
  actor:
    _target_: verl.workers.config.FSDPActorConfig
    strategy: fsdp
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: null
    use_dynamic_bsz: ${oc.select:no.such.key,True}
    clip_ratio: 0.1
    clip_ratio_low: 0.2
    optim: {lr: 1e-6, lr_warmup_steps: -1, min_lr_ratio: null, warmup_style: cosine}
    checkpoint: {contents: [model, optimizer, extra], load_contents: "${.contents}"}
    fsdp_config: {wrap_policy: {min_num_params: 0}, param_offload: False, fsdp_size: -1}
  rollout:
    name: sglang
    temperature: 1.0
    do_sample: True
    response_length: ${data.max_response_length}
    n: 1
    val_kwargs: {top_k: -1, temperature: 1.0, do_sample: False}
    multi_turn: {enable: False, max_turns: null, max_parallel_calls: 1, format: hermes}
    agent: {num_workers: 8, custom_async_server: {path: null}}
    over_sample_rate: 0
    skip_rollout: False
    skip_dump_dir: /tmp/rollout_dump
    profiler:
      enable: ${oc.select:actor_rollout_ref.actor.profiler.enable,false}
      tool_config: {torch: {step_start: 0}, torch_memory: {trace_alloc_max_entries: 100000}}
critic:
  rollout_n: ${actor_rollout_ref.rollout.n}
  ppo_mini_batch_size: ${actor_rollout_ref.actor.ppo_mini_batch_size}
  model: {path: ~/models/deepseek-llm-7b-chat, fsdp_config: {param_offload: True}}
reward_model:
  enable: False
  sandbox_fusion: {url: null, max_concurrent: 64}
  model: {path: ~/models/FsfairX-LLaMA3-RM-v0.1, input_tokenizer: "${actor_rollout_ref.model.path}"}
custom_reward_function: {path: score.py, name: compute_score, reward_kwargs: {scale: 2}}
trainer:
  experiment_name: gsm8k
  logger: [console, vemlp_wandb]
  resume_mode: auto
  default_local_dir: checkpoints/${trainer.experiment_name}
  max_actor_ckpt_to_keep: null
ray_init: {num_cpus: null}
algorithm: {use_pf_ppo: False, pf_ppo: {reweight_method: pow, weight_pow: 2.0}}
global_profiler: {tool: null, save_path: outputs/profile, global_tool_config: {nsys: {discrete: x}}}
"""


def test_a_whole_yaml_file_with_references_is_read(tmp_path):
    (tmp_path / "base.yaml").write_text(WHOLE)
    found = translated(str(tmp_path / "base.yaml"), "++data.max_response_length=64", "rollout.n=3",
                       "~algorithm.gamma", "+ray_init.num_cpus=4")  # fmt: skip
    values = found.values
    assert set(found.gaps) == {"trainer.logger = [console, vemlp_wandb]"}
    assert values["trainer.default_local_dir"] == "checkpoints/gsm8k"
    assert values["actor.use_dynamic_bsz"] is True
    assert values["actor.ppo_mini_batch_size"] == values["critic.ppo_mini_batch_size"] == 64
    assert values["critic.fsdp.param_offload"] is True
    assert values["rollout.n"] == 3 and values["data.max_response_length"] == 64
    assert values["rollout.val_kwargs.temperature"] == 0.0  # it does not sample there
    assert values["reward.function.kwargs"] == {"scale": 2}
    assert values["actor.optim.lr_scheduler_type"] == "cosine"
    assert "reward.model.path" not in values and "rollout.engine" in values
    # clip_ratio has no effect there beside the two, whose default is 0.2
    assert values["actor.clip_ratio_low"] == found.defaults["actor.clip_ratio_high"] == 0.2
    assert found.missing == []


# of verl's newest _generated_ppo_trainer.yaml: what has a value and asks for nothing
LEFT = """
actor_rollout_ref.actor.router_replay.mode=disabled actor_rollout_ref.actor.use_torch_compile=true
actor_rollout_ref.ref.router_replay.mode=disabled
actor_rollout_ref.actor.rollout_n=1 actor_rollout_ref.ref.rollout_n=1
actor_rollout_ref.ref.fsdp_config.model_dtype=fp32 critic.fsdp.model_dtype=fp32
actor_rollout_ref.rollout.data_parallel_size=1 actor_rollout_ref.rollout.expert_parallel_size=1
actor_rollout_ref.rollout.pipeline_model_parallel_size=1
actor_rollout_ref.rollout.scheduling_policy=fcfs
actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent
actor_rollout_ref.model.tiled_mlp.enabled=false actor_rollout_ref.model.tiled_mlp.num_shards=4
actor_rollout_ref.model.lora.type=lora actor_rollout_ref.model.lora.rank=0
actor_rollout_ref.model.lora.alpha=32 actor_rollout_ref.model.lora.target_modules=[linear_qkv]
actor_rollout_ref.model.lora_alpha=16 critic.model.lora.rank=0 critic.model.lora.alpha=32
data.image_patch_size=14 data.audio_key=audios reward.reward_manager.source=register
algorithm.rollout_correction.loss_type=ppo_clip distillation.enabled=false distillation.nnodes=0
distillation.distillation_loss.loss_mode=k3
"""


def test_defaults_that_ask_for_nothing_are_not_named():
    assert translated(*LEFT.split()).gaps == {}
    asked = translated(
        "rollout.expert_parallel_size=8", "ref.router_replay.mode=R3", "model.lora.rank=8",
        "model.lora.type=dora", "critic.fsdp.model_dtype=bfloat16",
    )  # fmt: skip
    assert {key.partition(" ")[0] for key in asked.gaps} == {
        "rollout.expert_parallel_size", "ref.router_replay.mode", "model.lora.type",
        "critic.fsdp.model_dtype",
    }  # fmt: skip


def test_that_a_reward_model_and_a_function_are_added_up_is_named():
    model = ("reward_model.enable=True", "reward_model.model.path=rm")
    function = "reward.custom_reward_function.path=score.py"
    assert translated(*model).gaps == translated(function).gaps == {}
    [(what, why)] = translated(*model, function).gaps.items()
    assert what == "a reward model beside a reward function" and "reward.weights" in why


def test_what_has_no_counterpart_is_named_with_a_reason():
    found = translated(
        "data.train_files=a.parquet", "actor_rollout_ref.rollout.multi_turn.enable=True",
        "algorithm.adv_estimator=gpg", "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.rollout.val_kwargs.top_k=20", "actor.unheard_of=3",
        "actor_rollout_ref.model.path=$MODEL", "--config-name=mine", "trainer.device=npu",
        "trainer.logger=${LOGGER}",
    )  # fmt: skip
    reasons = {key.partition(" = ")[0].rpartition(".")[2]: why for key, why in found.gaps.items()}
    assert (
        "use rollout.episode.path" in reasons["enable"]
        and "must be one of gae" in reasons["adv_estimator"]
    )
    assert "Megatron" in reasons["strategy"] and "top_k is not built" in reasons["top_k"]
    assert (
        "is no key" in reasons["unheard_of"] and "name that YAML file too" in reasons["config-name"]
    )
    assert "LOGGER=... behind the command" in reasons["logger"] and "cuda" in reasons["device"]
    assert found.missing == []
    assert translated("trainer.nnodes=1").missing == ["data.train_files", "model.path"]


def test_turns_with_tools_become_episodes():
    """As examples/sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn.sh of verl sets them."""
    turns = "actor_rollout_ref.rollout.multi_turn."
    words = [
        *("data.train_files=a.parquet", "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct"),
        *(f"{turns}enable=True", f"{turns}max_assistant_turns=5", f"{turns}max_user_turns=5"),
        *(f"{turns}format=hermes", "actor_rollout_ref.rollout.agent.num_workers=8"),
    ]
    found = translated(*words, f"{turns}tool_config_path=tools.yaml")
    assert found.values["rollout.episode.max_turns"] == 5
    assert found.values["rollout.episode.tool_format"] == "hermes"
    gaps = {key.partition(" = ")[0].rpartition(".")[2]: why for key, why in found.gaps.items()}
    assert "@function_tool" in gaps["enable"] and "@function_tool" in gaps["tool_config_path"]
    assert "num_workers" not in gaps
    with_tools = translated(*words, f"{turns}function_tool_path=tools.py")
    assert with_tools.values["rollout.episode.path"] == "tools.py"
    assert [key.partition(" ")[0].rpartition(".")[2] for key in with_tools.gaps] == [
        "max_user_turns",
        "max_tool_response_length",  # not said, and 256 there
    ]
    off = translated(*words, f"{turns}enable=False")
    assert off.gaps == {} and "rollout.episode.max_turns" not in off.values


def test_turns_are_not_counted_unless_that_is_said():
    turns = "actor_rollout_ref.rollout.multi_turn."
    found = translated(f"{turns}enable=True", f"{turns}max_assistant_turns=null")
    assert found.defaults["rollout.episode.max_turns"] == 10000
    assert found.defaults["rollout.episode.tool_format"] == "hermes"
    assert "rollout.episode.max_turns" not in translated("rollout.n=2").defaults


def test_a_critic_has_defaults_of_its_own():
    adapters = ("model.lora_rank=32", "model.lora_alpha=64", "model.target_modules=[q_proj]")
    found = translated(*adapters, "actor.fsdp_config.mixed_precision.param_dtype=float32")
    critic = {path: value for path, value in found.defaults.items() if path.startswith("critic.")}
    assert critic == {
        "critic.model.lora_rank": 0,  # the whole critic is trained
        "critic.fsdp.mixed_precision.param_dtype": "bfloat16",
    }
    assert found.defaults["ref.fsdp.mixed_precision.param_dtype"] == "bfloat16"
    assert "deepseek-llm-7b-chat" in found.unneeded["critic.model.path"]
    both = translated(*adapters, "critic.model.lora_rank=8").defaults
    assert (both["critic.model.lora_alpha"], both["critic.model.lora_target_modules"]) == (
        16.0,
        ["all-linear"],
    )
    grpo = translated(*adapters, "algorithm.adv_estimator=grpo")
    assert not any(path.startswith("critic.") for path in [*grpo.defaults, *grpo.unneeded])
    assert translated("model.lora.rank=32").defaults["model.lora_alpha"] == 32.0


def test_gspo_is_a_mean_of_sequences():
    gspo = "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"
    found = translated(gspo)
    assert found.defaults["actor.loss_agg_mode"] == "seq-mean-token-mean" and not found.gaps
    assert found.defaults["critic.loss_agg_mode"] == "token-mean"
    said = translated(gspo, "actor_rollout_ref.actor.loss_agg_mode=token-mean")
    assert "gspo is seq-mean" in said.gaps["actor.loss_agg_mode = token-mean"]
    assert not translated(gspo, "actor.loss_agg_mode=seq-mean-token-mean").gaps
    assert "actor.loss_agg_mode" not in translated("actor.policy_loss.loss_mode=cispo").defaults


def test_an_adaptive_coefficient_has_no_bounds():
    adaptive = translated("algorithm.kl_ctrl.type=adaptive").defaults
    assert adaptive["algorithm.kl_ctrl.min"] == 0.0 and adaptive["algorithm.kl_ctrl.max"] == 1000.0
    assert "algorithm.kl_ctrl.min" not in translated("algorithm.kl_ctrl.type=fixed").defaults


def test_a_folder_of_hdfs_is_no_run_folder():
    found = translated("trainer.default_hdfs_dir=hdfs://user/run", "trainer.default_local_dir=out")
    assert found.values["trainer.default_local_dir"] == "out"
    assert "all nodes see" in found.gaps["trainer.default_hdfs_dir = hdfs://user/run"]


def test_sampling_in_validation_without_do_sample_depends_on_the_release():
    found = translated("rollout.val_kwargs.temperature=0.6", "rollout.val_kwargs.do_sample=False")
    assert found.values["rollout.val_kwargs.temperature"] == 0.0
    assert "before 0.7" in found.unneeded["rollout.val_kwargs.temperature = 0.6"]


def test_a_model_that_sees_is_named():
    vision = "actor_rollout_ref.actor.freeze_vision_tower=True"
    for name in (
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "meta-llama/Llama-3.2-11B-Vision",
        "a/InternVL3-8B",
    ):
        words = ("data.train_files=a.parquet", f"actor_rollout_ref.model.path={name}", vision)
        assert sorted(why.partition(":")[0] for why in translated(*words).gaps.values()) == [
            "it sees, by its name",
            "vision is not built",
        ]


def test_files_that_cannot_be_read_end_with_2(tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "bad.sh").write_text("run 'a")
    for word in (tmp_path / "none.sh", tmp_path / "bad.yaml", tmp_path / "bad.sh"):
        assert main(["from-verl", str(word)]) == 2
        assert word.name in capsys.readouterr().err
    assert main(["from-verl"]) == 2
    with pytest.raises(ConfigError, match="no such file"):
        read_given(["no/such/file.yaml"])


# as verl's page on rewards of one's own has it: this signature, a number or a dict with "score"
REWARD = """
import re
def my_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    assert data_source == "openai/gsm8k" and extra_info["split"] == "train"
    found = re.findall(r"-?[0-9.,]+", solution_str)
    correct = bool(found) and found[-1].replace(",", "") == ground_truth
    return {"score": scale * correct, "acc": correct, "pred": found[-1] if found else ""}
"""


def test_parquet_files_and_rewards_of_verl_are_read_unchanged(tmp_path, capsys):
    rows = [  # as examples/data_preprocess/gsm8k.py of verl writes them
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {n} + {n}? Answer after ####."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
            "extra_info": {
                "split": "train",
                "index": n,
                "answer": f"#### {2 * n}",
                "question": "?",
            },
        }
        for n in (3, 50)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "score.py").write_text(REWARD)
    found = translated(
        f"data.train_files={tmp_path}/train.parquet", "actor_rollout_ref.model.path=tiny",
        f"custom_reward_function.path={tmp_path}/score.py", "custom_reward_function.name=my_score",
        "+custom_reward_function.reward_kwargs.scale=2", "algorithm.use_kl_in_reward=False",
    )  # fmt: skip
    assert not found.gaps
    overrides = [f"{key}={inline(value)}" for key, value in (found.values | found.defaults).items()]
    rewards = [override for override in overrides if override.startswith("reward.function.")]
    files = [str(tmp_path / "score.py"), "--data", str(tmp_path / "train.parquet")]
    assert try_reward([*files, *rewards, "reward.num_workers=1"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"the truth +2 +2\.0000", said) and re.search(r"empty +2 +0\.0000", said)
