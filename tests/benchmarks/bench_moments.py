"""Adam's moments in few bits: what a small language model learns, and how far its weights are from
those that moments in float32 give.

    python -m tests.benchmarks.bench_moments [--steps 300] [--seeds 2]

Two layers on texts of a random Markov chain. Beside ours AdamW8bit of the package torchao, where it
is installed: run without torch.compile, which changes what it costs and not what it computes.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sharding.adamw import EIGHT_BITS, NarrowAdamW

WORDS, HIDDEN, LENGTH, ROWS = 64, 64, 32, 32
LR, DECAY = 2e-3, 0.01
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Net(nn.Module):
    """A decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, **options) for _ in range(2)
        )
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.words(ids) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def texts(step: int) -> Tensor:
    """[ROWS, LENGTH + 1] of one chain."""
    chain = torch.Generator().manual_seed(99)
    table = (3 * torch.randn(WORDS, WORDS, generator=chain)).softmax(-1)
    generator = torch.Generator().manual_seed(step)
    found = [torch.randint(0, WORDS, (ROWS,), generator=generator)]
    for _ in range(LENGTH):
        found.append(torch.multinomial(table[found[-1]], 1, generator=generator)[:, 0])
    return torch.stack(found, dim=1)


def train(make: Make, seed: int, steps: int) -> tuple[float, Tensor]:
    """Mean loss of the last tenth of the steps, and all weights as one vector."""
    torch.manual_seed(seed)
    net = Net()
    optimizer, losses = make(net.parameters()), list[float]()
    for step in range(steps):
        for group in optimizer.param_groups:
            lr = LR * (1 - step / steps)
            group["lr"] = torch.tensor(lr) if isinstance(group["lr"], Tensor) else lr
        ids = texts(step)
        loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return fmean(losses[-(steps // 10) :]), torch.cat(
        [p.detach().flatten() for p in net.parameters()]
    )


def optimizers() -> dict[str, Make]:
    """By what they are called; float32 first."""
    found: dict[str, Make] = {
        "float32": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=DECAY),
        "bfloat16": lambda p: NarrowAdamW(p, state_dtype=torch.bfloat16, lr=LR, weight_decay=DECAY),
        "8bit": lambda p: NarrowAdamW(p, state_dtype=EIGHT_BITS, lr=LR, weight_decay=DECAY),
    }
    try:
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError:
        return found
    return {**found, "torchao's AdamW8bit": lambda p: AdamW8bit(p, lr=LR, weight_decay=DECAY)}


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bench_moments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    sys.stdout.write("| Seed | Moments | loss | distance to float32 |\n| --: | --- | --: | --: |\n")
    for seed in range(args.seeds):
        exact: Tensor | None = None
        for name, make in optimizers().items():
            with patch("torch.compile", lambda function, **_: function):
                loss, weights = train(make, seed, args.steps)
            exact = weights if exact is None else exact
            distance = ((weights - exact).norm() / exact.norm()).item()
            sys.stdout.write(f"| {seed} | {name} | {loss:.4f} | {distance:.4f} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
