"""`--check`: right arithmetic, honest predictions, no heavy imports, every problem in one go."""

import ctypes
import json
import math
import re
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo.check.describe import batch_lines
from ppo.check.fits import fits
from ppo.check.memory_phases import (
    GIB,
    Plan,
    host_bytes,
    kv_cache,
    kv_context,
    micro_tokens,
    phases,
)
from ppo.check.preflight import check_shapes, find_models, run_check
from ppo.config import Config, load_config, parse_args
from ppo.model_shapes import TINY, ModelShape, find_shape, parse_shape

ROOT = Path(__file__).resolve().parents[3]
PRESETS = [
    *sorted(path.name for path in (ROOT / "configs").glob("*po*.yaml")),
    *("episodes/calculator.yaml", "episodes/try_again.yaml"),
]
REQUIRED = ["model.path=tiny", "data.train_files=tiny"]

# Numbers of parameters on the models' pages, counted from their checkpoints.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-9b-it": 9_241_705_984,
    "google/gemma-2-27b-it": 27_227_128_320,
    "google/gemma-3-270m-it": 268_098_176,
    "google/gemma-3-1b-it": 999_885_952,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "mistralai/Ministral-8B-Instruct-2410": 8_019_808_256,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "microsoft/Phi-3.5-mini-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "THUDM/GLM-4-9B-0414": 9_400_279_040,
    "THUDM/GLM-4-32B-0414": 32_566_081_536,
    "zai-org/glm-4-9b-chat-hf": 9_399_951_360,
    "deepseek-ai/deepseek-math-7b-instruct": 6_910_365_696,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
}


def shape_of(path: str) -> ModelShape:
    found = find_shape(path)
    assert found is not None
    return found[0]


def plan(
    *overrides: str,
    model: str = "tiny",
    ranks: int = 8,
    nodes: int = 1,
    gib: float = 80,
) -> Plan:
    config: Config = load_config(None, [*REQUIRED, *overrides])
    return Plan(
        config=config,
        dims=config.dims(ranks * nodes, ranks),
        shapes={name: shape_of(model) for name in config.models},
        cuda=config.trainer.device != "cpu",
        device_bytes=gib * GIB,
    )


def peak(plan: Plan, phase: str) -> float:
    return next(found.bytes for found in phases(plan) if found.name == phase)


def item(plan: Plan, phase: str, name: str) -> float:
    (found,) = [p for p in phases(plan) if p.name == phase]
    return sum(entry.bytes for entry in found.items if entry.name.startswith(name))


def test_a_reward_model_is_on_the_device_only_while_it_scores():
    seven_b = plan("reward.model.enable=true", "reward.model.path=any/classifier",
                   model="Qwen/Qwen2.5-7B-Instruct")  # fmt: skip
    shape = shape_of("Qwen/Qwen2.5-7B-Instruct")
    # bfloat16 over 8 ranks, without the output head, with a value head
    params = (shape.num_params - shape.embedding_params + shape.hidden_size) * 2 / 8
    for phase in phases(seven_b):
        held = item(seven_b, phase.name, "reward model parameters")
        assert held == (pytest.approx(params) if phase.name == "reward model" else 0), phase.name
    on_host = next(x for x in host_bytes(seven_b) if x.name == "reward model parameters")
    assert on_host.bytes == pytest.approx(8 * params)
    assert item(seven_b, "reward model", "log-probs") == 0
    assert "reward model" not in [phase.name for phase in phases(plan())]


@pytest.mark.parametrize("path", PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(path):
    assert shape_of(path).num_params == PUBLISHED[path]


def test_a_folder_with_config_json_is_read_without_the_table(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 3}))
    shape, where = find_shape(str(tmp_path)) or pytest.fail()
    assert shape.num_layers == 3
    assert where == str(tmp_path / "config.json")
    with pytest.raises(ValueError, match="hidden_size"):
        parse_shape({"num_hidden_layers": 1})
    assert find_shape("SomeOrganisation/unknown") is None


