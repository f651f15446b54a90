"""Arithmetic of training as FLOPs, and how much of the device's peak that is.

Owns the cost formulas and the table of peak rates. Must not know models beyond a few sizes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

# Dense bf16 TFLOP/s of the vendors' data sheets; the longest name that fits counts.
PEAK_TFLOPS = {
    "A100": 312.0,
    "A800": 312.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200": 989.0,
    "H200 NVL": 835.0,
    "GH200": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "B200": 2250.0,
    "L40S": 362.0,
}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What the cost of a token depends on."""

    num_params: float
    """that every token is multiplied with; of experts, as many as a token visits"""
    head_params: int = 0
    """of the output head, which only scored tokens meet"""
    num_layers: int
    num_heads: int
    head_dim: int
    is_frozen: bool = False
    """adapters alone are trained, which cost little: no gradients of the weights"""

    @property
    def per_weight(self) -> int:
        """FLOPs of a token with a weight: 2 forward, 2 for the input's gradient, 2 for its own."""
        return 4 if self.is_frozen else 6


def flops_per_token(size: ModelSize, seq_len: float) -> float:
    """FLOPs of one token of a sequence of `seq_len` tokens, forward and backward, but for the head.

    6 N (4 N where it is frozen), and for causal attention 12 L d_h n_h s / 2 (arXiv 2204.02311,
    appendix B, halved for the mask).
    """
    attention = 12 * size.num_layers * size.head_dim * size.num_heads * seq_len / 2
    return size.per_weight * size.num_params + attention


def batch_flops(
    size: ModelSize, lengths: Iterable[int], *, num_scored: int, epochs: int = 1
) -> float:
    """FLOPs of all tokens of sequences of the given lengths, without padding.

    num_scored: tokens with a log-prob: those of responses.
    """
    layers = sum(n * flops_per_token(size, n) for n in lengths)
    return epochs * (layers + size.per_weight * size.head_params * num_scored)


def peak_tflops(device_name: str) -> float | None:
    """Peak rate of a device as `torch.cuda.get_device_name` calls it; None: not in the table."""
    words = device_name.replace("-", " ").split()
    fitting = [key for key in PEAK_TFLOPS if set(key.split()) <= set(words)]
    return PEAK_TFLOPS[max(fitting, key=len)] if fitting else None


def utilisation(
    name: str, flops: float, *, seconds: float, num_devices: int, device_name: str
) -> dict[str, float]:
    """perf/mfu/NAME, 0 to 1, or perf/tflops/NAME per device where the peak is unknown.

    Args:
        name: actor or critic.
        flops: of all devices together.
        seconds: the time they took; 0 gives nothing.
    """
    if seconds <= 0:
        return {}
    rate = flops / seconds / num_devices / 1e12
    peak = peak_tflops(device_name)
    return {f"perf/tflops/{name}": rate} if peak is None else {f"perf/mfu/{name}": rate / peak}
