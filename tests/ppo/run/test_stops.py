"""What a run has come to when it was asked to stop."""

import pytest

from ppo.run.signals import SignalWatch
from ppo.run.stops import STOPS, StopRequests


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_saves_nothing_is_never_preempted_and_would_begin_anew_for_ever(saves):
    outcomes = {}
    for code, reason in enumerate(STOPS):
        stops = StopRequests(
            SignalWatch(before_exit=lambda: None), folder=None, max_wall_time=None, saves=saves
        )
        stops.note(code)
        outcomes[reason] = stops.outcome
        is_final = not saves and STOPS[reason] == "preempted"
        assert stops.reason == reason + (", nothing is saved" if is_final else "")
    assert outcomes == {
        reason: "stopped" if outcome == "preempted" and not saves else outcome
        for reason, outcome in STOPS.items()
    }
    assert outcomes["SIGTERM"] == ("preempted" if saves else "stopped")
    assert outcomes["trainer.max_wall_time"] == outcomes["SIGTERM"]
