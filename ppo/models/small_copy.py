"""A small copy of a model: its family, its configuration's switches and scales, narrow layers.

Owns which keys of a Hugging Face configuration are sizes. All widths are divided by one number, so
that what has to fit together (heads x head_dim, states, ranks) still does; windows become shorter
than a test document; one layer of every kind is kept. Weights are seeded and large enough that
attention, windows and soft caps matter. Must not know what a copy is for, devices or ranks.
"""

import copy
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from sharding.fsdp import transformer_layers

VOCABULARY = 256
"""most ids of a copy"""
WINDOW = 4
"""tokens of a copy's attention windows and chunks"""
CAP = 2.0
"""limit of a copy's attention scores, where they have one"""
CHUNK = 8
"""tokens that a recurrent layer takes at a time"""
HEAD_DIM = 8
"""widths are divided by the power of two that brings a head down to this"""
EXPERTS = 8
"""most experts of a layer, unless each token goes to more, or they are chosen group by group"""
MAX_PARAMETERS = 50_000_000
"""widths are divided further while a copy has more"""
MAX_DIVISOR = 128
GAIN = 1.5
"""standard deviation of a row's product with a unit vector"""

_WIDTH_WORDS = {
    *("size", "sizes", "dim", "rank", "lowrank", "width", "channels", "state", "ssm", "hidden"),
    *("intermediate", "ffn", "dff", "model", "inner", "embd", "headdim"),
}
_OTHER_WORDS = {
    *("num", "vocab", "vocabulary", "window", "chunk", "kernel", "block", "max", "position"),
    *(
        "patch",
        "image",
        "ngram",
        "group",
        "batch",
        "base",
        "cache",
        "multiple",
        "codebook",
        "token",
    ),
    *("id", "type", "layers", "layer", "top", "hash"),
}
_WINDOW_KEY = re.compile(r"window(_size)?$|^local_attention$|^attention_chunk_size$")
_CAP_KEY = re.compile(r"att(n|ention)_.*cap(ping)?$")
_EXPERTS_KEY = re.compile(r"experts$|expert_num$")
_CHOSEN_KEY = re.compile(r"experts_per_tok(en)?$|^(moe_)?top_?k$|^moe_k$")
_NUM_LAYERS = ("num_hidden_layers", "num_layers")
# What tells layers apart that are of one kind.
_INDEX_ATTRIBUTES = {"layer_idx", "layer_id", "layer_number", "block_idx", "training"}


Build = Callable[[Any], Any]
"""a configuration -> the model of it"""


class NoSmallCopy(Exception):
    """A configuration of which no small copy can be made; the text says why."""


class NotSmall(NoSmallCopy):
    """Its smallest copy has too many parameters: of a part whose sizes are fixed."""


def build_small_copy(
    config: Any, *, trust_remote_code: bool = False, kind: Any | None = None
) -> Any:
    """A float32 causal LM of `config`'s family on the host, in evaluation mode.

    The same on every call: random numbers of the caller are neither used nor changed.
    kind: transformers' class of it; None = AutoModelForCausalLM's.
    Raises NoSmallCopy where transformers' code does not take the small sizes.
    """
    build = partial(_from_config, trust_remote_code=trust_remote_code, kind=kind)
    text = config.get_text_config(decoder=True)
    divisor = _divisor(text)
    try:
        while divisor <= MAX_DIVISOR:
            small = copy.deepcopy(config)
            _shrink(small, divisor, getattr(text, "max_position_embeddings", None))
            _fit_towers(small, small.get_text_config(decoder=True))
            small = _one_layer_of_each_kind(small, build)
            size = _num_parameters(small, build)
            if size <= MAX_PARAMETERS:
                return _with_random_weights(small, build)
            divisor *= 2
    except Exception as error:  # whatever the code of a family raises
        raise NoSmallCopy(f"{type(error).__name__}: {error}") from error
    raise NotSmall(f"its small copy would still have {size / 1e6:.0f} M parameters")


def _divisor(text: Any) -> int:
    """The power of two that leaves heads of HEAD_DIM to less than twice that, of an even size."""
    heads = getattr(text, "num_attention_heads", None) or 8
    head_dim = getattr(text, "hidden_size", 512) // heads
    for name in ("qk_rope_head_dim", "head_dim"):
        if isinstance(own := vars(text).get(name), int):
            head_dim = own
            break
    divisor = 1
    while head_dim >= 2 * divisor * HEAD_DIM and head_dim % (4 * divisor) == 0:
        divisor *= 2
    return divisor


def _shrink(config: Any, divisor: int, positions: int | None) -> None:
    """Make a configuration and those inside it small, in place."""
    experts = _experts(vars(config))
    for key, value in list(vars(config).items()):
        words = set(key.split("_"))
        if hasattr(value, "to_dict"):
            _shrink(value, divisor, positions)
        elif isinstance(value, dict) and key.startswith("rope_"):
            setattr(config, key, _narrow_rope(value, divisor))
        elif isinstance(value, float) and _CAP_KEY.search(key):
            setattr(config, key, min(value, CAP))
        elif isinstance(value, bool) or not isinstance(value, int | list):
            continue
        elif isinstance(value, int) and "vocab" in words:
            setattr(config, key, min(value, VOCABULARY))
        elif isinstance(value, int) and key.endswith(("token_id", "token_index")):
            setattr(config, key, min(value, VOCABULARY - 1))
        elif isinstance(value, int) and _WINDOW_KEY.search(key):
            # One that is never reached has no effect, in whichever way it is treated.
            if positions is None or value < positions:
                setattr(config, key, min(value, WINDOW))
        elif isinstance(value, int) and key.endswith("chunk_size"):  # a scan's: only its cost
            setattr(config, key, min(value, CHUNK))
        elif isinstance(value, int) and _EXPERTS_KEY.search(key):
            setattr(config, key, min(value, experts))
        elif _is_width(key, words):
            setattr(config, key, _divided(value, divisor))