def test_a_mixture_of_experts_counts_all_experts_and_computes_some():
    shape = parse_shape(
        TINY | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 32, "head_dim": 8}
    )  # fmt: skip
    # q, o 64 x 64; k, v 64 x 32; q and k norms; two norms; 4 experts; router
    assert shape.layer_params == 2 * 4096 + 2 * 2048 + 16 + 128 + 4 * 3 * 64 * 32 + 4 * 64
    assert shape.intermediate_size == 64


def test_a_model_is_found_by_the_last_part_of_its_path_or_said_to_be_unknown(tmp_path, capsys):
    shape, where = find_shape("/data/models/Qwen2.5-7B-Instruct/") or pytest.fail()
    assert shape.num_params == PUBLISHED["Qwen/Qwen2.5-7B-Instruct"]
    assert where.endswith("model_shapes.yaml, as Qwen/Qwen2.5-7B")
    assert find_shape("unsloth/llama-3.1-8b") == find_shape("other/Llama-3.1-8B-Instruct")
    base = ["--config", "ppo.yaml", "--check"]
    for path, advice in (
        ("SomeOrganisation/unknown", "hf download SomeOrganisation/unknown config.json"),
        (f"{tmp_path}/mine", f"put its config.json (a few kB) at {tmp_path}/mine/config.json"),
    ):
        assert run_check(parse_args([*base, f"model.path={path}"])) == 0
        out = capsys.readouterr().out
        assert "its sizes are not known here" in out and advice in out
        assert "configs/model_shapes.yaml" in out
        assert out.splitlines()[-1] == "memory: not checked"


@pytest.mark.parametrize("content", ["[]", "{}", "{", '{"hidden_size": "many"}', "[" * 9000, "1"])
def test_a_config_json_that_is_none_is_a_problem_of_its_key(tmp_path, capsys, content):
    (tmp_path / "config.json").write_text(content)
    assert run_check(parse_args(["--config", "ppo.yaml", "--check", f"model.path={tmp_path}"])) == 2
    err = capsys.readouterr().err
    assert f"model.path = '{tmp_path}'" in err and "does not describe a language model" in err


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_passes_the_check(name, capsys):
    assert run_check(parse_args(["--config", name, "--check"])) == 0
    out = capsys.readouterr().out
    assert "DOES NOT FIT" not in out
    assert "predicted peak memory" in out
    assert "warnings" not in out


