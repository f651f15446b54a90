"""Models between uses, and a model that learns: optimizer, learning rate, one optimizer step.

Knows neither losses nor batches. Gradients come from whoever ran backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ppo.config import OptimConfig
from ppo.errors import StopRequested
from ppo.logprobs import LogitTransform, Reference
from ppo.models.forward import with_bias
from ppo.models.schedule import lr_factor
from sharding.adamw import EIGHT_BITS, HostAdamW, NarrowAdamW
from sharding.adapters import without_adapters
from sharding.fsdp import gradient_norm
from sharding.offload import (
    forget_state,
    offload_module,
    offload_optimizer,
    reload_module,
    reload_optimizer,
)


@dataclass(frozen=True, eq=False)
class Head:
    """A causal LM's output head while another model is compared with it over the vocabulary."""

    weight: Tensor
    """[V, H]"""
    transform: LogitTransform

    def reference(self, hidden: Tensor, *, is_forward: bool) -> Reference:
        """Its distributions of the tokens with these last hidden states, [K, H]."""
        return Reference(
            hidden=hidden, weight=self.weight, transform=self.transform, is_forward=is_forward
        )


@dataclass(kw_only=True)
class Model:
    """An FSDP2 module that only runs forward; it may rest on the host between uses."""

    module: nn.Module
    device: torch.device
    param_offload: bool = False

    @property
    def hf_config(self) -> Any:
        """transformers' configuration of the text model."""
        config: Any = self.module.config
        return config.get_text_config()

    @contextmanager
    def on_device(self) -> Iterator[nn.Module]:
        """Bring parameters that rest on the host to the device, for use and not for change.

        They rest afterwards, also when a stop is requested in between: the run goes on to a save.
        Any other exception ends the run, and must be written down at once: nothing is moved.
        """
        if self.param_offload:
            reload_module(self.module, self.device)
        try:
            yield self.module
        except StopRequested:
            self._leave_device(changed=False)
            raise
        self._leave_device(changed=False)

    def rest(self) -> None:
        """Send to the host what rests there between uses."""
        self._leave_device(changed=True)

    def _leave_device(self, *, changed: bool) -> None:
        if self.param_offload:
            offload_module(self.module, changed=changed)

    def whole_head(self) -> Head:
        """The output head of a causal LM, on the device and the caller's own. Collective."""
        with self.on_device() as module:
            head: Any = module.get_output_embeddings()  # pyright: ignore
            whole = self._whole(head.weight)
            if getattr(head, "bias", None) is not None:
                whole = with_bias(whole[:0], whole, self._whole(head.bias))[1]
            return Head(whole, module.forward_plan.transform)  # pyright: ignore

    def _whole(self, parameter: Tensor) -> Tensor:
        """A parameter gathered on the device, in memory of its own. Collective."""
        parameter = parameter.detach()
        whole = here = parameter
        if isinstance(parameter, DTensor):
            moved: Any = parameter.to(self.device)
            whole, here = moved.full_tensor(), moved.to_local()
        if whole.untyped_storage().data_ptr() == here.untyped_storage().data_ptr():
            whole = whole.clone()  # nothing was gathered, and the parameter goes to the host
        return whole


@dataclass(kw_only=True)
class WithoutAdapters(Model):
    """A learner's model as it was before its adapters: a reference that takes no memory."""

    @contextmanager
    def on_device(self) -> Iterator[nn.Module]:
        """The learner's own module, with its adapters off."""
        with super().on_device() as module, without_adapters(module):
            yield module


@dataclass(kw_only=True)
class Learner(Model):
    """An FSDP2 module with its AdamW, whose state may rest on the host between updates."""

    name: str
    optimizer: torch.optim.AdamW
    optim: OptimConfig
    grad_clip: float
    total_steps: int
    """iterations of the run, for the schedule"""
    optimizer_offload: bool = False

    @contextmanager
    def updating(self) -> Iterator[nn.Module]:
        """Parameters and optimizer state on the device; they rest afterwards.

        An exception leaves them where they are. It ends the run, and must be written down at once:
        a copy would need memory of the host, and wait for a checkpoint that is being written, or
        for ever for kernels whose partners on other ranks are gone. No run is stopped and saved
        in the middle of an update.
        """
        if self.param_offload:
            reload_module(self.module, self.device)
        if self.optimizer_offload:
            reload_optimizer(self.optimizer, self.device)
        if isinstance(self.optimizer, HostAdamW):
            self.optimizer.fetch()
        yield self.module
        self.rest()

    def rest(self) -> None:
        """Send to the host what rests there between uses."""
        if self.optimizer_offload:
            offload_optimizer(self.optimizer)
        super().rest()

    def forget(self) -> None:
        """New moments, as at the start of a run."""
        forget_state(self.optimizer)

    def set_lr(self, step: int, adjusted: Callable[[float], float] = lambda lr: lr) -> float:
        """Set and return the learning rate of PPO iteration `step` (1-based) of the schedule.

        adjusted: given the scheduled rate, the one to set in its place.
        """
        warmup = self.optim.lr_warmup_steps or int(
            self.optim.lr_warmup_steps_ratio * self.total_steps
        )
        factor = lr_factor(
            step - 1,
            warmup_steps=warmup,
            total_steps=self.total_steps,
            kind=self.optim.lr_scheduler_type,
            min_lr_ratio=self.optim.min_lr_ratio,
        )
        lr = adjusted(self.optim.lr * factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def clip_gradients(self) -> Tensor:
        """Clip gradients to `grad_clip` (global 2-norm); the norm before, [] on the device."""
        if isinstance(self.optimizer, HostAdamW):
            norm = gradient_norm(self.module, self.device, self.optimizer.gradients())
            self.optimizer.scale(self.grad_clip, norm)
            return norm
        norm = gradient_norm(self.module, self.device)
        nn.utils.clip_grads_with_norm_(self.module.parameters(), self.grad_clip, norm)
        return norm

    def step(self) -> None:
        """Update the weights, and be done with the gradients."""
        if not self.optimizer.state and self.device.type == "cuda":
            # the moments, which stay, must not lie among the pieces of what backward has freed
            torch.cuda.empty_cache()
        self.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Leave an update out: weights, moments and their count of steps stay as they are."""
        self.optimizer.zero_grad(set_to_none=True)


def make_optimizer(
    module: nn.Module, optim: OptimConfig, device: torch.device, *, on_host: bool = False
) -> torch.optim.AdamW:
    """AdamW over the sharded parameters that are trained: one fused kernel on CUDA.

    on_host: gradients, moments and the step itself are in host memory.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    options: dict[str, Any] = {
        "lr": optim.lr,
        "betas": (optim.betas[0], optim.betas[1]),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "fused": device.type == "cuda",
    }
    dtypes, state_dtype = {p.dtype for p in parameters}, _STATE_DTYPES[optim.state_dtype]
    if on_host:
        own = torch.float32 if torch.float32 in dtypes else parameters[0].dtype
        return HostAdamW(module, state_dtype=state_dtype or own, **options)
    if state_dtype is None or dtypes == {state_dtype}:
        return torch.optim.AdamW(parameters, **options)
    return NarrowAdamW(parameters, state_dtype=state_dtype, **options)


_STATE_DTYPES = {
    None: None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "8bit": EIGHT_BITS,
}
