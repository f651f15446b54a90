"""Names of a module's tensors, and buffers that no checkpoint holds."""

import torch
from torch import nn

from sharding.names import compute_buffers, non_persistent_buffers


class Inner(nn.Module):
    """As Gemma 3n's text model: its initialisation reads a size that only it has."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 4.0
        self.rotary = nn.Module()
        for owner in (self, self.rotary):
            owner.register_buffer("scale", torch.zeros(2), persistent=False)

    def _init_weights(self, part: nn.Module) -> None:
        part.get_buffer("scale").fill_(self.size)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.register_buffer("scale", torch.zeros(2), persistent=False)

    def _init_weights(self, part: nn.Module) -> None:
        part.get_buffer("scale").fill_(1.0)


def test_a_buffer_is_computed_by_the_innermost_model_that_it_is_in():
    module = Outer()
    compute_buffers(module, non_persistent_buffers(module))
    found = {name: buffer[0].item() for name, buffer in module.named_buffers()}
    assert found == {"scale": 1.0, "model.scale": 4.0, "model.rotary.scale": 4.0}