def _cpu_seconds() -> float:
    """Of children that have ended: whatever else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("preset", PRESETS)
def test_the_check_of_every_preset_takes_seconds(preset, capsys):
    start = time.process_time()
    run_check(parse_args(["--config", preset, "--check"]))
    assert time.process_time() - start < 4  # and one of imports
    assert "predicted peak memory per rank" in capsys.readouterr().out


def test_the_check_takes_seconds_and_imports_no_torch(tmp_path):
    code = (
        "import sys; from ppo.config import parse_args; from ppo.check.preflight import run_check;"
        "run_check(parse_args(sys.argv[1:]));"
        "heavy = {'torch', 'transformers', 'sglang'} & set(sys.modules); sys.exit(str(heavy))"
    )
    start = _cpu_seconds()
    run = subprocess.run(
        [sys.executable, "-c", code, "--config", "ppo.yaml", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert _cpu_seconds() - start < 5
    assert run.stderr.strip() == "set()"


def test_every_problem_is_reported_with_exit_code_2(capsys):
    code = run_check(
        parse_args(
            ["--config", "ppo.yaml", "--check", "actor.lr=1", "rollout.n=x", "nonsense=1",
             "actor.ulysses_sequence_parallel_size=3", "data.train_batch_size=1000"]
        )
    )  # fmt: skip
    assert code == 2
    report = capsys.readouterr().err
    for part in ("5 problems", "actor.lr", "rollout.n", "nonsense", "possible: 1, 2, 4, 8",
                 "must divide data.train_batch_size (1000)"):  # fmt: skip
        assert part in report


def test_absent_files_are_listed_and_are_no_problem(tmp_path, capsys):
    assert (
        run_check(parse_args(["--config", "ppo.yaml", "--check", f"data.train_files={tmp_path}/x"]))
        == 0
    )
    out = capsys.readouterr().out
    assert "not checked" in out
    assert f"{tmp_path}/x" in out


def test_options_of_the_command_line_replace_the_check_section(capsys):
    arguments = ["--config", "ppo_tiny.yaml", "--check", "--nnodes", "2", "--nproc_per_node", "4"]
    assert run_check(parse_args(arguments)) == 0
    out = capsys.readouterr().out
    assert "2 nodes x 4 ranks" in out
    assert "dp_replicate 2 x dp_shard 4 x sp 1   HYBRID_SHARD" in out
    assert run_check(parse_args([*arguments, "--device_memory_gib", "0.001"])) == 2
    assert "check.device_memory_gib" in capsys.readouterr().err
    for name in ("nnodes", "nproc_per_node", "device_memory_gib"):
        for value in ("0", "two", "9" * 5000):
            assert run_check(parse_args([*arguments, f"--{name}={value}"])) == 2
            assert f"check.{name} = " in capsys.readouterr().err


def test_batch_arithmetic_is_printed(capsys):
    arguments = ["--config", "ppo.yaml", "--check", "rollout.n=2", "actor.ppo_epochs=2"]
    run_check(parse_args(arguments))
    out = capsys.readouterr().out
    assert "1024 prompts x 2 responses = 2048 sequences of up to 1024 tokens" in out
    assert "generation: 256 sequences per engine, 256 at once" in out
    assert (
        "actor: 4 mini-batches of 256 prompts (512 sequences, about 64 per sp group) x 2 epochs = "
        "8 optimizer steps"
    ) in out
    assert "= 16384 per row: at most about 4 micro-batches per mini-batch" in out


def test_static_memory_is_sixteen_bytes_a_parameter_over_the_shards():
    seven = plan(model="Qwen/Qwen2.5-7B-Instruct")
    static = sum(
        item(seven, "train actor", name)
        for name in ("actor parameters", "actor Adam moments", "gradients")
    )
    assert static == pytest.approx(16 * 7_615_616_512 / 8)
    assert item(seven, "train actor", "critic Adam") == pytest.approx(
        8 * (7_615_616_512 - 152_064 * 3584 + 3584) / 8
    )
    half = plan("actor.optim.state_dtype=bfloat16", model="Qwen/Qwen2.5-7B-Instruct")
    for name in ("actor Adam moments", "critic Adam moments"):  # the critic follows
        whole = item(seven, "train actor", name)
        assert item(half, "train actor", name) == pytest.approx(whole / 2)
    assert item(half, "train actor", "gradients") == item(seven, "train actor", "gradients")
    offloaded = plan(
        "actor.fsdp.optimizer_offload=true", "actor.fsdp.param_offload=true",
        model="Qwen/Qwen2.5-7B-Instruct",
    )  # fmt: skip
    assert item(offloaded, "train actor", "critic") == 0
    assert item(offloaded, "generate", "actor") == 0
    assert item(offloaded, "train actor", "actor Adam moments") > 0


def test_the_host_holds_a_copy_of_what_is_saved_asynchronously_once_a_shard():
    def copies(*overrides: str, nodes: int = 1) -> dict[str, float]:
        made = plan(*overrides, model="Qwen/Qwen2.5-7B-Instruct", nodes=nodes)
        name = " copy, to save it asynchronously"
        items = [item for item in host_bytes(made) if item.name.endswith(name)]
        return {item.name.removesuffix(name): item.bytes for item in items}

    actor = 7_615_616_512
    critic = actor - 152_064 * 3584 + 3584
    whole = copies()
    assert whole == {"actor": pytest.approx(12 * actor), "critic": pytest.approx(12 * critic)}
    assert copies(nodes=2) == {n: pytest.approx(size / 2) for n, size in whole.items()}
    assert copies("actor.fsdp.fsdp_size=16", nodes=2) == copies(nodes=2)
    rests = copies("actor.fsdp.optimizer_offload=true", "critic.checkpoint.save_contents=[model]")
    assert rests == {"actor": pytest.approx(4 * actor), "critic": pytest.approx(4 * critic)}
    assert copies("actor.fsdp.offload_policy=true") == whole  # updates change that in place
    assert "actor" not in copies(
        "actor.fsdp.optimizer_offload=true", "actor.fsdp.param_offload=true"
    )
    assert not copies("trainer.async_save=false") and not copies("trainer.save_freq=-1")


def test_communicators_of_nccl_are_counted_and_said_to_be_assumed():
    one, two = plan(), plan("actor.ulysses_sequence_parallel_size=2", nodes=2)
    name = "NCCL communicators"
    assert item(two, "train actor", name) == 3 * item(one, "train actor", name)  # shard, dp, sp
    assert any(i.name == f"{name}, 1 (assumed)" for phase in phases(one) for i in phase.items)


def test_hybrid_sharding_holds_a_nodes_share():
    hybrid, full = plan(nodes=2), plan("actor.fsdp.fsdp_size=16", nodes=2)
    assert item(hybrid, "train actor", "gradients") == 2 * item(full, "train actor", "gradients")


def test_the_kv_cache_takes_what_weights_leave_of_its_share():
    seven = plan("rollout.tensor_model_parallel_size=4", model="Qwen/Qwen2.5-7B-Instruct")
    tokens, size, *_ = kv_cache(seven)
    # 28 layers x 2 x (4 kv heads / 4) x 128 x 2 bytes
    assert size == tokens * 14336
    weights = 7_615_616_512 * 2 / 4
    assert tokens == (0.6 * 80 * GIB - weights) // 14336 // 256 * 256
    repeated = plan("rollout.tensor_model_parallel_size=8", model="Qwen/Qwen2.5-7B-Instruct")
    tokens, size, *_ = kv_cache(repeated)
    assert size == tokens * 14336


def test_the_kv_cache_of_the_plan_is_the_one_that_the_engine_asks_for():
    from transformers import Qwen2Config

    from ppo.engines.sglang.args import plan_memory

    hf_config = Qwen2Config(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        intermediate_size=18944, vocab_size=152064,
    )  # fmt: skip
    for device, size_gib, expected in (("auto", 80, 1_232_128), ("cpu", 16, 256)):
        seven = plan(
            *("rollout.engine=sglang", f"trainer.device={device}", "rollout.max_model_len=120"),
            *("rollout.tensor_model_parallel_size=2", "rollout.max_num_seqs=2"),
            *("data.max_prompt_length=60", "data.max_response_length=60"),
            "rollout.gpu_memory_utilization=0.5",
            model="Qwen/Qwen2.5-7B-Instruct",
            gib=size_gib,
        )
        memory = plan_memory(
            seven.config.rollout,
            hf_config,
            parameters=PUBLISHED["Qwen/Qwen2.5-7B-Instruct"],
            device_bytes=size_gib * GIB,
            on_cpu=device == "cpu",
        )
        assert kv_cache(seven) == memory.cache and memory.cache.tokens == expected
        assert memory.weight_bytes == item(seven, "generate", "engine weights")


def test_states_of_linear_attention_and_the_kv_cache_share_what_the_engine_has():
    """Qwen3.5-9B: 24 of 32 layers keep a state of 32 heads x 128 x 128 in float32, and the last 3
    inputs of a convolution over 8,192 channels; 8 layers keep 4 kv heads x 256."""
    state = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    token = 8 * 2 * 4 * 256 * 2
    hybrid = plan(model="Qwen/Qwen3.5-9B")
    room = 0.6 * 80 * GIB - shape_of("Qwen/Qwen3.5-9B").num_params * 2 - state
    for max_num_seqs in (None, 16):
        found = kv_cache(
            plan(f"rollout.max_num_seqs={max_num_seqs or 'null'}", model="Qwen/Qwen3.5-9B")
        )
        assert found.states == 5 * found.sequences
        assert found.bytes == found.tokens * token + (found.states + 1) * state
        assert room - 256 * token < found.bytes - state <= room
        assert found.tokens >= kv_context(hybrid)
        assert max_num_seqs is None or found.sequences == max_num_seqs
    sequences = kv_cache(hybrid).sequences
    # each has its states and a quarter of the longest
    assert sequences == pytest.approx(room / (5 * state + kv_context(hybrid) / 4 * token), rel=0.02)
    too_many = plan("rollout.max_num_seqs=1024", model="Qwen/Qwen3.5-9B")
    assert kv_cache(too_many).tokens == 0 and not fits(too_many)


def test_what_an_engine_computes_while_a_token_is_drawn_is_part_of_the_plan():
    keys = ("data.train_batch_size=512", "rollout.n=8", "rollout.tensor_model_parallel_size=1")
    model = "Qwen/Qwen2.5-0.5B-Instruct"
    many = plan(*keys, model=model)
    # 4,096 sequences over 8 engines; logits in bfloat16 and three times in float32
    assert item(many, "generate", "logits") == 512 * 151_936 * 14
    few = plan(*keys, "rollout.max_num_seqs=64", model=model)
    assert item(few, "generate", "logits") == 64 * 151_936 * 14


def test_a_model_that_is_only_read_is_held_in_the_dtype_it_computes_in():
    """One rank: what is stored in bfloat16 is used as it is, so nothing is gathered."""
    alone = plan("actor.use_kl_loss=true", model="Qwen/Qwen2.5-0.5B-Instruct", ranks=1)
    assert alone.model("ref").master == 2 and alone.model("actor").master == 4
    assert alone.model("critic").master == 4


def test_an_engine_that_keeps_its_cache_has_it_while_weights_arrive():
    kept = plan("rollout.free_cache_engine=false", model="Qwen/Qwen2.5-0.5B-Instruct")
    assert item(kept, "reshard", "KV cache") == kv_cache(kept).bytes
    assert item(plan(model="Qwen/Qwen2.5-0.5B-Instruct"), "reshard", "KV cache") == 0


@pytest.mark.parametrize(
    ("engine", "model", "is_whole"),
    [
        ("torch", "Qwen/Qwen2.5-0.5B-Instruct", True),
        ("sglang", "Qwen/Qwen2.5-0.5B-Instruct", False),
        ("sglang", "google/gemma-3-1b-it", True),  # a plain nn.Embedding on every rank
    ],
)
def test_an_embedding_that_ranks_do_not_split_is_counted_whole(engine, model, is_whole):
    keys = (f"rollout.engine={engine}", "rollout.tensor_model_parallel_size=2")
    shape = shape_of(model)
    split = shape.num_params - (shape.embedding_params if is_whole else 0)
    found = item(plan(*keys, model=model), "generate", "engine weights")
    assert found == 2 * (shape.num_params - split) + split


@pytest.mark.parametrize(("context", "fits"), [(248, True), (249, False)])
def test_the_plan_refuses_what_the_engine_refuses(capsys, context: int, fits: bool):
    """A page of 256 tokens, all that there is, holds a sequence and the engine's reserve of 8."""
    num_params = shape_of("tiny").num_params
    page = 256 * 2 * 2 * 4 * 8 * 4  # layers x (k, v) x kv heads x head_dim x bytes of a token
    size_gib = (num_params * 4 + 1.5 * page) / 0.6 / GIB
    lengths = ["data.max_prompt_length=128", f"data.max_response_length={context - 128}"]
    arguments = [*REQUIRED, *lengths, f"check.device_memory_gib={size_gib}"]
    run_check(parse_args(["--config", "ppo_tiny.yaml", "--check", "trainer.device=auto",
                          "rollout.engine=sglang", *arguments]))  # fmt: skip
    assert ("rollout.gpu_memory_utilization = 0.6" not in capsys.readouterr().err) == fits


