"""The start of a process: what the launcher says, the device, the process group, the run.

Owns what happens between the command line and the first collective, and how wrong input is
reported. Every rank calls everything here.
"""

import gc
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ppo.check.commands import problems_of_start
from ppo.check.memory_phases import Plan
from ppo.check.preflight import find_models
from ppo.check.shard_size import sized
from ppo.check.warnings import config_warnings
from ppo.config import Config, ConfigError, Problem
from ppo.errors import InputError
from ppo.run.machine import (
    bus_id_of,
    compute_mode,
    exclusive_problem,
    given_threads,
    use_cores,
)
from ppo.run.run import Run
from ppo.run.signals import EXIT_INTERRUPTED, stop_with_parent
from ppo.run.startup import StartClock, process_age
from sharding.agree import gather, together
from sharding.dims import ParallelDims
from sharding.groups import world
from sharding.mesh import build_mesh, init_distributed

logger = logging.getLogger(__name__)

EXIT_CONFIG = 2
"""exit code for wrong configuration or data"""
SAID_ABOVE = "wrong input: what is wrong stands above, where the first start has said it"
EXIT_S = 20
"""what Python's own end may take after a failure: NCCL may wait for ranks that will not come"""
HOST_TIMEOUT_S = 1800
"""seconds that one rank may be ahead of another on the host: it may be busy with files"""
ENVIRONMENT = {
    "TORCH_GLOO_LAZY_INIT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""what torch reads of the environment, unless the user has set it: gloo connects ranks when they
first talk to each other, not all to all in every group; NCCL's flight recorder keeps the last
collectives and writes them down when one of them times out"""
RANK_VARIABLES = (
    ("RANK", "rank", 0),
    ("LOCAL_RANK", "local_rank", 0),
    ("WORLD_SIZE", "world_size", 1),
    ("LOCAL_WORLD_SIZE", "ranks_per_node", 1),
)
"""of torchrun: name, field of Launch, and what it is without"""
BY_TORCHRUN = "torchrun sets them all; for a run of one process `unset RANK WORLD_SIZE`"
UNHEARD_S = 120.0
"""in which a rank that has nothing to say of wrong input is ended by torchrun"""
DUMP_FILE = "TORCH_FR_DUMP_TEMP_FILE"
"""where the flight recorder writes, the rank is appended"""
OLDER_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    DUMP_FILE: "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""names for the same that torch reads too"""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What torchrun tells a process; plain python is a world of one rank."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    ranks_per_node: int = 1
    restart_count: int = 0
    has_agent: bool = False
    """torchrun's agent is the parent"""
    threads: int | None = None
    """CPU threads that the user has asked for (OMP_NUM_THREADS)"""
    allocator: str = ""
    """settings of torch's allocator that the user has asked for (PYTORCH_ALLOC_CONF)"""
    error_file: str | None = None
    """where torchrun looks for the reason of a failure"""
    env: MutableMapping[str, str] = field(default_factory=dict, repr=False)
    """of the process: what torch reads later is set here"""

    @classmethod
    def from_env(cls, env: MutableMapping[str, str]) -> "Launch":
        """Read torchrun's variables, and set ENVIRONMENT. Raises InputError."""
        for name, value in ENVIRONMENT.items():
            _set_unless_given(env, name, value)
        has_agent = "TORCHELASTIC_RUN_ID" in env
        return cls(
            **ranks_of(env),
            restart_count=int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
            has_agent=has_agent,
            threads=given_threads(env, os.getppid() if has_agent else None),
            allocator=env.get("PYTORCH_ALLOC_CONF") or env.get("PYTORCH_CUDA_ALLOC_CONF") or "",
            error_file=env.get("TORCHELASTIC_ERROR_FILE"),
            env=env,
        )

    def problems(self, config: Config) -> list[Problem]:
        """Whatever is wrong with a configuration for this world and on this machine."""
        size, per_node = self.world_size, self.ranks_per_node
        return problems_of_start(config, world_size=size, ranks_per_node=per_node)

    def report(self, error: InputError) -> int:
        """Say at once, and once, what is wrong with the user's input; the exit code.

        The first rank says it, on the first start. Of another node it is torchrun's report that
        says it, the last thing on the screen: there something else may be wrong.
        """
        if self.rank == 0 and self.restart_count == 0:
            sys.stderr.write(f"{error}\n")
            self.tell_launcher(SAID_ABOVE)
        elif self.local_rank == 0:
            self.tell_launcher(SAID_ABOVE if self.rank == 0 else str(error))
        elif self.has_agent:
            # whoever ends first ends all, and the one who says it may still be importing
            time.sleep(UNHEARD_S)
        return EXIT_CONFIG

    def tell_launcher(self, reason: str) -> None:
        """The reason of a failure, for torchrun's report."""
        if self.error_file is not None:
            # torchrun takes what came first for the cause, and the end of a sibling for as early
            content = {"message": reason, "timestamp": int(time.time()) - 1}
            with suppress(OSError):
                Path(self.error_file).write_text(json.dumps(content), encoding="utf-8")


def ranks_of(env: Mapping[str, str]) -> dict[str, int]:
    """Which rank of how many this process is, by the fields of `Launch`.

    Raises InputError for what torchrun would not say: a container or a cluster has set some of it.
    """
    found: dict[str, int] = {}
    for name, field_name, default in RANK_VARIABLES:
        text = env.get(name, "").strip() or str(default)
        if not text.isdecimal():
            raise InputError(f"{name}={text!r} of the environment is no number: {BY_TORCHRUN}")
        found[field_name] = int(text)
    size, per_node = found["world_size"], found["ranks_per_node"]
    if found["rank"] >= size or found["local_rank"] >= per_node or per_node > size:
        said = ", ".join(f"{name}={found[field]}" for name, field, _ in RANK_VARIABLES)
        raise InputError(f"the environment says {said}, which do not agree: {BY_TORCHRUN}")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing and size > 1 and "TORCHELASTIC_RUN_ID" not in env:
        raise InputError(
            f"WORLD_SIZE={size} in the environment, and no {' and '.join(missing)}: {BY_TORCHRUN}"
        )
    return found


def _set_unless_given(env: MutableMapping[str, str], name: str, value: str) -> None:
    """Where the user has set it by none of its names."""
    if OLDER_NAMES.get(name, name) not in env:
        env.setdefault(name, value)


def program(
    start: Callable[[Launch, Sequence[str]], int],
    env: MutableMapping[str, str],
    words: Sequence[str] | None,
) -> int:
    """The exit code of a program: of `start`, given the words of its command line (None = ours).

    2 for wrong input, which is said once; 130 for a Ctrl-C before the run could take it.
    """
    # Modules are here to stay: a collection that looks at all they hold takes a third of a second,
    # at some moment of each rank's own, in which the others wait for it.
    gc.collect()
    gc.freeze()
    gc.enable()
    launch = Launch()
    try:
        launch = Launch.from_env(env)
        return start(launch, sys.argv[1:] if words is None else words)
    except InputError as error:
        return launch.report(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def pick_device(config: Config, launch: Launch) -> torch.device:
    """The device of this rank: `trainer.device`, where auto is CUDA if there is one.

    Raises ConfigError where there are fewer than ranks.
    """
    cuda = torch.cuda.is_available()
    if config.trainer.device == "cuda" and not cuda:
        raise ConfigError(
            [Problem("trainer.device", "cuda", "torch sees no CUDA device", "use auto or cpu")]
        )
    if config.trainer.device == "cpu" or not cuda:
        return torch.device("cpu")
    devices, ranks = torch.cuda.device_count(), launch.ranks_per_node
    # a launcher that shows each rank its own device only (Slurm --gpus-per-task, a wrapper that
    # sets the variable): number 0
    own = devices == 1 and (not launch.has_agent or "CUDA_VISIBLE_DEVICES" in launch.env)
    if devices < ranks and not own:
        few = f"{ranks} ranks on a node where torch sees {devices} CUDA devices"
        fix = f"start with --nproc_per_node={devices}, or look at CUDA_VISIBLE_DEVICES"
        raise ConfigError([Problem("", None, few, fix)])
    return torch.device("cuda", 0 if own else launch.local_rank)


def memory_of(device: torch.device) -> float | None:
    """Bytes of a device; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory


def use_expandable_segments(settings: str) -> None:
    """Have torch's allocator map pages into growing segments, unless the user's settings decide it.

    Freed blocks of any size can be given out or back then: an engine finds free what the trainer
    does not use. Set here and not in the environment, which engines inherit: those refuse it. A
    weight update switches it off while it shares memory (ppo/engines/sglang/sync.py).

    settings: what the user says in PYTORCH_ALLOC_CONF.
    """
    if "expandable_segments" not in settings and "backend" not in settings:
        settings = ",".join([*filter(None, [settings]), "expandable_segments:True"])
        torch._C._accelerator_setAllocatorSettings(settings)


def choose_dims(
    config: Config, launch: Launch, device_bytes: float | None
) -> tuple[ParallelDims, str]:
    """Collective: the degrees of this run, the same on every rank, and why shard groups have the
    size that they have, where the configuration leaves it open.

    device_bytes: memory of this rank's device, None on a CPU. The smallest device counts, and what
    rank 0 knows of the models: the caches of nodes may differ.
    """
    dims, group = config.dims(launch.world_size, launch.ranks_per_node), world()
    if device_bytes is None or dims.fsdp_size != -1 or dims.nodes == 1:
        return dims, ""
    smallest = min(gather(device_bytes, group))

    def choose() -> tuple[ParallelDims, str]:
        if launch.rank != 0:
            return dims, ""
        shapes = find_models(config).shapes
        if shapes.keys() != config.models.keys():
            return dims, "actor.fsdp.fsdp_size = -1 is a node's ranks: a model's sizes are unknown"
        plan = Plan(config=config, dims=dims, shapes=shapes, cuda=True, device_bytes=smallest)
        chosen, reason = sized(plan)
        return chosen.dims, reason

    return together(choose, group)[0]


@contextmanager
def open_run(config: Config, launch: Launch, command: Sequence[str]) -> Iterator[Run]:
    """The process group, the meshes, and the run folder with its logs and status."""
    clock = StartClock(process_age())
    clock.mark("imports")
    if launch.has_agent:
        stop_with_parent()
    device = pick_device(config, launch)
    binds = device.type == "cuda" and config.trainer.numa_binding
    cores = use_cores(
        local_ranks=launch.ranks_per_node,
        given=launch.threads,
        bus_id=bus_id_of(device) if binds else None,
    )
    seed = config.trainer.seed + launch.rank  # dropout and the like; sampling has its own noise
    torch.manual_seed(seed)
    random.seed(seed)
    if config.trainer.deterministic:
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        # torch prefers cuDNN's attention on Hopper and later, which makes a plan for every new
        # shape (about half a second each); here every micro-batch has shapes of its own.
        torch.backends.cuda.enable_cudnn_sdp(False)
        use_expandable_segments(launch.allocator)
        recorder = config.run_dir.absolute() / "logs" / "nccl_rank_"
        _set_unless_given(launch.env, DUMP_FILE, str(recorder))
    with init_distributed(
        device,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout_s=HOST_TIMEOUT_S,
        start_timeout_s=config.trainer.comm_timeout_s,
    ):
        dims, reason = choose_dims(config, launch, memory_of(device))
        mesh = build_mesh(dims, device, timeout_s=config.trainer.comm_timeout_s)
        clock.mark("process_groups")
        run = Run(
            config,
            mesh,
            command=command,
            restart_count=launch.restart_count,
            tell_launcher=launch.tell_launcher,
            clock=clock,
        )
        with _one_cause(run, launch), run:
            problem = exclusive_problem(compute_mode(device), config.rollout)
            run.agree(ValueError(str(problem)) if problem else None)
            logger.info("%s", mesh.dims.summary())
            logger.info("%s", cores)
            if launch.rank == 0:
                if reason:
                    logger.info("%s", reason)
                for warning in config_warnings(config, world_size=launch.world_size):
                    logger.warning("%s", warning)
            yield run
    if run.exit_code == EXIT_INTERRUPTED:  # all is saved: no further Ctrl-C must spoil the end
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _one_cause(run: Run, launch: Launch) -> Iterator[None]:
    """Under torchrun the rank that has failed first says why; others end quietly, and all end."""
    try:
        yield
    except Exception as error:
        if launch.has_agent and not isinstance(error, InputError):
            signal.alarm(EXIT_S)
            if not run.is_cause:  # its log has its own traceback
                sys.exit(1)
        raise
