"""The language model of multimodal folders: trained alone, exported inside of the whole again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessRaisedException
from transformers import AutoModelForMultimodalLM, AutoModelForSequenceClassification

from ppo.config import ALL_LINEAR, Lora
from ppo.errors import InputError
from ppo.models import small_copy
from ppo.models.build import build_causal_lm, build_value_model, is_packable
from ppo.models.peft_folder import load_adapter, read_lora
from ppo.models.small_copy import build_small_copy
from ppo.models.wrapped import check_language_model, language_model_folder
from sharding.checkpoint import Checkpointer, CheckpointError, export_hf
from sharding.checkpoint.wrapped import SAME_MODEL, text_config, text_name, whole_class
from sharding.mesh import Mesh, ParallelDims, build_mesh, init_distributed
from tests.distributed import run_distributed
from tests.ppo.models.hf_models import (
    packed_inputs,
    padded_inputs,
    plain_scores,
    random_documents,
)
from tests.ppo.models.test_build import build
from tests.ppo.models.wrappers import WRAPPERS, config_keys, rename, save_wrapper
from tests.test_train import rows_of, same_numbers, train_here

CPU = torch.device("cpu")
DOCUMENTS = [5, 1, 9, 12]
NOT_IN_SGLANG = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "has no linear attention"),
    **{"gemma4": "has no attention whose layers differ", "llama4": "loads the experts of llama4"},
}
"""of its models on a CPU, and what the refusal says"""
LORA = Lora("model", 2, 4.0, [ALL_LINEAR], [], 0.0, seed=1)


def one_rank() -> Mesh:
    return build_mesh(ParallelDims(world_size=1, ranks_per_node=1), CPU)


def inputs_of(module: Any, documents: list[Tensor]) -> dict[str, Tensor]:
    return (packed_inputs if is_packable(module) else padded_inputs)(documents)


def whole_of(folder: Path) -> Any:
    return AutoModelForMultimodalLM.from_pretrained(folder, attn_implementation="eager")


def change(module: Any) -> None:
    """Every trained tensor, by what follows from its name alone, however it is sharded."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:  # under adapters
            continue
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.detach().mul_(1 + 0.01 * (len(name) % 7))
        if "lora_B" in name:
            local.detach().add_(0.1)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


IN_CI = ("gemma3", "qwen3_5", "qwen3_vl_moe")