def _narrow_rope(rope: dict[str, Any], divisor: int) -> dict[str, Any]:
    """Rotary embeddings of narrower heads, of each kind of layer where kinds have their own."""
    found = dict(rope)
    for key, value in rope.items():
        if isinstance(value, dict):
            found[key] = _narrow_rope(value, divisor)
        elif key == "mrope_section" and value:
            # frequencies of each of a token's three positions; of text these are equal
            number = max(sum(value) // divisor, 3)
            found[key] = [number - 2, 1, 1]
        elif key in ("short_factor", "long_factor"):  # one of each frequency (longrope)
            found[key] = value[::divisor][: max(len(value) // divisor, 1)]
    return found


def _fit_towers(config: Any, text: Any) -> None:
    """Fewer heads in parts beside the text model whose width is no multiple of them any more: the
    divisor is that of the text model's heads."""
    for inner in (value for value in vars(config).values() if hasattr(value, "to_dict")):
        _fit_towers(inner, text)
    width, heads = (getattr(config, key, None) for key in ("hidden_size", "num_attention_heads"))
    if config is not text and isinstance(width, int) and isinstance(heads, int) and width % heads:
        config.num_attention_heads = math.gcd(width, heads)


def _experts(config: dict[str, Any]) -> int:
    """Experts that are enough for routing to work."""
    chosen = [v for k, v in config.items() if _CHOSEN_KEY.search(k) and isinstance(v, int)]
    return max(EXPERTS, *chosen, 2 * (config.get("n_group") or 1))


def _is_width(key: str, words: set[str]) -> bool:
    named_by_letter = key.startswith(("d_", "mamba_d_", "n_embd", "n_inner"))
    return bool(named_by_letter or words & _WIDTH_WORDS) and not words & _OTHER_WORDS


def _divided(value: Any, divisor: int) -> Any:
    if isinstance(value, list):
        return [_divided(member, divisor) for member in value]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 2 * HEAD_DIM:
        return max(value // divisor, 2)
    return value


def _one_layer_of_each_kind(config: Any, build: Build) -> Any:
    """The configuration cut behind the layer by which every kind of layer has come.

    Two layers at least. Where layers are not found all are kept.
    """
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        module = build(config)
    found = _counted_layers(module, text)
    if found is None:
        return config
    key, layers = found
    number = len(layers)
    kinds = [_kind(layer) for layer in layers]
    kept = max(2, *(kinds.index(kind) + 1 for kind in set(kinds)))
    if kept < number:
        for each, value in list(vars(text).items()):
            if isinstance(value, list | tuple) and len(value) == number:
                setattr(text, each, value[:kept])
        if shared := getattr(text, "num_kv_shared_layers", None):  # the last ones
            text.num_kv_shared_layers = max(shared - (number - kept), 0)
        setattr(text, key, kept)
    return config


def _counted_layers(module: nn.Module, text: Any) -> tuple[str, list[nn.Module]] | None:
    """The layers of the text model, and the key of its configuration that says how many; None where
    none does. Of lists of equal length, as a tower beside it may have, it is the largest."""
    try:
        known = set(transformer_layers(module))
    except ValueError:
        return None
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    for key in _NUM_LAYERS:
        number = getattr(text, key, None)
        fitting = [part for part in lists if len(part) == number and known.issuperset(part)]
        if fitting:
            sizes = [sum(p.numel() for p in part.parameters()) for part in fitting]
            return key, list(fitting[sizes.index(max(sizes))])
    return None


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What two layers of one kind have in common: classes, settings, shapes."""
    parts = [
        (name, type(part).__name__, *sorted(_settings(part)))
        for name, part in layer.named_modules()
    ]
    return (*parts, *((name, tuple(p.shape)) for name, p in layer.named_parameters()))


def _settings(part: nn.Module) -> list[tuple[str, str]]:
    return [
        (name, repr(value))
        for name, value in vars(part).items()
        if isinstance(value, bool | int | float | str) and name not in _INDEX_ATTRIBUTES
    ]


def _num_parameters(config: Any, build: Build) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build(config).parameters())


@torch.no_grad()
def _with_random_weights(config: Any, build: Build) -> Any:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        module = build(config)
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=GAIN * parameter.shape[-1] ** -0.5)
            else:  # norms around what they start from, biases around 0
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval().requires_grad_(False)


def _from_config(config: Any, *, trust_remote_code: bool, kind: Any | None) -> Any:
    from transformers import AutoModelForCausalLM

    if kind is not None:
        return kind._from_config(config, dtype=torch.float32)
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, trust_remote_code=trust_remote_code
    )
