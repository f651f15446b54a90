"""Adapters in a checkpoint: what says whose they are, and how they leave it.

Owns models/NAME/adapters.json, the files of peft, and the merged model. A checkpoint holds neither
the base nor a copy of it: the base is found by its folder and known by its fingerprint. Must not
know how tensors lie in a checkpoint.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sharding.adapters import A, adapters_of
from sharding.checkpoint.base import fingerprint
from sharding.checkpoint.classes import classifier_class, empty_model
from sharding.checkpoint.files import CheckpointError
from sharding.checkpoint.rewrap import write_whole
from sharding.checkpoint.wrapped import Wrapper, text_name
from sharding.names import tied_names

FILE = "adapters.json"
"""in models/NAME/ of a checkpoint that holds adapters and no model"""
HEAD = "score"


def document_of(module: nn.Module) -> bytes | None:
    """Content of the file; None for a module without adapters."""
    adapters = adapters_of(module)
    return json.dumps(adapters.description, indent=1).encode() if adapters is not None else None


def read_description(checkpoint: Path, model: str) -> dict[str, Any] | None:
    """What a checkpoint says of a model's adapters; None where it holds a whole model."""
    path = checkpoint / "models" / model / FILE
    if not path.is_file():
        return None
    try:
        saved = json.loads(path.read_bytes())
        if not isinstance(getattr(torch, saved["dtype"]), torch.dtype):
            raise TypeError(f"dtype = {saved['dtype']!r}")
        return saved
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def check_base(checkpoint: Path, models: Mapping[str, nn.Module]) -> None:
    """Raise CheckpointError where adapters are wanted or there, but not both, or of others."""
    for name, module in models.items():
        saved, adapters = read_description(checkpoint, name), adapters_of(module)
        if adapters is None and saved is not None:
            size = f"rank {saved['rank']}, alpha {saved['alpha']:g}"
            raise CheckpointError(f"holds adapters of {name} ({size}), the model here has none")
        if adapters is not None and saved is None:
            raise CheckpointError(f"holds the whole {name}, the model here has adapters")
        if adapters is not None and saved is not None:
            own = adapters.description
            if saved["fingerprint"] != own["fingerprint"]:
                raise CheckpointError(
                    f"the adapters of {name} belong to {saved['base']} in {saved['dtype']} "
                    f"(fingerprint {saved['fingerprint']}), which is not what is in {own['base']} "
                    f"in {own['dtype']} ({own['fingerprint']})"
                )


def write_adapter(
    tensors: Mapping[str, Tensor],
    description: Mapping[str, Any],
    out: Path,
    wrapper: Wrapper | None = None,
) -> None:
    """adapter_config.json and adapter_model.safetensors, as peft writes them.

    A value head is among them, as a module that is saved whole. Those of the language model of a
    multimodal folder have the names of the whole model; each layer is named in full then, for its
    towers have layers that are called alike.
    """
    out.mkdir(parents=True, exist_ok=True)
    targets = description["target_modules"]
    if wrapper is not None:
        tensors = {wrapper.whole_name(name): tensor for name, tensor in tensors.items()}
        targets = [name.removesuffix(f".{A}") for name in tensors if name.endswith(f".{A}")]
    has_head = f"{HEAD}.weight" in tensors
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_head else "CAUSAL_LM",
        "base_model_name_or_path": description["base"],
        "r": description["rank"],
        "lora_alpha": description["alpha"],
        "lora_dropout": description["dropout"],
        "target_modules": targets,
        "modules_to_save": [HEAD] if has_head else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    named = {
        f"base_model.model.{name.removesuffix('.weight')}.weight": tensor.contiguous()
        for name, tensor in tensors.items()
    }
    save_file(named, out / "adapter_model.safetensors", metadata={"format": "pt"})


def write_merged(
    tensors: Mapping[str, Tensor],
    description: Mapping[str, Any],
    out: Path,
    *,
    config_folder: Path,
    base: Path | None,
    wrapper: Wrapper | None = None,
    dtype: torch.dtype | None,
    file_bytes: int,
) -> None:
    """The model with W + s B A for W, summed in float32 and rounded once; whole in host memory.

    base: where the base lies now; None = where it did. dtype: None = as the base was held.
    Raises CheckpointError when it is not there, or not the one that the adapters are of.
    """
    has_head, folder = f"{HEAD}.weight" in tensors, base or Path(description["base"])
    module = _load_base(folder, config_folder, description, has_head, wrapper is not None)
    own = {name: p for name, p in module.named_parameters() if name not in tensors}
    if (found := fingerprint(own)) != description["fingerprint"]:
        raise CheckpointError(
            f"{folder}: is not the model that was trained upon: its "
            f"fingerprint is {found}, not {description['fingerprint']}"
        )
    dtype = dtype or next(iter(own.values())).dtype
    scale = description["alpha"] / description["rank"]
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if leaf == A:
            weight = module.get_parameter(f"{layer}.weight")
            delta = (tensors[f"{layer}.lora_B"] @ tensor) * scale
            weight.data = (weight.float() + delta).to(dtype)
        elif layer == HEAD:
            module.get_parameter(name).data = tensor.to(dtype)
    module.to(dtype)
    if wrapper is None or has_head:
        return module.save_pretrained(out, max_shard_size=file_bytes)
    out.mkdir(parents=True)
    whole = {name: tensor.data for name, tensor in module.state_dict().items()}
    ties = tied_names(module)
    for name in (name for names in ties for name in names[1:]):
        del whole[name]
    write_whole(wrapper, [whole], out, ties=ties, base=folder)


@torch.no_grad()
def _load_base(
    base: Path,
    config_folder: Path,
    description: Mapping[str, Any],
    classifier: bool,
    wrapped: bool,
) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    options: dict[str, Any] = {"num_labels": 1} if classifier else {}
    config = AutoConfig.from_pretrained(config_folder, **options)
    kind = classifier_class(config) if classifier else AutoModelForCausalLM
    dtype = getattr(torch, description["dtype"])
    try:
        if not base.is_dir():
            raise OSError("no such folder")
        if not wrapped:
            return kind.from_pretrained(base, config=config, dtype=dtype).requires_grad_(False)
        whole = AutoModelForMultimodalLM.from_pretrained(base, dtype=dtype)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{base}: the model under the adapters does not load: {error}; --base names its folder"
        ) from error
    module = empty_model(kind, config, dtype=dtype).requires_grad_(False)
    held = {text_name(name): tensor for name, tensor in whole.state_dict().items()}
    for name, tensor in module.state_dict().items():
        if name in held:  # all but a value head
            tensor.copy_(held[name])
    return module