@pytest.mark.parametrize(
    "name", [n if n in IN_CI else pytest.param(n, marks=pytest.mark.full) for n in WRAPPERS]
)
def test_a_wrapper_trains_as_its_language_model_and_is_exported_with_all_else_as_it_was(
    name, tmp_path
):
    folder = save_wrapper(tmp_path / name, name)
    if name == "gemma3":  # as transformers 5 names it in memory
        rename(folder, "language_model.model.", "model.language_model.")
    documents = random_documents(DOCUMENTS)
    want, _ = plain_scores(whole_of(folder), documents, 1.0)
    with init_distributed(CPU):
        mesh = one_rank()
        module: Any = build(build_causal_lm, folder, mesh)
        inputs = inputs_of(module, documents)
        torch.testing.assert_close(module(**inputs).logprobs, want, rtol=1e-5, atol=1e-5)
        assert not any("visi" in name or "visual" in name for name in module.state_dict())
        change(module)
        with torch.no_grad():
            trained = module(**inputs).logprobs
        with Checkpointer(tmp_path / "run" / "checkpoints", mesh) as checkpoints:
            checkpoints.save(1, {"actor": module}, {}, {})
    out = export_hf(tmp_path / "run", tmp_path / "out")
    again, report = AutoModelForMultimodalLM.from_pretrained(
        out, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    got, _ = plain_scores(again, documents, 1.0)
    assert (trained - want).abs().max() > 0.01
    torch.testing.assert_close(got, trained, rtol=1e-5, atol=1e-5)
    before, after = tensors_of(folder), tensors_of(out)
    assert before.keys() == after.keys()
    others = [key for key in before if text_name(key) is None]
    assert len(others) > 5
    assert all(torch.equal(before[key], after[key]) for key in others)
    assert config_keys(folder) == config_keys(out)


def on_two_ranks(rank: int, world_size: int, folder: str) -> list[Tensor]:
    """Log-probs, values and scores by shards; the actor and the adapters are saved."""
    mesh = build_mesh(ParallelDims(world_size=2, ranks_per_node=2), CPU)
    documents, run = random_documents(DOCUMENTS), Path(folder)
    actor: Any = build(build_causal_lm, run / "gemma3", mesh)
    adapted: Any = build(build_causal_lm, run / "gemma3", mesh, lora=LORA)
    critic: Any = build(build_value_model, run / "gemma3", mesh)
    reward: Any = build(build_value_model, run / "reward", mesh, needs_head=True)
    inputs = packed_inputs(documents)
    values = {key: value for key, value in inputs.items() if key != "labels"}
    with torch.no_grad():
        found = [actor(**inputs).logprobs, reward(**values)]
        assert not critic(**values).any()
        change(adapted)
        found.append(adapted(**inputs).logprobs)
        change(critic)
    for name, module in (("whole", actor), ("adapters", adapted)):
        with Checkpointer(run / name / "checkpoints", mesh) as checkpoints:
            checkpoints.save(1, {"actor": module, "critic": critic}, {}, {})
    return found


@pytest.mark.distributed
def test_two_ranks_have_the_roles_of_a_wrapper_and_adapters_leave_by_its_names(tmp_path):
    peft = pytest.importorskip("peft")
    folder, documents = save_wrapper(tmp_path / "gemma3", "gemma3"), random_documents(DOCUMENTS)
    whole = whole_of(folder)
    torch.manual_seed(3)
    judge = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    judge.save_pretrained(tmp_path / "reward")
    found = run_distributed(on_two_ranks, 2, str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    logprobs, scores, adapted = found[0]
    want, _ = plain_scores(whole, documents, 1.0)
    torch.testing.assert_close(logprobs, want, rtol=1e-5, atol=1e-5)
    hidden = [judge.model(input_ids=d[None]).last_hidden_state[0, :-1] for d in documents]
    judged = (torch.cat(hidden) @ judge.score.weight[0]).detach()
    torch.testing.assert_close(scores, judged, rtol=1e-4, atol=1e-4)

    out = export_hf(tmp_path / "adapters", tmp_path / "adapter", adapter=True)
    with_peft = peft.PeftModel.from_pretrained(whole_of(folder), out)
    peft_scores, _ = plain_scores(with_peft, documents, 1.0)
    torch.testing.assert_close(adapted, peft_scores, rtol=1e-4, atol=1e-4)
    merged = export_hf(tmp_path / "adapters", tmp_path / "merged")
    torch.testing.assert_close(plain_scores(whole_of(merged), documents, 1.0)[0], adapted)
    before, after = tensors_of(folder), tensors_of(merged)
    assert all(torch.equal(before[n], after[n]) for n in before if text_name(n) is None)
    assert before.keys() == after.keys()
    with init_distributed(CPU):
        module: Any = build(build_causal_lm, folder, one_rank(), lora=read_lora(out))
        load_adapter(module, out)
        again = module(**packed_inputs(documents)).logprobs
    torch.testing.assert_close(again, adapted, rtol=1e-5, atol=1e-5)

    value = export_hf(tmp_path / "whole", tmp_path / "value", model="critic")
    assert config_keys(value)["architectures"] == ["Gemma3TextForSequenceClassification"]
    (tmp_path / "gemma3").rename(tmp_path / "moved")
    for run in ("whole", "adapters"):
        with pytest.raises(CheckpointError, match=r"gemma3: .*--base names its folder"):
            export_hf(tmp_path / run, tmp_path / "none")
        assert export_hf(tmp_path / run, tmp_path / f"{run}2", base=tmp_path / "moved").is_dir()
    with pytest.raises(CheckpointError, match="is not the"):
        other = save_wrapper(tmp_path / "other", "qwen3_vl")
        export_hf(tmp_path / "whole", tmp_path / "none", base=other)


def test_a_wrapper_whose_language_model_is_another_by_itself_is_refused(monkeypatch, caplog):
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen3_vl_moe", **WRAPPERS["qwen3_vl_moe"])
    monkeypatch.setitem(SAME_MODEL, "qwen3_vl_moe_text", ("qwen3_moe", {}))
    with pytest.raises(InputError, match=r"qwen3_vl_moe: .* by itself it gives other log-probs"):
        check_language_model(config)
    monkeypatch.undo()
    with monkeypatch.context() as patch:  # a tower that stays large
        patch.setattr(small_copy, "MAX_PARAMETERS", 10)
        patch.setattr(small_copy, "MAX_DIVISOR", 1)
        check_language_model(AutoConfig.for_model("qwen3_vl", **WRAPPERS["qwen3_vl"]))
        assert "it is not compared with the whole: its small copy would still" in caplog.text
    check_language_model(config)


def test_a_copy_of_a_whole_keeps_two_layers_of_its_language_model_beside_a_tower_of_as_many():
    from transformers import AutoConfig

    keys = WRAPPERS["qwen2_5_vl"]
    text = keys["text_config"] | {"num_hidden_layers": 5}
    vision = keys["vision_config"] | {"depth": 5}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision)
    small = build_small_copy(config, kind=whole_class(config))
    assert small.config.text_config.num_hidden_layers == 2
    assert (len(small.model.language_model.layers), len(small.model.visual.blocks)) == (2, 5)


def test_an_engine_that_reads_a_folder_finds_the_language_model_there(tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    folder = save_wrapper(tmp_path / "gemma3", "gemma3", eos_token_id=[1, 106])
    config = text_config(AutoConfig.from_pretrained(folder))
    for _ in range(2):  # a start and a resume
        out = language_model_folder(folder, config, tmp_path / "text")
    found = AutoConfig.from_pretrained(out)
    assert (found.model_type, found.architectures) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert (found.eos_token_id, found.tie_word_embeddings) == ([1, 106], True)
    assert AutoTokenizer.from_pretrained(out)("ab").input_ids == [97, 98]
    assert not list(out.glob("*.safetensors*"))


def test_a_run_that_begins_again_with_another_model_gives_its_engine_that_tokenizer(tmp_path):
    from transformers import LlamaConfig

    out = tmp_path / "text"
    for name, extra in (("a", "only_a.txt"), ("b", "only_b.txt")):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("tokenizer.json", "config.json", "model.safetensors.index.json", extra):
            (folder / file).write_text(name)
        language_model_folder(folder, LlamaConfig(vocab_size=len(name)), out)
        assert (out / "tokenizer.json").read_text() == name
        assert {p.name for p in out.iterdir()} == {"tokenizer.json", "config.json", extra}
        assert config_keys(out)["model_type"] == "llama"


@pytest.mark.full
@pytest.mark.distributed
def test_runs_on_wrappers_are_equal_on_one_and_two_ranks(tmp_path):
    folder = save_wrapper(tmp_path / "gemma3", "gemma3")
    keys = (f"model.path={folder}", "trainer.total_training_steps=2", "trainer.save_freq=0")
    keys += ("data.val_files=[]", "actor.checkpoint.save_contents=[model,hf_model]")
    for ranks in (1, 2):
        run_distributed(train_here, ranks, [(f"{tmp_path}/{ranks}", keys)])
    one, two = (rows_of(tmp_path / name) for name in ("1", "2"))
    same_numbers(one, two)
    assert all(row["training/rollout_probs_diff_max"] < 1e-6 for row in one)
    written = tmp_path / "2" / "checkpoints" / "step_00000002" / "hf_actor"
    assert tensors_of(written).keys() == tensors_of(folder).keys()
    index = json.loads((written / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(folder).keys()


@pytest.mark.full
@pytest.mark.sglang
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WRAPPERS)
def test_sglang_generates_from_the_language_model_alone(name, tmp_path):
    """Or, on a CPU, the start says what it lacks."""
    folder = save_wrapper(tmp_path / name, name)
    keys = (f"model.path={folder}", "rollout.engine=sglang", "rollout.dtype=float32")
    keys += ("algorithm.adv_estimator=grpo",)
    keys += ("trainer.total_training_steps=2", "trainer.save_freq=-1", "data.val_files=[]")
    keys += ("rollout.n=2", "data.train_batch_size=8", "actor.ppo_mini_batch_size=8")
    if lacking := NOT_IN_SGLANG.get(name):
        with pytest.raises(ProcessRaisedException, match=f"InputError.*{lacking}"):
            run_distributed(train_here, 1, [(f"{tmp_path}/run", keys)])
        return
    run_distributed(train_here, 1, [(f"{tmp_path}/run", keys)], timeout_s=600)
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows)
