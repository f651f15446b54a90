"""Who may write what a run has failed of."""

import logging

from ppo.run.folder import read_status, write_status
from ppo.run.status import Status


def test_a_failure_that_is_written_down_stays_where_the_store_cannot_say_who_was_first(
    tmp_path, caplog
):
    mine, other = Status(tmp_path, 0), Status(tmp_path, 1)
    mine.is_ours = other.is_ours = True
    other.fail("Injected: no room", lambda _: True, level=logging.ERROR)
    mine.fail("Connection closed", lambda _: True, level=logging.ERROR)  # nobody has answered
    assert other.is_cause and not mine.is_cause
    assert read_status(tmp_path)["reason"] == "rank 1: Injected: no room"  # type: ignore[index]
    said = [r.getMessage() for r in caplog.records if r.levelno > logging.DEBUG]
    assert said == ["failed at step 0: rank 1: Injected: no room"]  # the log file has the other


def test_a_failure_of_an_earlier_start_does_not_hide_that_of_a_start_that_is_refused(tmp_path):
    write_status(tmp_path, "failed", step=3, reason="rank 0: before")
    mine = Status(tmp_path, 0)
    mine.fail("wrong", lambda _: True, level=logging.ERROR)
    assert mine.is_cause
    assert read_status(tmp_path)["reason"] == "rank 0: before"  # type: ignore[index]