def test_a_share_without_room_for_one_sequence_is_a_problem(capsys):
    arguments = ["--config", "ppo.yaml", "--check", "rollout.gpu_memory_utilization=0.1"]
    assert run_check(parse_args(arguments)) == 2
    assert "rollout.gpu_memory_utilization" in capsys.readouterr().err


def test_degrees_that_the_heads_do_not_allow_are_a_problem():
    config = load_config(
        None,
        ["model.path=Qwen/Qwen2.5-7B-Instruct", "data.train_files=tiny",
         "actor.ulysses_sequence_parallel_size=8", "rollout.tensor_model_parallel_size=8"],
    )  # fmt: skip
    found = [
        str(problem)
        for problem in check_shapes(config, find_models(config).shapes, config.dims(8, 8))
    ]
    assert len(found) == 2
    assert all("28 attention and 4 kv heads" in line for line in found)
    assert all("possible: 1, 2, 4, 28" in line for line in found)


def test_micro_batches_hold_the_budget_or_the_longest_sequence():
    long = ["data.max_prompt_length=1000", "data.max_response_length=3000"]

    def tokens(*overrides: str) -> int:
        made = plan(*long, *overrides, "actor.ppo_mini_batch_size=64")
        return micro_tokens(made, made.config.actor)

    assert tokens("actor.ppo_max_token_len_per_gpu=10000") == 10000
    assert tokens("actor.ppo_max_token_len_per_gpu=100") == 4000
    assert tokens("actor.ppo_max_token_len_per_gpu=1000000") == 8 * 4000
    sp = "actor.ulysses_sequence_parallel_size=4"
    assert tokens("actor.ppo_max_token_len_per_gpu=100", sp) == 1000
    count = ["actor.use_dynamic_bsz=false", "actor.ppo_micro_batch_size_per_gpu=2"]
    assert tokens(*count) == 8000
    assert tokens(*count, sp) == 2000
    assert tokens("actor.use_dynamic_bsz=false") == 8 * 4000


