"""What only SGLang in processes of its own can suffer: workers and hosts that die or hang, and
processes that are left. On a CPU; the rest of the contract is in test_engine.py. The full
tier's: two hosts take minutes to start. In CI test_sglang_job.py kills a worker of one."""

import os
import signal
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from ppo.engines.contract import Request, SamplingParams
from ppo.engines.sglang.host_executor import HostExecutor
from ppo.engines.sglang.process import HostProcess
from ppo.models.tiny import build_tiny_model
from ppo.run.signals import descendants
from tests.distributed import run_distributed
from tests.ppo.engines.drive import generate
from tests.ppo.engines.sglang.session import FAULT_S, Session, fails, long_generation

pytestmark = [
    *(pytest.mark.sglang, pytest.mark.distributed, pytest.mark.full),
    pytest.mark.timeout(600),
]


def host(session: Session) -> HostProcess:
    """Of a session's leader."""
    assert isinstance(session.engine.executor, HostExecutor)
    assert session.engine.executor.host is not None
    return session.engine.executor.host


def schedulers(session: Session) -> list[int]:
    """The engine's tensor-parallel workers."""
    pids = descendants(host(session).process.pid)
    return [p for p in pids if "scheduler" in Path(f"/proc/{p}/cmdline").read_text()]


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that are still running; they get a moment to end."""
    deadline = time.monotonic() + 10
    while True:
        stats = [Path(f"/proc/{pid}/stat") for pid in pids]
        left = [
            s for s in stats if s.exists() and s.read_text().rsplit(")", 1)[1].split()[0] != "Z"
        ]
        if not left or time.monotonic() > deadline:
            return [int(stat.parent.name) for stat in left]
        time.sleep(0.2)


def test_a_host_that_is_killed_and_a_worker_that_hangs_are_errors_and_leave_nothing(tmp_path: Path):
    folder = build_tiny_model(tmp_path / "tiny")
    assert run_distributed(_lost_and_hung, 2, str(folder), timeout_s=300) == [[], []]


def _lost_and_hung(rank: int, world_size: int, folder: str) -> list[int]:
    """Rank 0 loses its host between calls; a worker of rank 1's stops in a generation."""
    before = dict(os.environ)
    bystander = subprocess.Popen(["sleep", "1000"])  # as a reward process
    session = Session(rank, world_size, folder, "host", tp=1, timeout_s=20)
    try:
        session.wake()
        pids = [host(session).process.pid, *descendants(host(session).process.pid)]
        assert len(pids) >= 3 and host(session)._shared_files
        session.generate([[5, 6, 7]] * 4, temperature=0.8)
        work = _abandoned(session)
        if rank == 0:
            host(session).process.kill()
            host(session).process.wait()
            work = generate(session.engine, [Request(0, [5])], SamplingParams(max_new_tokens=2))
            seconds = fails(work, "rank 0: the SGLang engine", "engine_0000.log", "Prefill batch")
        else:
            os.kill(schedulers(session)[0], signal.SIGSTOP)
            seconds = fails(work, "rank 1: the SGLang engine made no progress for 20 s")
        assert seconds < 20 + FAULT_S
        session.engine.release()  # after a failure: nothing
    finally:
        session.engine.close()
        session.engine.close()
    try:
        assert bystander.poll() is None and dict(os.environ) == before
        assert not [file for file in host(session)._shared_files if Path(file).exists()]
        return alive(pids)
    finally:
        bystander.kill()
        bystander.wait()


def _abandoned(session: Session) -> Generator[None, None, Any]:
    """A generation that is left leaves nothing in the way of the next; the next, begun."""
    work = long_generation(session)
    started = time.monotonic()
    work.close()
    session.engine.release()
    assert time.monotonic() - started < FAULT_S
    session.wake()
    return long_generation(session)
