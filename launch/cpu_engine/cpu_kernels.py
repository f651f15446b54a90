"""Torch versions of Triton kernels that SGLang calls on a CPU too, as one of its plugins.

SGLang finds `register` through ppo_cpu_engine-1.dist-info when this folder is on `sys.path`.
Must not know: ppo, sharding.
"""

import torch
from torch import Tensor

KERNELS = "sglang.kernels.ops.elementwise.elementwise"


def fused_gate_sigmoid_mul(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor
) -> Tensor:
    """The shared expert's output [N, H], scaled by sigmoid(hidden_states [N, H] @ gate [H])."""
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float())
    return (gate[:, None] * shared_output.float()).to(shared_output.dtype)


def fused_gate_sigmoid_mul_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """Adds the scaled output of the shared expert to ``final_hidden_states`` [N, H] in place."""
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float())
    total = gate[:, None] * shared_output.float() + final_hidden_states.float()
    final_hidden_states.copy_(total)


def register() -> None:
    """Put them in the place of the kernels."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for function in (fused_gate_sigmoid_mul, fused_gate_sigmoid_mul_add):
        HookRegistry.register(f"{KERNELS}.{function.__name__}", function, HookType.REPLACE)