def test_the_last_line_says_by_how_much_and_verbose_lists_every_item(capsys):
    base = ["--config", "ppo.yaml", "--check"]
    assert run_check(parse_args(base)) == 0
    short = capsys.readouterr().out.splitlines()
    left, usable = re.findall(r"([\d.]+) (?:usable )?GiB", short[-1])
    peaks = [float(re.findall(r"[\d.]+", line)[0]) for line in short if line.endswith("  fits")]
    assert float(left) == pytest.approx(float(usable) - max(peaks), abs=0.011)
    assert usable == "75.2"  # 6 % of 80 GiB are headroom
    assert run_check(parse_args([*base, "-v"])) == 0
    long = capsys.readouterr().out.splitlines()
    assert any(line.endswith("  actor Adam moments") for line in long)
    assert [line for line in long if line in short] == short


def test_a_plan_may_not_count_on_the_last_gibibytes_of_a_card():
    """A card of 80 GB gives out less than 80 GiB, and neither NCCL nor fragments are counted."""
    for device, wanted, too_little in (("auto", 0.93, 0.95), ("cpu", 0.99, 1.01)):
        # an engine whose cache does not grow with the card
        share = "rollout.gpu_memory_utilization=0.95"
        made = plan(f"trainer.device={device}", "rollout.engine=torch", share)
        most = max(phase.bytes for phase in phases(made))
        assert fits(replace(made, device_bytes=most / wanted))
        assert not fits(replace(made, device_bytes=most / too_little))


