"""A run: its folder, logs and status, and how all ranks stop or fail together.

Owns every decision to stop and every exchange of errors. Must not know what the phases compute.
Collective methods say so: all ranks call them in the same order.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from ppo.config import Config, ConfigError, Problem, to_yaml
from ppo.errors import InputError
from ppo.run.folder import (
    Outcome,
    add_log_handlers,
    lock_folder,
    read_status,
    record_start,
    remove_log_handlers,
    set_aside,
    write_atomically,
    write_status,
)
from ppo.run.progress import progress_bar
from ppo.run.signals import SignalWatch
from sharding.agree import errors_by_rank, raise_everywhere
from sharding.mesh import Mesh

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
# Index = code that is all-reduced by maximum; 0: go on.
STOP_REASONS = ("", "SIGTERM", "SIGUSR1", "STOP file", "trainer.max_wall_time")


class StopRequested(Exception):
    """The run is to stop now and be resumed later; raised on every rank at once."""


class Run:
    """Context manager around everything between the process groups and the last log line.

    Leaving it writes status.json: finished; preempted after a stop request (StopRequested is
    swallowed: the process ends with 0); failed with the reason of the rank that failed first.
    `step` is what the status reports: keep it at the number of iterations done.
    """

    def __init__(
        self, config: Config, mesh: Mesh, *, command: Sequence[str], restart_count: int = 0
    ) -> None:
        """
        Args:
            command: the command line, for the record.
            restart_count: TORCHELASTIC_RESTART_COUNT. Only a first start (0) obeys resume_mode
                disable and removes an old STOP file.
        """
        self.dir = config.run_dir
        self.mesh = mesh
        self.step = 0
        self._config = config
        self._command = command
        self._restart_count = restart_count
        self._started = time.monotonic()
        self._stop_code = 0
        self._owned = ExitStack()
        self._signals = SignalWatch(before_exit=lambda: self._fail("interrupted (Ctrl-C)"))

    @property
    def resume_mode(self) -> str:
        """trainer.resume_mode, but auto where a restart finds checkpoints of this run."""
        restarted = self._restart_count > 0 and (self.dir / "checkpoints").is_dir()
        return "auto" if restarted else self._config.trainer.resume_mode

    def __enter__(self) -> Run:
        """Collective. Raises ConfigError on all ranks when one cannot write to the folder."""
        with ExitStack() as owned:
            error = None
            try:
                self._open_folder(owned)
            except InputError as exception:
                error = exception
            except OSError as exception:
                error = ValueError(f"run folder {self.dir}: {exception}")
            self.agree(error)
            owned.enter_context(self._signals)
            self._owned = owned.pop_all()
        logger.info("run folder %s", self.dir)
        return self

    def _open_folder(self, owned: ExitStack) -> None:
        self.dir.mkdir(parents=True, exist_ok=True)
        owned.callback(remove_log_handlers, add_log_handlers(self.dir, self.mesh.rank))
        if self.mesh.rank != 0:
            return
        owned.enter_context(lock_folder(self.dir))
        if self._restart_count == 0:
            (self.dir / "STOP").unlink(missing_ok=True)
            if self._config.trainer.resume_mode == "disable":
                set_aside(self.dir / "checkpoints")
        if self.resume_mode == "disable" or not (self.dir / "config.yaml").exists():
            self.save_config()
        record_start(
            self.dir,
            command=self._command,
            world_size=self.mesh.dims.world_size,
            restart=self._restart_count,
        )
        write_status(self.dir, "running", step=0, reason="")

    def save_config(self) -> None:
        """Write config.yaml, resolved (rank 0).

        A start in a folder that holds one leaves it alone: call this once the resume has accepted
        what changed, so that a refused change is not what the next start is compared with.
        """
        if self.mesh.rank == 0:
            write_atomically(self.dir / "config.yaml", to_yaml(self._config))

    def status(self, state: Outcome, step: int, reason: str = "") -> None:
        """Write status.json (rank 0), remember the step. A failure stays until the next start."""
        self.step = step
        if self.mesh.rank == 0 and not self._has_failed():
            write_status(self.dir, state, step=step, reason=reason)

    def should_stop(self) -> bool:
        """Collective, at a safe point: whether any rank has been asked to stop."""
        code = torch.tensor(self._own_stop_code())
        dist.all_reduce(code, dist.ReduceOp.MAX, group=self.mesh.host_group)
        self._note_stop(int(code))
        return self._stop_code > 0

    def raise_stop(self) -> None:
        """Leave the phase after `should_stop` has said yes."""
        raise StopRequested(STOP_REASONS[self._stop_code])

    def poll(self, done: bool, error: str | None = None) -> bool:
        """Collective: whether every rank is done with what they wait for.

        Raises on all ranks alike:
            RuntimeError: a rank has passed an error; the message has each and its ranks.
            StopRequested: a stop is requested.
        """
        state = torch.tensor([not done, error is not None, self._own_stop_code()], dtype=torch.int)
        dist.all_reduce(state, dist.ReduceOp.MAX, group=self.mesh.host_group)
        waiting, failed, code = state.tolist()
        if failed:
            raise_everywhere(error, self.mesh.host_group)
        self._note_stop(code)
        if code:
            self.raise_stop()
        return not waiting

    def agree(self, error: ValueError | None) -> None:
        """Collective: raise ConfigError on every rank if any rank has found bad input.

        The message holds each different text once: every node may have found the same.
        """
        if found := errors_by_rank(error, self.mesh.host_group):
            raise ConfigError([Problem("", None, text) for text in found]) from error

    def drive(self, work: Generator[object, None, Result], *, label: str = "") -> Result:
        """Collective: run `work` to its end on every rank, one step at a time, polls between.

        Returns what `work` returns on this rank.

        `work` yields about every half second. All ranks take their n-th step between the same two
        polls, so that a step may hold collectives, if the ranks that join them agree on the step.
        It is closed when it is abandoned. With a label, rank 0 shows a progress bar on a terminal;
        a float that `work` yields is the share that is done.

        Raises:
            what `poll` does; an exception in `work` becomes a RuntimeError on every rank.
        """
        failure: Exception | None = None
        finished, result = False, None
        bar = progress_bar(label, enabled=label != "" and self.mesh.rank == 0)
        try:
            while True:
                if not finished:
                    try:
                        step = next(work)
                        bar.update(step - bar.n if isinstance(step, float) else 0.0)
                    except StopIteration as end:
                        finished, result = True, end.value
                    except Exception as exception:  # raised again by poll, on every rank
                        failure, finished = exception, True
                bar.refresh()
                if self.poll(finished, _describe(failure)):
                    return cast("Result", result)
        except RuntimeError as gathered:
            raise gathered from failure
        finally:
            bar.close()
            work.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        try:
            if exception is None or isinstance(exception, StopRequested):
                self._end_well()
                return True
            interrupted = isinstance(exception, KeyboardInterrupt)
            reason = "interrupted (Ctrl-C)" if interrupted else str(_describe(exception))
            # wrong input is said once, by whoever reports it to the user
            self._fail(reason, level=_level_of(exception))
            logger.debug("failed", exc_info=exception)  # the file has the traceback of each rank
            return False
        finally:
            self._owned.close()

    def _end_well(self) -> None:
        """Wait for the others: a rank that fails now must not find a good end already written."""
        try:
            dist.barrier(group=self.mesh.host_group)
        except RuntimeError as error:
            self._fail(f"another rank has gone: {error}")
            raise
        reason = STOP_REASONS[self._stop_code]
        self.status("preempted" if reason else "finished", self.step, reason)
        logger.info("%s after step %d", f"stopped ({reason})" if reason else "done", self.step)

    def _fail(self, reason: str, *, level: int = logging.ERROR) -> None:
        """Write the failure, from whichever rank it struck; what struck first stays."""
        if not self._has_failed():
            write_status(
                self.dir, "failed", step=self.step, reason=f"rank {self.mesh.rank}: {reason}"
            )
            logger.log(level, "failed at step %d: %s", self.step, reason)

    def _has_failed(self) -> bool:
        status = read_status(self.dir)
        return status is not None and status["state"] == "failed"

    def _own_stop_code(self) -> int:
        if self._signals.stop_signal is not None:
            return STOP_REASONS.index(self._signals.stop_signal)
        if self.mesh.rank == 0 and os.path.exists(self.dir / "STOP"):
            return STOP_REASONS.index("STOP file")
        limit = self._config.trainer.max_wall_time
        if limit is not None and time.monotonic() - self._started >= limit:
            return STOP_REASONS.index("trainer.max_wall_time")
        return 0

    def _note_stop(self, code: int) -> None:
        if code and not self._stop_code:
            logger.info("stop requested by %s", STOP_REASONS[code])
        self._stop_code = max(code, self._stop_code)


def _level_of(exception: BaseException) -> int:
    """DEBUG goes to the log file only."""
    return logging.DEBUG if isinstance(exception, InputError) else logging.ERROR


def _describe(exception: BaseException | None) -> str | None:
    return None if exception is None else f"{type(exception).__name__}: {exception}"
