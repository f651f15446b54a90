"""What SGLang changes in the process that it runs in, and how the trainer gets it back.

Owns every process-wide thing that is one thing for the trainer and another one for SGLang: random
state, environment, import path, default process group, logging, warnings, signals, numerics. Must
not know the engine. Left as SGLang leaves it: what it has imported, and its own process groups.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

SIGNALS = (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD)
c10d: Any = dist.distributed_c10d
"""its names of the default group are private: SGLang takes the default group for its world"""


class OwnState:
    """SGLang's own state; it is the process's while `lent` is open, on one thread at a time.

    No other thread may use the default process group or draw random numbers meanwhile.
    """

    def __init__(self, variables: Mapping[str, str | None], first_on_path: Sequence[str]) -> None:
        """What SGLang finds in its environment (None: not there), and folders that it imports from
        before others."""
        self._variables: dict[str, str | None] = dict(variables)
        self._first_on_path = list(first_on_path)
        self._random: dict[str, Any] | None = None
        self._device_module = torch.get_device_module
        self._world: Any = None
        self._store: Any = None  # of the trainer's default group

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The process is SGLang's, without gradients. What is raised inside passes through."""
        with ExitStack() as restored:
            for change in (
                *(self._lend_environment, self._lend_random_state, self._lend_default_group),
                *(self._lend_compiler, _keep_numerics, _keep_logging, _keep_hooks, _keep_cores),
            ):
                restored.enter_context(contextmanager(change)())
            restored.enter_context(warnings.catch_warnings())
            restored.enter_context(torch.no_grad())
            yield

    def make_world(self, backend: str, *, rank: int, size: int, name: str) -> None:
        """SGLang's default group: the ranks of a rollout group alone. Collective over them.

        Called while lent. `name` is the group's alone among all of the job.
        """
        store = PrefixStore(f"sglang/{name}", self._store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)

    def end_world(self) -> None:
        """Called while not lent: the default group takes all others with it."""
        if self._world is not None:
            dist.destroy_process_group(self._world)
            self._world = None

    def seed(self, number: int) -> None:
        """SGLang's random numbers begin anew. Called while lent."""
        random.seed(number)
        np.random.seed(number % 2**32)
        torch.manual_seed(number)

    def _lend_environment(self) -> Iterator[None]:
        before, path = dict(os.environ), list(sys.path)
        _set_environment({**before, **self._variables})
        sys.path[:0] = self._first_on_path
        try:
            yield
        finally:
            after = dict(os.environ)
            changed = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
            self._variables = {name: after.get(name) for name in changed}
            _set_environment(dict(before))
            sys.path[:] = path

    def _lend_random_state(self) -> Iterator[None]:
        before = _random_state()
        if self._random is not None:
            _set_random_state(self._random)
        try:
            yield
        finally:
            self._random = _random_state()
            _set_random_state(before)

    def _lend_default_group(self) -> Iterator[None]:
        before = c10d._world.default_pg, c10d._backend, c10d._default_pg_init_method
        self._store = c10d._get_default_store()
        c10d._world.default_pg = self._world
        try:
            yield
        finally:
            self._world = c10d._world.default_pg
            c10d._world.default_pg, c10d._backend, c10d._default_pg_init_method = before

    def _lend_compiler(self) -> Iterator[None]:
        """torch.compile, which reads the environment once for the process, and the function that
        names torch's device: SGLang's CPU engine has its own."""
        import torch._dynamo.config as dynamo

        before = torch.get_device_module
        disabled, suppresses = dynamo.disable, dynamo.suppress_errors
        torch.get_device_module = self._device_module
        dynamo.disable = disabled or os.environ.get("TORCH_COMPILE_DISABLE") == "1"
        try:
            yield
        finally:
            self._device_module, torch.get_device_module = torch.get_device_module, before
            dynamo.disable, dynamo.suppress_errors = disabled, suppresses


def _set_environment(wanted: Mapping[str, str | None]) -> None:
    for name in [name for name in os.environ if wanted.get(name) is None]:
        del os.environ[name]
    for name, value in wanted.items():
        if value is not None and os.environ.get(name) != value:
            os.environ[name] = value


def _random_state() -> dict[str, Any]:
    state = {"python": random.getstate(), "numpy": np.random.get_state()}
    state["torch"] = torch.get_rng_state()
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _keep_numerics() -> Iterator[None]:
    """Precision and threads of torch's computations."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)


def _keep_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, logging.root.manager.disable
    try:
        yield
    finally:
        root.handlers[:] = handlers
        if root.level != level:
            root.setLevel(level)
        if logging.root.manager.disable != disabled:  # it goes through all loggers
            logging.disable(disabled)


def _keep_hooks() -> Iterator[None]:
    """Handlers of signals and of exceptions, the way processes start and share memory."""
    excepthook = sys.excepthook
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    start_method = torch.multiprocessing.get_start_method(allow_none=True)
    sharing = torch.multiprocessing.get_sharing_strategy()
    try:
        yield
    finally:
        sys.excepthook = excepthook
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        if torch.multiprocessing.get_start_method(allow_none=True) != start_method:
            torch.multiprocessing.set_start_method(start_method, force=True)
        torch.multiprocessing.set_sharing_strategy(sharing)


def _keep_cores() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        if os.sched_getaffinity(0) != cores:
            os.sched_setaffinity(0, cores)