def test_sequence_parallelism_makes_a_long_sequence_fit(capsys):
    arguments = [
        "--config", "ppo_tiny.yaml", "--check", "--nproc_per_node=4", "--device_memory_gib=0.1",
        "data.max_response_length=32736", "actor.ppo_mini_batch_size=4", "data.train_batch_size=4",
        "algorithm.adv_estimator=grpo", "rollout.n=2", "rollout.max_num_seqs=1",
    ]  # fmt: skip
    assert run_check(parse_args(arguments)) == 2
    report = capsys.readouterr().err
    assert "train actor needs" in report
    assert "it fits with actor.ulysses_sequence_parallel_size=2" in report
    assert run_check(parse_args([*arguments, "actor.ulysses_sequence_parallel_size=4"])) == 0


def test_checkpointing_offload_and_sharding_each_lower_the_peak():
    model = "Qwen/Qwen2.5-7B-Instruct"
    usual = peak(plan(model=model), "train actor")
    worse = (
        "model.enable_gradient_checkpointing=false",
        "actor.fsdp.reshard_after_forward=false",
        "rollout.free_cache_engine=false",
    )
    for override in worse:
        assert peak(plan(override, model=model), "train actor") > usual
    better = (
        "model.enable_activation_offload=true",
        "actor.fsdp.optimizer_offload=true",
        "actor.fsdp.offload_policy=true",
        "actor.ppo_max_token_len_per_gpu=4096",
    )
    for override in better:
        assert peak(plan(override, model=model), "train actor") < usual


