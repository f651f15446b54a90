"""Faster kernels behind torch's varlen attention: FA3 or FA4, where installed and right.

Owns which of them is active in this process (torch keeps one for all), and the trial that it has to
pass. Must not know models beyond the heads of their attention.

Flash attention 2 is part of torch. The others are packages: flash_attn_interface (FA3, Hopper) and
flash_attn.cute (FA4, Hopper and Blackwell; SGLang brings it), which torch calls prototypes.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ppo.models.packed.attention import Kernel, make_documents
from ppo.models.packed.kernels import sdpa_kernel, varlen_kernel
from sharding.agree import gather

logger = logging.getLogger(__name__)

CANDIDATES = {9: ("FA3", "FA4"), 10: ("FA4",)}
"""by the major compute capability of a device, the fastest first"""
LENGTHS = (5, 1, 130, 17, 300)
"""documents of a trial: shorter and longer than a kernel's tiles"""
SPARE = 1.5
"""times the error of flash attention 2 that a candidate may have: sums are in another order"""


class Heads(NamedTuple):
    """Of the attention of one model, as a kernel sees it."""

    num: int
    num_kv: int
    size: int
    window: int | None
    sinks: bool = False

    @property
    def fits(self) -> bool:
        """Whether varlen attention takes them."""
        return self.size <= 256 and self.size % 8 == 0


_SEEN: list[Heads] = []
"""of the models of this process: what is active is right for all of them"""


def use_fastest_flash(heads: Heads, device: torch.device, group: dist.ProcessGroup) -> None:
    """Activate the first candidate that passes its trial on every rank, else none. Collective.

    The first call of a candidate compiles its kernels, which may take a minute.
    """
    major = torch.cuda.get_device_capability(device)[0]
    if heads in _SEEN or not heads.fits or not CANDIDATES.get(major):
        return
    _SEEN.append(heads)
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    restore_flash_attention_impl(_raise_warn=False)
    limits = [SPARE * error_of(varlen_kernel, each, device) for each in _SEEN]

    def problem(name: str) -> str | None:
        try:
            activate_flash_attention_impl(name)
            found = [error_of(varlen_kernel, each, device) for each in _SEEN]
        except Exception as error:  # others' prototype: whatever it raises, there is FA2
            return f"{type(error).__name__}: {error}"
        return wrong(found, limits)

    chosen = choose(
        CANDIDATES[major], problem, lambda: restore_flash_attention_impl(_raise_warn=False), group
    )
    logger.info("attention: %s", chosen or "flash attention 2 of torch")


def choose(
    names: Sequence[str],
    problem: Callable[[str], str | None],
    restore: Callable[[], None],
    group: dist.ProcessGroup,
) -> str | None:
    """The first name without a problem on any rank. Collective.

    problem: activates it and says what is wrong with it; restore: undoes that.
    """
    for name in names:
        found = [text for text in gather(problem(name), group) if text is not None]
        if not found:
            return name
        restore()
        logger.info("attention: %s is not used: %s", name, found[0].strip().splitlines()[0])
    return None


def wrong(found: Sequence[float], limits: Sequence[float]) -> str | None:
    """What is wrong with relative errors, if anything."""
    for error, limit in zip(found, limits, strict=True):
        if not error <= limit:  # so that NaN is wrong too
            return f"its results are off by {error:.2g}, flash attention 2 by {limit / SPARE:.2g}"
    return None


def error_of(kernel: Kernel, heads: Heads, device: torch.device) -> float:
    """Largest relative error, by 2-norms, of output and gradients in bfloat16, with the window and
    without, against attention of each document alone in float32."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    rounded = [
        torch.randn(tokens, number, heads.size, generator=generator).to(device, torch.bfloat16)
        for number in (heads.num, heads.num_kv, heads.num_kv, heads.num)
    ]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    sinks = torch.linspace(-1, 1, heads.num, device=device) if heads.sinks else None
    worst = 0.0
    for window in dict.fromkeys((None, heads.window)):
        got = _results(kernel, rounded, bounds, window, sinks)
        want = _results(sdpa_kernel, [t.float() for t in rounded], bounds, window, sinks)
        for a, b in zip(got, want, strict=True):
            error = ((a.float() - b).norm() / b.norm()).item()
            worst = error if not error <= worst else worst
    return worst


def _results(
    kernel: Kernel,
    tensors: Sequence[Tensor],
    bounds: Tensor,
    window: int | None,
    sinks: Tensor | None,
) -> list[Tensor]:
    """Output, and gradients of query, key and value."""
    q, k, v = (t.detach().clone().requires_grad_() for t in tensors[:3])
    documents = make_documents(bounds, q.device, kernel)
    scale = q.shape[-1] ** -0.5
    output = kernel(q, k, v, documents, scale=scale, window=window, softcap=None, sinks=sinks)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), tensors[3])]
