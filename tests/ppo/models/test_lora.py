"""Adapters on sharded models, against W + s B A in one unsharded process by plain torch."""

import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from ppo.config import ALL_LINEAR, FsdpConfig, Lora, MixedPrecisionConfig, OptimConfig
from ppo.errors import InputError
from ppo.models.build import build_causal_lm, build_value_model
from ppo.models.learner import WithoutAdapters, make_optimizer
from ppo.models.lora import attach
from ppo.models.weights import local_box
from sharding.adapters import adapters_of, is_adapter
from sharding.checkpoint import Checkpointer, CheckpointError, export_hf
from sharding.checkpoint.storage import SafeReader
from sharding.fsdp import without_gradients
from sharding.layout import Style, view_2d
from sharding.mesh import Mesh, ParallelDims, build_mesh, init_distributed
from sharding.reshard.full_tensors import FullTensors
from sharding.reshard.resharder import Resharder
from tests.distributed import run_distributed
from tests.ppo.models.hf_models import (
    FAMILIES,
    packed_inputs,
    padded_inputs,
    plain_scores,
    random_documents,
    save_model,
)
from tests.ppo.models.test_build import build as build_verified
from tests.sharding.reshard.engine_slices import hf_slices, sglang_slices

CPU = torch.device("cpu")
LENGTHS = [5, 1, 17, 9, 2, 12]
TEMPERATURE = 0.8
LORA = Lora("model", 6, 9.0, [ALL_LINEAR], [], 0.0, seed=1)  # 6 rows of A: uneven over 4 ranks
OPTIM = OptimConfig(lr=0.1, eps=1.0)  # a step in proportion to the gradient, rounding included


build = partial(build_verified, config={"verify_forward": False})


class Case(NamedTuple):
    family: str
    shard_size: int = 4
    sp: int = 1
    packed: bool = True
    checkpointing: bool = False
    aligned: bool = False


CASES = [
    Case("llama"),
    Case("llama", shard_size=2, checkpointing=True),
    Case("qwen2", sp=2, checkpointing=True),
    Case("qwen3", packed=False),
    Case("mistral", checkpointing=True, aligned=True),
    Case("gemma2", shard_size=2, sp=2),
    Case("gemma3_text", shard_size=1),
]