def test_a_teacher_is_counted_with_its_own_sizes():
    keys = ("algorithm.adv_estimator=opd", "ref.model.path=Qwen/Qwen2.5-7B-Instruct")
    small, large = shape_of("Qwen/Qwen2.5-0.5B-Instruct"), shape_of("Qwen/Qwen2.5-7B-Instruct")
    own = plan(*keys, model="Qwen/Qwen2.5-0.5B-Instruct")
    taught = replace(own, shapes={"actor": small, "ref": large})
    before, after = ({p.name: p.bytes for p in phases(each)} for each in (own, taught))
    assert after["log-probs"] - before["log-probs"] > (7.6e9 - 0.5e9) / 8 * 2  # its shard in bf16
    assert after["train actor"] == before["train actor"]
    on_host = [
        {i.name: i.bytes for i in host_bytes(each)}["ref parameters"] for each in (own, taught)
    ]
    assert on_host == [pytest.approx(2 * s.num_params) for s in (small, large)]
    # a teacher that is smaller than the student: the student's own pass needs more
    swapped = replace(own, shapes={"actor": large, "ref": small})
    (items,) = [p.items for p in phases(swapped) if p.name == "log-probs"]
    budget = own.config.actor.ppo_max_token_len_per_gpu
    assert any(f"({budget} tokens)" in item.name for item in items)
    lines = find_models(load_config(None, [*REQUIRED, *keys])).lines
    assert any(line.startswith("ref: Qwen/Qwen2.5-7B-Instruct, 7.6") for line in lines), lines


def test_a_kl_over_the_vocabulary_is_counted_where_it_is_held():
    model = "Qwen/Qwen2.5-7B-Instruct"
    off = plan("actor.use_kl_loss=true", model=model)
    on = plan("actor.use_kl_loss=true", "actor.kl_loss_type=full", model=model)
    before, after = ({p.name: p.bytes for p in phases(each)} for each in (off, on))
    head, states = 152064 * 3584 * 2, 16384 * 3584 * 2  # in bf16: Qwen's head; a micro-batch's
    assert after["train actor"] - before["train actor"] == pytest.approx(head + states, rel=0.05)
    assert after["log-probs"] - before["log-probs"] == 2 * states  # the ref's pass has twice them
    assert after["train critic"] == before["train critic"]
    of_host = {i.name: i.bytes for i in host_bytes(on)}["ref last hidden states"]
    once = 1024 * 512 * 3584 * 2  # every response token of the batch
    assert of_host == 2 * once  # while they move to where the critic's rows are
    alone = plan(
        *("actor.use_kl_loss=true", "actor.kl_loss_type=full", "algorithm.adv_estimator=grpo"),
        *("rollout.n=2", "data.train_batch_size=512", "actor.ppo_mini_batch_size=512"),
        model=model,
    )
    assert {i.name: i.bytes for i in host_bytes(alone)}["ref last hidden states"] == once
    assert "ref last hidden states" not in {item.name for item in host_bytes(off)}


def test_the_plan_of_dynamic_sampling_says_how_its_rounds_go_on():
    config = load_config("dapo_tiny.yaml")
    lines = "\n".join(batch_lines(config, config.dims(2, 2)))
    assert "8 prompts x 4 responses = 32 sequences" in lines
    assert "whose acc differs, from rounds of 6 prompts, 10 rounds at most" in lines
    assert "generation: 12 sequences per engine, 8 at once" in lines


