"""The predicted memory of a training pass against the peak of live tensors of a real one."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ppo.check.memory_pass import (
    ITEM_BYTES,
    LOGITS_BLOCK,
    MOMENT_BYTES,
    PENDING_BYTES,
    STEP_ELEMENTS,
    Item,
    Pass,
    ShardedModel,
    total,
    training_pass,
)
from ppo.check.memory_phases import phases
from ppo.check.preflight import find_models, plan_of
from ppo.config import (
    CheckpointPolicy,
    FsdpConfig,
    Lora,
    MixedPrecisionConfig,
    ModelConfig,
    load_config,
)
from ppo.logprobs import token_logprobs
from ppo.logprobs.blocks import CPU_BLOCK_ELEMENTS, DEVICE_BLOCK_ELEMENTS
from ppo.model_shapes import find_shape
from sharding.adamw import EIGHT_BITS, NarrowAdamW, host
from sharding.adamw.narrow import ELEMENTS_AT_ONCE
from tests.distributed import run_distributed
from tests.peak_memory import PeakTracker

TOKENS = 1024
CPU = torch.device("cpu")
LORA = Lora("model", 16, 16.0, ["all-linear"], [], 0.0, seed=0)
SIZES = {
    "usual": {"vocab_size": 4096, "hidden_size": 128, "num_hidden_layers": 3},
    "deep": {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 5},
    "wide head": {"vocab_size": 32768, "hidden_size": 32, "num_hidden_layers": 1},
}
CASES: list[dict[str, Any]] = [
    {"size": "deep", "tokens": 32, "lora": LORA, "most": "parameters"},
    {"size": "deep", "tokens": 32, "most": "optimizer"},
    {"size": "deep", "tokens": 256, "policy": "none", "most": "activations"},
    {"size": "wide head", "tokens": 256, "most": "logits"},
    {"size": "deep", "tokens": 256, "policy": "selective"},
    {"size": "deep", "tokens": 256, "rows": 64, "state": EIGHT_BITS},
]
"""the first four, KV cache and buckets dominate a configuration each"""
OF_TWO_RANKS: list[dict[str, Any]] = [
    {"sp": 2, "dtype": "bfloat16", "policy": "none", "kind": "critic"},
    {"sp": 2, "dtype": "bfloat16", "kind": "critic", "lora": LORA},
]


def test_the_plan_knows_the_largest_block_of_logits_and_the_pieces_of_a_step() -> None:
    """It imports no torch, so it has the numbers of its own."""
    assert LOGITS_BLOCK == {True: DEVICE_BLOCK_ELEMENTS, False: CPU_BLOCK_ELEMENTS}
    assert STEP_ELEMENTS == ELEMENTS_AT_ONCE
    assert PENDING_BYTES == host.PENDING_BYTES


def _save(path: Path, **sizes: int) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    sizes = {"intermediate_size": 4 * sizes["hidden_size"], **heads, **sizes}
    config: Any = Qwen2Config(tie_word_embeddings=True, **sizes)  # type: ignore[arg-type]
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {name: _save(base / name, **sizes) for name, sizes in SIZES.items()}


class Peak(NamedTuple):
    """Bytes, and the kind of item that has most of the predicted ones."""

    measured: float
    predicted: float
    most: str


def measured_and_predicted(
    rank: int, world_size: int, folders: dict[str, Path], cases: list[dict[str, Any]]
) -> list[tuple[Any, Peak]]:
    """Of a training pass on each of the ranks."""
    passes = []
    for case in cases:
        options = {name: value for name, value in case.items() if name not in ("size", "most")}
        found = _case(world_size, folders[case.get("size", "usual")], **options)
        passes.append((case, found))
    return passes


def _engine(world_size: int, folder: Path) -> list[tuple[Any, Peak]]:
    """Of the reshard, and of a generation that fills the KV cache."""
    from ppo.engines.contract import Request, SamplingParams
    from ppo.engines.embedded.engine import TorchEngine
    from ppo.models.build import build_causal_lm
    from ppo.models.learner import make_optimizer
    from ppo.models.tiny import build_tiny_tokenizer
    from sharding.mesh import build_mesh
    from tests.peak_memory import PeakTracker
    from tests.ppo.engines.drive import drive

    prompt, new = 250, 6
    config = load_config(
        "ppo_tiny.yaml",
        [f"model.path={folder}", "algorithm.adv_estimator=grpo", "rollout.n=32",
         "rollout.max_num_seqs=128",
         "trainer.device=cpu", "algorithm.use_kl_in_reward=false", "actor.use_kl_loss=false",
         "data.train_batch_size=4",
         f"data.max_prompt_length={prompt}", f"data.max_response_length={new}", "data.val_files=[]",
         "actor.ppo_mini_batch_size=4", "rollout.reshard_bucket_mib=6"],
    )  # fmt: skip
    dims = config.dims(world_size, world_size)
    mesh = build_mesh(dims, CPU)
    options = {"model_config": config.model, "fsdp_config": config.actor.fsdp}
    module = build_causal_lm(
        *(folder, mesh), **options, checkpointing=True, forward_only=False, dtype=torch.float32
    )
    optimizer = make_optimizer(module, config.actor.optim, CPU)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    engine = TorchEngine(module, mesh, build_tiny_tokenizer(), config.rollout)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True, seed=1)
    ids = [[1 + i] * prompt for i in range(4 // world_size)]
    with PeakTracker(CPU) as tracker:
        live = tracker._storages
        tracker.watch(module.parameters())
        tracker.watch(x for state in optimizer.state.values() for x in state.values())
        drive(engine.wake())
        peaks = {"reshard": tracker.peak_bytes}
        assert live is not None
        live.peak = live._total
        generation = engine.begin(params, longest_prompt=prompt, most=32 * len(ids))
        generation.submit([Request(i, ids[i // 32]) for i in range(32 * len(ids))])
        ended = 0
        while ended < 32 * len(ids):
            ended += len(generation.advance())
        peaks["generate"] = tracker.peak_bytes
        engine.release()
    plan = plan_of(config, dims, find_models(config).shapes)
    most = {"reshard": "buckets", "generate": "KV cache"}
    return [
        ({"phase": phase.name, "most": most[phase.name]}, _peak(peaks[phase.name], phase.items))
        for phase in phases(plan)
        if phase.name in most
    ]


def _peak(measured: float, items: list[Item]) -> Peak:
    kinds: Counter[str] = Counter()
    for item in items:
        kinds[item.kind] += int(item.bytes)
    return Peak(measured, total(items), kinds.most_common(1)[0][0])


def _case(
    world_size: int,
    folder: Path,
    *,
    sp: int = 1,
    dtype: str = "float32",
    policy: CheckpointPolicy = "full",
    rows: int = 0,
    kind: str = "actor",
    lora: Lora | None = None,
    state: torch.dtype = torch.float32,
    device: torch.device = CPU,
    tokens: int = TOKENS,
) -> Peak:
    """Bytes of the second step, two micro-batches of `tokens` tokens a rank."""
    from ppo.models.build import build_causal_lm, build_value_model
    from sharding.dims import ParallelDims
    from sharding.mesh import build_mesh
    from tests.peak_memory import PeakTracker

    dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, sp=sp)
    mesh = build_mesh(dims, device)
    fsdp = FsdpConfig(mixed_precision=MixedPrecisionConfig(param_dtype=dtype))  # type: ignore[arg-type]
    module = (build_value_model if kind == "critic" else build_causal_lm)(
        folder,
        mesh,
        model_config=ModelConfig(
            path=str(folder), checkpoint_policy=policy, mlp_block_rows=rows, verify_forward=False
        ),
        fsdp_config=fsdp,
        checkpointing=policy != "none",
        forward_only=False,
        dtype=torch.float32 if lora is None else getattr(torch, dtype),
        lora=lora,
    )
    trained = (p for p in module.parameters() if p.requires_grad)
    optimizer = NarrowAdamW(trained, state_dtype=state)
    found = find_shape(str(folder))
    assert found is not None
    vocabulary = found[0].vocab_size
    inputs: dict[str, Any] = {
        "input_ids": torch.randint(0, vocabulary, (1, tokens)),
        "position_ids": torch.arange(tokens)[None] + tokens * mesh.sp_rank,
        "cu_seqlens": torch.tensor([0, tokens * sp]),
        "positions": torch.arange(tokens),
    }
    if kind != "critic":
        inputs |= {"labels": torch.randint(0, vocabulary, (tokens,)), "temperature": 1.0}
    on_device = inputs.keys() - {"cu_seqlens", "temperature"}
    inputs |= {name: inputs[name].to(device) for name in on_device}
    for _ in range(2):
        with PeakTracker(device) as tracker:
            tracker.watch(module.parameters())
            tracker.watch(x for state in optimizer.state.values() for x in state.values())
            for _ in range(2):
                output = module(**inputs)
                (output if kind == "critic" else output.logprobs).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    states = [x for s in optimizer.state.values() for n, x in s.items() if n != "step"]
    moments = sum(x.to_local().numel() * x.element_size() for x in states)
    model = ShardedModel(
        name=kind,
        shape=found[0],
        has_logits=kind == "actor",
        fsdp=fsdp,
        shard_size=dims.shard_size,
        master=4 if lora is None else ITEM_BYTES[dtype],
        moment=MOMENT_BYTES["8bit"] if state == EIGHT_BITS else 4,
        lora=None if lora is None else found[0].lora_size(lora.rank, lora.target_modules, []),
    )
    run = Pass(
        tokens=tokens,
        sp=sp,
        policy=policy,
        mlp_rows=rows,
        accumulates=True,
        cuda=device.type == "cuda",
    )
    of_adam = model.trained_params * 2 * model.moment
    assert 0.9 < of_adam / moments < 1.1, (of_adam, moments)
    static = [
        Item("parameters", model.stored_bytes, "parameters"),
        Item("moments", model.trained_params * 2 * model.moment, "optimizer"),
    ]
    return _peak(tracker.peak_bytes, [*static, *training_pass(model, run)])


def test_the_prediction_is_within_15_per_cent_of_the_measured_peak_whatever_it_is_made_of(folders):
    from sharding.mesh import init_distributed

    with init_distributed(CPU):
        results = measured_and_predicted(0, 1, folders, CASES) + _engine(1, folders["usual"])
    assert {case.get("most") for case, _ in results} >= {
        *("parameters", "optimizer", "activations", "logits", "KV cache", "buckets"),
    }
    for case, peak in results:
        assert 0.85 < peak.predicted / peak.measured < 1.15, (case, peak)
        assert case.get("most") in (None, peak.most), (case, peak)


@pytest.mark.distributed
def test_the_prediction_holds_where_two_ranks_share_a_row(folders):
    for results in run_distributed(measured_and_predicted, 2, folders, OF_TWO_RANKS):
        for case, peak in results:
            assert 0.85 < peak.predicted / peak.measured < 1.25, (case, peak)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_pass_without_gradients_holds_one_block_of_logits(with_entropy):
    rows, vocab, width = 256, 16384, 64
    hidden, weight = torch.randn(rows, width), torch.randn(vocab, width)
    labels, block = torch.randint(0, vocab, (rows,)), 1 << 19
    with PeakTracker(CPU) as tracker, torch.no_grad():
        token_logprobs(hidden, weight, labels, with_entropy=with_entropy, block_elements=block)
    per_element = tracker.peak_bytes / block  # of 8 blocks
    assert per_element == pytest.approx(12 if with_entropy else 4, rel=0.05)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_what_replicas_sum_is_held_until_the_last_backward_pass_has_ended(master, on_host):
    """FSDP2's own buffers, of two groups of two ranks that a fake process group pretends."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dtype, held = getattr(torch, master), []
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
        layers = [nn.Linear(32, 32, bias=False, dtype=dtype) for _ in range(5)]
        module: Any = nn.Sequential(*layers)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*layers, module):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        groups = [layer._get_fsdp_state()._fsdp_param_group for layer in layers]  # pyright: ignore
        shards: list[Any] = list(module.parameters())

        def hold(_: Any = None) -> None:
            tensors = [group._partial_reduce_output for group in groups]
            tensors += [s.all_reduce_input for g in groups if (s := g._all_reduce_state)]
            tensors += [p.grad.to_local() for p in shards if p.grad is not None]
            storages = {t.untyped_storage() for t in tensors if t is not None}
            held.append(sum({s.data_ptr(): s.nbytes() for s in storages}.values()))

        def take(parameter: Any) -> None:  # sharding/adamw/host.py
            parameter.grad = None
            hold()

        for shard in shards:
            shard.register_post_accumulate_grad_hook(take if on_host else hold)
        for is_last in (False, True):
            module.set_requires_all_reduce(is_last)
            module(torch.ones(3, 32, dtype=dtype)).sum().backward()
            hold()
    finally:
        dist.destroy_process_group()
    number = sum(shard.to_local().numel() for shard in shards)
    sums, own = 4 * number, (0 if on_host else ITEM_BYTES[master] * number)
    most = sums if master == "float32" and not on_host else sums + own
    assert held[0] == sums  # after the first micro-batch: no gradient yet
    assert most <= max(held) <= most + sums // 5 and held[-1] == own  # one layer has both, briefly
    found = find_shape("Qwen/Qwen2.5-7B-Instruct")
    assert found is not None
    shape, _ = found
    model = ShardedModel(
        name="actor",
        shape=shape,
        has_logits=True,
        fsdp=FsdpConfig(),
        shard_size=8,
        master=ITEM_BYTES[master],
        moment=4,
    )
    run = Pass(tokens=1, accumulates=True, replicas=True, steps_on_host=on_host)
    items = {item.name: item.bytes for item in training_pass(model, run)}
    known = [items.get(name, 0) for name in ("gradients that replicas sum", "gradients")]
    assert sum(known) == model.trained_params * most / number


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_an_update_of_smollm2_on_adapters_takes_less_than_half_the_memory(tmp_path):
    from sharding.mesh import init_distributed

    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30}
    folder = _save(tmp_path / "model", **sizes, **heads)
    with init_distributed(CPU):
        whole = _case(1, folder)
        adapters = _case(1, folder, lora=LORA)
    share = adapters.measured / whole.measured
    print(f"peak of an update: {share:.2f} of the whole model's {whole.measured / 2**20:.0f} MiB")
    assert adapters.measured < 0.45 * whole.measured, (adapters, whole)
    for peak in (whole, adapters):
        assert 0.85 < peak.predicted / peak.measured < 1.15, peak


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["full", "selective", "none"])
@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_the_prediction_holds_for_what_a_gpu_gives_out(tmp_path, policy, kind):
    from sharding.mesh import init_distributed

    # large enough that the workspaces of matrix products do not matter
    sizes = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 4096}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    folder = _save(tmp_path / "model", num_hidden_layers=4, **sizes, **heads)
    device = torch.device("cuda", 0)
    with init_distributed(device):
        measured, predicted, _ = _case(
            1, folder, dtype="bfloat16", policy=policy, kind=kind, device=device, tokens=8192
        )
    assert 0.8 < predicted / measured < 1.3, (measured, predicted)