def full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def set_values(module: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in module.named_parameters():
        if name in values:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.detach().copy_(values[name][local_box(parameter)])


def random_values(model: nn.Module) -> dict[str, Tensor]:
    """For every adapter of a plain model; B is no longer zero."""
    g, values = torch.Generator().manual_seed(5), {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not model.get_output_embeddings():  # type: ignore
            low, up = (LORA.rank, layer.in_features), (layer.out_features, LORA.rank)
            values[f"{name}.lora_A"] = 0.1 * torch.randn(low, generator=g)
            values[f"{name}.lora_B"] = 0.1 * torch.randn(up, generator=g)
    return values


def merged(weights: dict[str, Tensor], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """W + alpha / r B A, as peft's merge_and_unload computes it."""
    out = dict(weights)
    for name, low in values.items():
        if name.endswith("lora_A"):
            layer = name.removesuffix(".lora_A")
            delta = (values[f"{layer}.lora_B"] @ low) * (LORA.alpha / LORA.rank)
            out[f"{layer}.weight"] = weights[f"{layer}.weight"] + delta
    return out


class Steps(NamedTuple):
    """Two steps of AdamW in one process, nothing sharded."""

    before: dict[str, Tensor]
    logprobs: Tensor  # of the first
    after: dict[str, Tensor]


def two_steps(path: Path) -> Steps:
    """The reference: the weights of every layer are W + s B A."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    values = random_values(model)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=0.1, eps=1.0, weight_decay=0.01)
    documents, first = random_documents(LENGTHS), torch.empty(0)

    def call(**inputs: Any) -> Any:
        return functional_call(model, merged(weights, leaves), kwargs=inputs)

    for step in range(2):
        logprobs, _ = plain_scores(call, documents, TEMPERATURE)
        first = logprobs.detach() if step == 0 else first
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Steps(values, first, {name: leaf.detach() for name, leaf in leaves.items()})


def inputs_of(case: Case, mesh: Mesh) -> tuple[dict[str, Tensor], Tensor]:
    """What this rank computes, and the weights of its tokens: FSDP takes means over all ranks."""
    documents = random_documents(LENGTHS)
    number = sum(len(d) - 1 for d in documents)
    weights = torch.linspace(-1, 1, number)
    if not case.packed:
        return padded_inputs(documents), weights
    inputs = packed_inputs(documents, sp=case.sp, sp_rank=mesh.sp_rank)
    if case.sp > 1:
        before = len(packed_inputs(documents, sp=case.sp, sp_rank=0)["labels"])
        weights = case.sp * (weights[:before] if mesh.sp_rank == 0 else weights[before:])
    return inputs, weights


def check_training(case: Case, path: Path, mesh: Mesh, reference: Steps) -> nn.Module:
    """Log-probs, and adapters after two steps, are those of the unsharded reference."""
    aligned: Any = {
        "shard_dim1": lambda name, _: "o_proj.weight" in name or "down_proj.weight" in name
    }
    module = build(
        *(build_causal_lm, path, mesh),
        checkpointing=case.checkpointing,
        lora=LORA,
        **aligned if case.aligned else {},
    )
    values, want, wanted = reference
    set_values(module, values)
    optimizer = make_optimizer(module, OPTIM, mesh.device)
    inputs, weights = inputs_of(case, mesh)
    for step in range(2):
        logprobs = module(**inputs, temperature=TEMPERATURE).logprobs
        if step == 0:
            mine = slice(None)
            if case.sp > 1:
                mine = slice(0, len(logprobs)) if mesh.sp_rank == 0 else slice(-len(logprobs), None)
            torch.testing.assert_close(logprobs, want[mine], rtol=1e-5, atol=1e-5)
        (logprobs * weights).sum().backward()
        assert {n for n, p in module.named_parameters() if p.grad is not None} == values.keys()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in module.named_parameters():
        if name in wanted:
            moved = (wanted[name] - values[name]).abs().max()
            difference = (full(parameter.detach()) - wanted[name]).abs().max()
            assert difference <= 1e-5 * moved, (case, name, difference, moved)
    return module


def check_engine(module: nn.Module, mesh: Mesh, path: Path, case: Case) -> None:
    """What each tensor-parallel rank gets is the merged model, bitwise, at the least bytes."""
    model = AutoModelForCausalLM.from_pretrained(path)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    whole = merged(weights, {n: full(p.detach()) for n, p in module.named_parameters()})
    tp, rank = mesh.dims.rollout_tp, mesh.rank % mesh.dims.rollout_tp
    slices = {
        "hf": hf_slices(whole, tp=tp, tp_rank=rank),
        "sglang": sglang_slices(whole, heads=4, kv_heads=2, tp=tp, tp_rank=rank),
    }
    engines: list[tuple[Style, torch.dtype]] = [("hf", torch.float32), ("sglang", torch.float32)]
    if case.aligned:
        engines = [("sglang", torch.half)]
    for style, dtype in engines:
        resharder = Resharder(
            *(module, mesh),
            style=style,
            hf_config=module.config,
            dtype=dtype,
            bucket_mib=0.02,
        )
        got = {n: torch.zeros(s, dtype=dtype) for n, s in resharder.layout.targets.items()}
        for bucket in resharder.buckets():
            for entry, block in bucket.views():
                rows = slice(entry.dst_row, entry.dst_row + entry.rows)
                got[entry.target][rows, entry.dst_col : entry.dst_col + entry.cols] = block
        assert got.keys() == slices[style].keys()
        for name, tensor in slices[style].items():
            wanted = tensor.to(dtype).reshape(view_2d(tensor.shape))
            assert torch.equal(got[name], wanted), (case, tp, style, name)
        stats = resharder.stats
        assert stats.received_bytes == stats.lower_bound_bytes
        assert stats.adapter_bytes > 0 if case.shard_size > 1 else stats.adapter_bytes == 0
    if tp == 1:
        batches = FullTensors(module, mesh, dtype=torch.float32, bucket_mib=0.1).batches()
        for name, tensor in (pair for batch in batches for pair in batch):
            assert torch.equal(tensor, whole[name]), name


def check_reference(module: nn.Module, path: Path, mesh: Mesh) -> None:
    """Without its adapters a trained model is bitwise the base; B = 0 changes no bit either."""
    inputs = packed_inputs(random_documents(LENGTHS))
    with without_gradients(module):
        trained = module(**inputs).logprobs
        with WithoutAdapters(module=module, device=mesh.device).on_device() as reference:
            off = reference(**inputs).logprobs
        assert torch.equal(module(**inputs).logprobs, trained)  # on again
    for lora in (None, LORA):
        fresh = build(build_causal_lm, path, mesh, forward_only=True, lora=lora)
        with without_gradients(fresh):
            assert torch.equal(fresh(**inputs).logprobs, off)
    assert not torch.equal(trained, off)


def check_dtypes(path: Path, mesh: Mesh) -> None:
    """The base is frozen in bfloat16, adapters and the value head are trained in float32."""
    fsdp = FsdpConfig(mixed_precision=MixedPrecisionConfig(param_dtype="bfloat16"))
    for kind in (build_causal_lm, build_value_model):
        options: dict[str, Any] = {"fsdp_config": fsdp, "dtype": torch.bfloat16, "lora": LORA}
        module = build(kind, path, mesh, **options)
        inputs = packed_inputs(random_documents(LENGTHS))
        if kind is build_value_model:
            del inputs["labels"]
            set_values(module, {"score.weight": torch.ones(1, 32)})
            module(**inputs).sum().backward()
        else:
            module(**inputs).logprobs.sum().backward()
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        heads = {"score.weight"} if kind is build_value_model else set()
        assert {n for n in trained if not is_adapter(n)} == heads
        for name, parameter in module.named_parameters():
            wanted = torch.float32 if name in trained else torch.bfloat16
            assert parameter.dtype == wanted, name
            assert (parameter.grad is not None) == (name in trained), name


def on_four_ranks(
    rank: int, world_size: int, folders: dict[str, Path], pickled: bytes, run: Path
) -> Any:
    wanted: dict[str, Steps] = pickle.loads(pickled)  # as tensors each would take a descriptor
    prints, first = set(), None
    for case in CASES:
        sizes = {"fsdp_size": case.shard_size, "sp": case.sp}
        dims = ParallelDims(world_size=world_size, ranks_per_node=4, **sizes)
        mesh = build_mesh(dims, CPU)
        module = check_training(case, folders[case.family], mesh, wanted[case.family])
        if case.family == "llama" or case.aligned:
            for tp in (1, 2, 4) if case == CASES[0] else (2,):
                dims = ParallelDims(
                    world_size=4, ranks_per_node=4, fsdp_size=case.shard_size, rollout_tp=tp
                )
                # shards lie in another order for each T: the values move there by a checkpoint
                other = build_mesh(dims, CPU)
                moved = build(build_causal_lm, folders[case.family], other, lora=LORA)
                values = {n: full(p.detach()) for n, p in module.named_parameters()}
                set_values(moved, values)
                check_engine(moved, other, folders[case.family], case)
        if case == CASES[0]:
            check_reference(module, folders["llama"], mesh)
            check_dtypes(folders["llama"], mesh)
            first = {n: full(p.detach()) for n, p in module.named_parameters()}
            optimizer = make_optimizer(module, OPTIM, CPU)
            module(**inputs_of(case, mesh)[0]).logprobs.sum().backward()
            optimizer.step()
            after = {n: full(p.detach()) for n, p in module.named_parameters()}
            assert any(not torch.equal(after[n], first[n]) for n in first)
            with Checkpointer(run / "checkpoints", mesh) as checkpoints:
                checkpoints.save(1, {"actor": module}, {"actor": optimizer}, {})
            first = {n: t for n, t in after.items() if is_adapter(n)}
        if case.family == "llama":
            adapters = adapters_of(module)
            assert adapters is not None
            prints.add(adapters.description["fingerprint"])
    assert len(prints) == 1  # however it is sharded
    return first, prints.pop()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_model(root / family, family) for family in FAMILIES}


@pytest.mark.distributed
def test_adapters_train_merge_and_resume_as_one_unsharded_process_has_them(folders, tmp_path):
    wanted = {family: two_steps(path) for family, path in folders.items()}
    pickled = pickle.dumps(wanted)
    saved, fingerprint = run_distributed(on_four_ranks, 4, folders, pickled, tmp_path)[0]
    path = folders["llama"]
    with init_distributed(CPU):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), CPU)
        module = build(build_causal_lm, path, mesh, lora=LORA)
        optimizer = make_optimizer(module, OPTIM, CPU)
        adapters = adapters_of(module)
        assert adapters is not None and adapters.description["fingerprint"] == fingerprint
        with Checkpointer(tmp_path / "checkpoints", mesh) as checkpoints:
            newest = checkpoints.latest()
            assert newest is not None
            checkpoints.load(newest, {"actor": module}, {"actor": optimizer})
            found = {n: full(p.detach()) for n, p in module.named_parameters()}
            assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
            assert len(optimizer.state) == len(saved)
            whole = build(build_causal_lm, path, mesh)
            with pytest.raises(CheckpointError, match="holds adapters of actor"):
                checkpoints.load(newest, {"actor": whole}, {})
            other = build(
                build_causal_lm, save_model(tmp_path / "b", "llama", seed=1), mesh, lora=LORA
            )
            with pytest.raises(CheckpointError, match=f"fingerprint {fingerprint}"):
                checkpoints.load(newest, {"actor": other}, {})
    held = SafeReader(newest / "tensors", {}).read_metadata().state_dict_metadata
    of_model = {name.removeprefix("model.actor.") for name in held if name.startswith("model.")}
    assert of_model == saved.keys()  # nothing of the base
    check_exports(newest, path, saved, tmp_path)


def check_exports(newest: Path, path: Path, saved: dict[str, Tensor], tmp_path: Path) -> None:
    """The merged model is W + s B A; the adapter has the names and the configuration of peft."""
    out = export_hf(newest, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(out)
    base = AutoModelForCausalLM.from_pretrained(path)
    wanted = merged({n: p.detach() for n, p in base.named_parameters()}, saved)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    half = export_hf(newest, tmp_path / "half", dtype=torch.bfloat16)
    name = "model.layers.1.mlp.down_proj.weight"
    stored = AutoModelForCausalLM.from_pretrained(half).get_parameter(name)
    assert torch.equal(stored, wanted[name].bfloat16())
    with pytest.raises(CheckpointError, match="is not the model that was trained upon"):
        export_hf(newest, tmp_path / "wrong", base=half)
    out = export_hf(newest, tmp_path / "adapter", adapter=True)
    tensors = load_file(out / "adapter_model.safetensors")
    assert len(tensors) == len(saved) == 28
    layer = "model.layers.0.self_attn.q_proj"
    key = f"base_model.model.{layer}.lora_B.weight"
    assert torch.equal(tensors[key], saved[f"{layer}.lora_B"])
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 6, 9.0)
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


def test_an_exported_adapter_loads_in_peft_and_merges_to_the_same_bits(tmp_path):
    peft = pytest.importorskip("peft")
    path = save_model(tmp_path / "model", "qwen2")
    with init_distributed(CPU):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), CPU)
        module = build(build_causal_lm, path, mesh, lora=LORA)
        set_values(module, random_values(AutoModelForCausalLM.from_pretrained(path)))
        with Checkpointer(tmp_path / "checkpoints", mesh) as checkpoints:
            checkpoints.save(1, {"actor": module}, {}, {})
        documents = random_documents(LENGTHS)
        with torch.no_grad():
            logprobs = module(**packed_inputs(documents)).logprobs
    out = export_hf(tmp_path, tmp_path / "adapter", adapter=True)
    base = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    found = peft.PeftModel.from_pretrained(base, out)
    with torch.no_grad():
        wanted, _ = plain_scores(found, documents, 1.0)
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-4)
    model = AutoModelForCausalLM.from_pretrained(export_hf(tmp_path, tmp_path / "merged"))
    for name, parameter in found.merge_and_unload().named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_layers_are_chosen_by_their_names_and_a_wrong_name_is_refused(folders, tmp_path, caplog):
    def layers(path: Path, **keys: Any) -> list[str]:
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        attach(module, LORA._replace(**keys), path)
        adapters = adapters_of(module)
        assert adapters is not None
        return list(adapters.layers)

    path = folders["llama"]
    assert len(layers(path)) == 14
    assert layers(path, target_modules=["q_proj", "layers.1.mlp.up_proj"]) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    ]
    assert len(layers(path, exclude_modules=["down_proj", "layers.0.mlp.up_proj"])) == 11
    for keys, words in (
        ({"target_modules": ["qproj"]}, "lora_target_modules: .* has no linear layer 'qproj'; it"),
        ({"exclude_modules": ["proj"]}, "lora_exclude_modules: .* has no linear layer 'proj'; it"),
        ({"exclude_modules": ["mlp.up_proj"], "target_modules": ["up_proj"]}, "no linear layer of"),
    ):
        with pytest.raises(InputError, match=words):
            layers(path, **keys)
    mixture: Any = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    path = save_model(tmp_path / "moe", "qwen3_moe", **mixture, decoder_sparse_step=1)
    with caplog.at_level("INFO"):
        chosen = layers(path)
    assert {name.split(".")[3] for name in chosen} == {"self_attn"}
    assert (
        sum("and the experts of its mixtures have none" in r.message for r in caplog.records) == 1
    )