def test_inputs_that_are_offloaded_are_in_the_hosts_list_a_power_of_two_each():
    words = ("trainer.device=cuda", "model.enable_activation_offload=true")
    made = plan(*words, "actor.ppo_max_token_len_per_gpu=100")
    one = (
        micro_tokens(made, made.config.actor) * made.actor.hidden_size * made.model("actor").compute
    )
    held = {each.name: each.bytes for each in host_bytes(made)}["inputs of all layers"]
    power = held / made.actor.num_layers / made.dims.ranks_per_node
    assert math.log2(power).is_integer() and one <= power < 2 * one
    assert "inputs of all layers" not in {each.name for each in host_bytes(plan(words[0]))}


@pytest.mark.parametrize(("vocab", "bucket"), [(64, 1), (64, 8), (20_000, 1)])
def test_what_an_engine_without_a_table_is_sent_fits_into_the_plan(vocab, bucket):
    """Of a mixture whole layers are assembled, converted and joined: measured on one rank."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from ppo.engines.sglang.sync import Parcel, WeightSync
    from sharding.mesh import ParallelDims, build_mesh, init_distributed
    from tests.peak_memory import PeakTracker

    sizes: dict[str, Any] = {
        **{"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "num_experts": 32, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 128, "vocab_size": vocab, "tie_word_embeddings": False},
    }
    hf_config = Qwen3MoeConfig(**sizes)
    cpu = torch.device("cpu")
    with init_distributed(cpu):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), cpu)
        module = AutoModelForCausalLM.from_config(hf_config)
        sync = WeightSync(module, mesh, num_ids=vocab, dtype=torch.float32, bucket_mib=bucket)
        with PeakTracker(cpu) as tracker:
            for _, parcel in sync._stages(Parcel([], [], torch.zeros(1)), None):
                del parcel
    planned = replace(
        plan(
            *("rollout.engine=sglang", "rollout.dtype=float32", "trainer.device=cpu"),
            f"rollout.reshard_bucket_mib={bucket}",
            ranks=1,
        ),
        shapes=dict.fromkeys(plan().config.models, parse_shape(hf_config.to_dict())),
    )
    sent = item(planned, "reshard", "two reshard") + item(planned, "reshard", "whole layers")
    assert sent == pytest.approx(tracker.peak_bytes, rel=0.15)


class Driver:
    """The four functions of CUDA's driver that say how much memory each device has."""

    def __init__(self, *gib: float) -> None:
        self.sizes = [int(size * GIB) for size in gib]

    def cuInit(self, flags: int) -> int:
        return 0 if self.sizes else 100  # CUDA_ERROR_NO_DEVICE

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.sizes)
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal + 5  # a handle, not the number
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:
        size._obj.value = self.sizes[device.value - 5]
        return 0


def test_a_check_for_this_machine_plans_for_its_smallest_gpu(monkeypatch, capsys):
    base = ["--config", "ppo.yaml", "--check", "model.path=Qwen/Qwen2.5-0.5B-Instruct"]  # 80 GiB

    def plan(driver: Driver | None, *words: str) -> str:
        def load(name: str) -> Driver:
            assert name == "libcuda.so.1"
            if driver is None:
                raise OSError("libcuda.so.1: cannot open shared object file")
            return driver

        monkeypatch.setattr(ctypes, "CDLL", load)
        assert run_check(parse_args([*base, *words])) == 0
        return capsys.readouterr().out

    auto = ("--device_memory_gib", "auto")
    as_said = plan(None)
    assert plan(None, *auto) == plan(Driver(), *auto) == plan(Driver(141)) == as_said
    assert plan(Driver(141), *auto, "trainer.device=cpu") == plan(None, "trainer.device=cpu")
    assert plan(Driver(141, 79.1), *auto) == as_said  # a card of 80 GB
    found = plan(Driver(141, 77.5), *auto)
    assert found.startswith("device memory: 77.5 GiB, of the smallest GPU that CUDA shows here\n")
    assert "77.5 GiB there" in found and "77.5 GiB there" not in as_said
    for said in (["check.device_memory_gib=90"], ["--device_memory_gib", "90"]):  # wins
        assert "90 GiB there" in plan(Driver(141, 77.5), *auto, *said)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(2))
    assert run_check(parse_args([*base, *auto])) == 2
    assert "check.device_memory_gib" in capsys.readouterr().err
