"""What code that is lent the process changes, and what is left of it; without SGLang."""

import logging
import os
import random
import signal
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist

from ppo.engines.sglang.own_state import OwnState
from sharding.mesh import init_distributed


def state() -> dict[str, Any]:
    numpy_random: Any = np.random.get_state()
    return {
        "environment": dict(os.environ),
        "path": list(sys.path),
        "random": (random.getstate(), numpy_random[1].tobytes()),
        "torch random": torch.get_rng_state().tolist(),
        "group": dist.group.WORLD,
        "numerics": (torch.get_default_dtype(), torch.get_num_threads()),
        "precision": torch.get_float32_matmul_precision(),
        "grad": torch.is_grad_enabled(),
        "logging": (list(logging.root.handlers), logging.root.level, logging.root.manager.disable),
        "hooks": (sys.excepthook, signal.getsignal(signal.SIGQUIT)),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "warnings": (warnings.showwarning, list(warnings.filters)),
        "compiler": (torch._dynamo.config.disable, torch._dynamo.config.suppress_errors),
        "device module": torch.get_device_module,
        "cores": os.sched_getaffinity(0),
    }


def change_everything() -> None:
    os.environ["SGL_OF_ITS_OWN"] = "1"
    del os.environ["OURS_ALONE"]
    sys.path.insert(0, "/nowhere")
    torch.set_default_dtype(torch.bfloat16)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_float32_matmul_precision("medium")
    logging.root.handlers[:] = [logging.NullHandler()]
    logging.root.setLevel(logging.CRITICAL)
    logging.disable(logging.ERROR)
    sys.excepthook = lambda *_: None
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    torch.multiprocessing.set_sharing_strategy("file_system")
    warnings.simplefilter("ignore")
    warnings.showwarning = lambda *_, **__: None
    torch._dynamo.config.suppress_errors = True
    torch.get_device_module = lambda device=None: torch.cpu
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def test_the_process_is_as_before_after_code_that_has_changed_it_and_raised(monkeypatch):
    monkeypatch.setenv("OURS_ALONE", "1")
    own = OwnState({"SGL_GIVEN": "x", "OURS_TOO": None, "TORCH_COMPILE_DISABLE": "1"}, ["/first"])
    monkeypatch.setenv("OURS_TOO", "1")
    with init_distributed(torch.device("cpu")):
        before = state()
        with pytest.raises(KeyError), own.lent():
            assert (os.environ["SGL_GIVEN"], os.environ.get("OURS_TOO")) == ("x", None)
            assert sys.path[0] == "/first" and not torch.is_grad_enabled()
            assert not dist.is_initialized() and torch._dynamo.config.disable
            own.make_world("gloo", rank=0, size=1, name="0")
            world = dist.group.WORLD
            change_everything()
            torch.rand(3)
            random.random()
            np.random.rand()
            raise KeyError("inside")
        after = state()
        assert {name for name in before if before[name] != after[name]} == set()
        with own.lent():
            assert dist.group.WORLD is world is not None
            assert torch.get_device_module("anything") is torch.cpu
            assert os.environ["SGL_OF_ITS_OWN"] == "1" and "OURS_ALONE" not in os.environ
        own.end_world()
        dist.barrier()  # of the trainer's group, which is there still


def test_random_numbers_inside_are_a_sequence_of_their_own():
    own = OwnState({}, [])

    def draw() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(1).item()]

    with init_distributed(torch.device("cpu")):
        with own.lent():
            own.seed(7)
            first = draw()
        between = draw()
        with own.lent():
            second = draw()
            own.seed(7)
            assert draw() == first and draw() == second
        assert len({*first, *second, *between}) == 9
