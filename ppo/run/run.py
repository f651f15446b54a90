"""A run: its folder, logs and status, and how all ranks stop or fail together.

Owns every decision to stop and every exchange of errors. Must not know what the phases compute.
Collective methods say so: all ranks call them in the same order.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from ppo.config import Config, ConfigError, Problem, to_yaml
from ppo.errors import InputError, StopRequested
from ppo.files import new_numbered, replace_text
from ppo.run.folder import (
    Outcome,
    add_log_handlers,
    lock_folder,
    read_status,
    record_start,
    remove_log_handlers,
    set_aside,
    write_status,
)
from ppo.run.limits import make_watchdog
from ppo.run.oom import OOM_FILE, is_out_of_memory, read_oom, with_smaller_budgets, write_oom
from ppo.run.progress import progress_bar
from ppo.run.signals import EXIT_INTERRUPTED, SignalWatch
from ppo.run.startup import StartClock
from ppo.run.status import Status
from ppo.run.stops import StopRequests, remove_old_files
from ppo.run.watchdog import Watchdog, is_of_communication
from sharding.agree import errors_by_rank, gather, raise_everywhere
from sharding.mesh import Mesh
from sharding.progress import PROGRESS

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Step = TypeVar("Step")
POLL_S = 2.0
"""seconds between two safe points of a pass over the batch, if its steps are shorter"""


class Run:
    """Context manager around everything between the process groups and the last log line.

    Leaving it writes status.json: finished; preempted, stopped or interrupted after a stop request
    (StopRequested is swallowed: the process ends well); failed with the reason of the rank that
    failed first, and the number of iterations that `status` was told last.

    Until `begin` the outcome of an earlier start stays, so that one which is refused costs nothing.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        *,
        command: Sequence[str],
        restart_count: int = 0,
        tell_launcher: Callable[[str], None] = lambda _: None,
        clock: StartClock | None = None,
    ) -> None:
        """
        Args:
            command: the command line, for the record.
            restart_count: TORCHELASTIC_RESTART_COUNT. Only a first start (0) obeys resume_mode
                disable and removes old STOP and PREEMPT files (`stops.remove_old_files`).
            tell_launcher: told, on one rank of a node, why its processes are ended.
            clock: of the start, begun before the process groups; None = begins here.
        """
        self.dir = config.run_dir
        self.mesh = mesh
        self._config = config
        self._command = command
        self._restart_count = restart_count
        self._tell_launcher = tell_launcher
        self._early_end = ""
        self._earlier: str | None = None
        """state that an earlier start has left"""
        self._status = Status(self.dir, mesh.rank)
        self.clock = StartClock() if clock is None else clock
        self._status.startup_s = self.clock.seconds
        self._halvings: dict[str, int] = {}
        """of token budgets, by earlier starts that ran out of memory"""
        self._owned = ExitStack()
        self._watchdog: Watchdog | None = None
        self._signals = SignalWatch(
            before_exit=lambda: self._fail("interrupted (Ctrl-C), not saved")
        )
        self._stops = StopRequests(
            self._signals,
            folder=self.dir if mesh.rank == 0 else None,
            max_wall_time=config.trainer.max_wall_time,
            saves=config.trainer.save_freq >= 0 or config.trainer.val_only,
        )

    @property
    def record(self) -> Path:
        """Where status, configuration, metrics and samples of this start go: the run folder, or
        with trainer.val_only, which changes nothing of the run, a new folder in it."""
        return self._status.folder

    @property
    def is_cause(self) -> bool:
        """This rank's failure is the run's."""
        return self._status.is_cause

    @property
    def is_restart(self) -> bool:
        """Whether torchrun has started the ranks again: this is the run's own continuation."""
        return self._restart_count > 0

    @property
    def exit_code(self) -> int:
        """Of a run that has not failed: 0, but 130 after Ctrl-C, as a shell's loop expects it."""
        return EXIT_INTERRUPTED if self._stops.outcome == "interrupted" else 0

    def __enter__(self) -> Run:
        """Collective. Raises ConfigError on all ranks when one cannot write to the folder."""
        PROGRESS.left_in = None  # of an earlier run in this process
        with ExitStack() as owned:
            self.attempt(lambda: self._open_folder(owned))
            mine = (self.record, self._earlier, f"watchdog/{uuid.uuid4().hex}")
            self._status.folder, self._earlier, name = gather(mine, self.mesh.host_group)[0]
            self._status.is_ours = self._earlier is None
            dog = make_watchdog(self._config, self.mesh, name, self._log, self._last_words)
            self._watchdog = owned.enter_context(dog)
            owned.enter_context(self._signals)
            self._owned = owned.pop_all()
        logger.info("run folder %s", self.dir)
        return self

    def _open_folder(self, owned: ExitStack) -> None:
        self.dir.mkdir(parents=True, exist_ok=True)
        handlers = add_log_handlers(self.dir, self.mesh.rank)
        owned.callback(remove_log_handlers, handlers)
        self._log = handlers[-1].stream
        if self.mesh.rank != 0:
            return
        owned.enter_context(lock_folder(self.dir))
        earlier = read_status(self.dir)
        if not self.is_restart:
            trains = not self._config.trainer.val_only
            remove_old_files(self.dir, earlier["state"] if earlier and trains else None)
        if earlier is not None and earlier["state"] == "running":  # and nobody holds the lock
            reason = "ended without a word: killed, or its machine was lost"
            write_status(self.dir, "failed", step=earlier["step"], reason=reason)
            logger.warning("the start before this one %s (after step %d)", reason, earlier["step"])
        if self._config.trainer.val_only:
            self._status.folder = new_numbered(self.dir / "validations", "")
        elif earlier is not None:
            self._earlier = earlier["state"]
        if self._earlier is None:
            write_status(self.record, "running", step=0, reason="")

    def _last_words(self, text: str, writes: bool, tells: bool) -> None:
        """By the watchdog, right before it ends this process."""
        logger.debug("ended: %s", text)
        if writes:
            self._status.write_failure(text)
        if tells:
            self._tell_launcher(text)

    def after_out_of_memory(self, config: Config) -> Config:
        """Collective: the configuration, with smaller token budgets where an earlier start of this
        run has left oom.json. Raises InputError on all ranks when they cannot be smaller."""
        anew = self._config.trainer.resume_mode == "disable" and not self.is_restart
        mine = read_oom(self.dir) if self.mesh.rank == 0 and not anew else None
        found = gather(mine, self.mesh.host_group)[0]
        if found is None:
            return config
        self._halvings = found["halvings"]
        return with_smaller_budgets(config, found, dp=self.mesh.dims.dp)

    def begin(self, *, step: int = 0, anew: bool = False) -> None:
        """Collective: this start is accepted, and from now on it writes the record.

        Call it when the configuration is known to fit what is resumed: config.yaml must not hold a
        change that is refused.

        Args:
            step: iterations done.
            anew: no checkpoint of this folder is resumed. What an earlier run has left is set
                aside, except by a restart by torchrun: then it was this run.
        """
        self.attempt(lambda: self._write_record(step, anew and not self.is_restart))
        self._status.step, self._status.is_ours = step, True
        logger.info("%s", self.clock)
        assert self._watchdog is not None
        self._watchdog.begin()

    def nothing_left(self, step: int) -> None:
        """Instead of `begin`: what was asked for is done, also where an earlier start was killed
        between its last checkpoint and its last word."""
        self._status.step = step
        if self._earlier != "finished":
            self._status.is_ours = True
            if self.mesh.rank == 0:
                self._status.write("running", "")

    def _write_record(self, step: int, anew: bool) -> None:
        if self.mesh.rank != 0:
            return
        if anew:
            starts_over = self._config.trainer.resume_mode == "disable"
            set_aside(self.record, also=(OOM_FILE,) if starts_over else ())
        replace_text(self.record / "config.yaml", to_yaml(self._config))
        record_start(
            self.record,
            command=self._command,
            world_size=self.mesh.dims.world_size,
            restart=self._restart_count,
        )
        startup_s = self.clock.seconds
        write_status(self.record, "running", step=step, reason="", startup_s=startup_s)

    def ends_early(self, reason: str) -> None:
        """What status.json says of a run that finishes before its last iteration."""
        self._early_end = reason

    def attempt(self, action: Callable[[], None]) -> None:
        """Collective: what goes wrong with the folder on any rank is a ConfigError on all."""
        error = None
        try:
            action()
        except InputError as exception:
            error = exception
        except OSError as exception:
            error = ValueError(f"run folder {self.dir}: {exception}")
        self.agree(error)

    def note_alarms(self, alarms: Mapping[str, str]) -> None:
        """What is the matter, by metric: status.json has it from now on (rank 0)."""
        if alarms != self._status.alarms:
            self._status.alarms = dict(alarms)
            self._status.note("running")

    def status(self, state: Outcome, step: int, reason: str = "") -> None:
        """Write status.json (rank 0), remember the step. A failure stays until the next start."""
        self._status.step = step
        self._status.note(state, reason)

    def should_stop(self) -> bool:
        """Collective, at a safe point: whether any rank has been asked to stop."""
        self._safe_point(0.0)
        return self._stops.code > 0

    def polled(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Collective: the steps, of which every rank has as many; safe points lie before some.

        An exchange among all ranks takes as long as a step where there are many, so it comes about
        every POLL_S seconds. Each one tells how long the slowest rank takes for a step, from which
        all ranks alike know how many steps there are to the next. Raises StopRequested.
        """
        pause, left, start = 1, 0, time.monotonic()
        for step in steps:
            if left == 0:
                slowest = self._safe_point((time.monotonic() - start) / pause)
                if self._stops.code:
                    self.raise_stop()
                pause = left = min(2 * pause, max(1, int(POLL_S / max(slowest, 1e-6))))
                start = time.monotonic()
            yield step
            left -= 1

    def _safe_point(self, seconds: float) -> float:
        """Collective: take note of stop requests; the most seconds of any rank."""
        PROGRESS.arrive()
        state = torch.tensor([self._stops.own(), seconds], dtype=torch.float64)
        dist.all_reduce(state, dist.ReduceOp.MAX, group=self.mesh.host_group)
        code, most = state.tolist()
        self._stops.note(int(code))
        return most

    def raise_stop(self) -> None:
        """Leave the phase after `should_stop` has said yes."""
        raise StopRequested(self._stops.reason)

    def poll(self, done: bool, error: str | None = None) -> bool:
        """Collective: whether every rank is done with what they wait for.

        Raises on all ranks alike:
            RuntimeError: a rank has passed an error; the message has each and its ranks.
            StopRequested: a stop is requested.
        """
        PROGRESS.arrive()
        state = torch.tensor([not done, error is not None, self._stops.own()], dtype=torch.int)
        dist.all_reduce(state, dist.ReduceOp.MAX, group=self.mesh.host_group)
        waiting, failed, code = state.tolist()
        if failed:
            raise_everywhere(error, self.mesh.host_group)
        self._stops.note(code)
        if code:
            self.raise_stop()
        return not waiting

    def agree(self, error: ValueError | None) -> None:
        """Collective: raise ConfigError on every rank if any rank has found bad input.

        The message holds each different text once: every node may have found the same.
        """
        if found := errors_by_rank(error, self.mesh.host_group):
            raise ConfigError([Problem("", None, text) for text in found]) from error

    def drive(
        self,
        work: Generator[object, None, Result],
        *,
        label: str = "",
        holds_collectives: bool = False,
    ) -> Result:
        """Collective: run `work` to its end on every rank, one step at a time, polls between.

        Returns what `work` returns on this rank.

        `work` yields about every half second. All ranks take their n-th step between the same two
        polls, so that a step may hold collectives, if the ranks that join them agree on the step.
        It is closed when it is abandoned. With a label, rank 0 shows a progress bar on a terminal;
        a float that `work` yields is the share that is done. A value other than the one before
        is progress.

        Args:
            holds_collectives: an exception ends this rank at once, and the watchdog the others:
                they may be in a collective of the same step, and would come to no poll.

        Raises:
            what `poll` does; an exception in `work` becomes a RuntimeError on every rank.
        """
        failure: Exception | None = None
        finished, result, last = False, None, None
        bar = progress_bar(label, enabled=label != "" and self.mesh.rank == 0)
        try:
            while True:
                if not finished:
                    try:
                        step = next(work)
                        if step != last:
                            PROGRESS.tick()
                            last = step
                        bar.update(step - bar.n if isinstance(step, float) else 0.0)
                    except StopIteration as end:
                        finished, result = True, end.value
                    except Exception as exception:  # raised again by poll, on every rank
                        if holds_collectives:
                            raise
                        failure, finished = exception, True
                bar.refresh()
                if self.poll(finished, _describe(failure)):
                    return cast("Result", result)
        except RuntimeError as gathered:
            if failure is None:
                raise
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
            self.note_failure(kind, exception, traceback)
            if self._watchdog is not None:
                self._watchdog.tell_others(self._status.failure)
            return False
        finally:
            self._owned.close()

    def note_failure(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write down what this rank fails of, where it strikes; to be pushed on an ExitStack.

        What is closed on the way out may fail too, or take its time. Where a rank was left waiting,
        the reason is who left it.
        """
        if exception is None or isinstance(exception, StopRequested) or self._status.failure:
            return
        self._note_memory(exception)
        text = str(_describe(exception))
        if self._watchdog is not None and is_of_communication(exception):
            text = self._watchdog.explained(text)
        # wrong input is said once, by whoever reports it to the user
        self._fail(text, level=_level_of(exception))
        logger.debug("failed", exc_info=exception)  # the file has the traceback of each rank

    def _note_memory(self, exception: BaseException) -> None:
        """Have the next start cut smaller micro-batches, where this rank's device is full."""
        if not (self._status.is_ours and is_out_of_memory(exception)):
            return
        try:
            write_oom(
                self.dir,
                self._config,
                self._halvings,
                dp=self.mesh.dims.dp,
                rank=self.mesh.rank,
                phase=(PROGRESS.left_in or "").rpartition("/")[2],
                tokens=PROGRESS.tokens,
            )
        except OSError as error:  # the failure itself must be said all the same
            logger.error("%s is not written: %s", OOM_FILE, error)

    def give_up(self, text: str) -> None:
        """From another thread: the main thread is in something that nothing can be raised out of.
        Ends this process, and the run, with that as the reason."""
        logger.error("%s", text)
        assert self._watchdog is not None
        self._watchdog.give_up(text)

    def _end_well(self) -> None:
        """Wait for the others: a rank that fails now must not find a good end already written."""
        try:
            dist.barrier(group=self.mesh.host_group)
        except RuntimeError as error:
            self.note_failure(type(error), error, error.__traceback__)
            raise
        reason, early = self._stops.reason, self._early_end
        self._status.note(self._stops.outcome, reason or early)
        said = f"stopped ({reason})" if reason else f"done ({early})" if early else "done"
        step = self._status.step  # an evaluation takes none
        logger.info("%s", f"{said} after step {step}" if step or reason else said)

    def _fail(self, reason: str, *, level: int = logging.ERROR) -> None:
        claim = (lambda _: True) if self._watchdog is None else self._watchdog.claim
        self._status.fail(reason, claim, level=level)


def _level_of(exception: BaseException) -> int:
    """DEBUG goes to the log file only."""
    return logging.DEBUG if isinstance(exception, InputError) else logging.ERROR


def _describe(exception: BaseException | None) -> str | None:
    return None if exception is None else f"{type(exception).__name__}: {exception}"
