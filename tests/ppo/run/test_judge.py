"""The rules of the judge, with a clock and signs by hand."""

from ppo.run.judge import Judge, Sign, Verdict


def sign(number: int, *, done: int = 0, place: int = 0, phase: str = "gen", rank: int = 0) -> Sign:
    return Sign(number, done, place, phase, 100 + rank, "node")


def judge_of(*ranks: int, **limits: float) -> Judge:
    judge = Judge(limit_s=20, silence_s=10, suspect_s=6, limit_of_phase=limits)
    judge.hear(0.0, {rank: sign(1, rank=rank) for rank in ranks})
    return judge


def test_a_rank_that_says_nothing_new_is_named_with_process_and_phase_after_the_silence():
    judge = judge_of(0, 1)
    for now in range(1, 13):
        assert judge.verdict(now - 0.5, moving=True) is None or now > 11
        judge.hear(now, {0: sign(1 + now, phase="update_actor"), 1: sign(1 + now // 8)})
    # rank 1's last new sign came at 8
    assert judge.verdict(17.9, moving=False) is None
    assert judge.suspects(13.9) is None
    assert "for 6 s from rank 1 (" in (judge.suspects(14.0) or "")
    judge.hear(18.0, {0: sign(20, phase="update_actor")})
    verdict = judge.verdict(18.0, moving=False)
    assert verdict == Verdict(
        "no sign of life for 10 s from rank 1 (process 100 on node, in gen): stopped, gone, or its "
        "machine is lost; the others are in update_actor",
        [1],
    )


def test_where_nothing_moves_a_rank_that_is_silent_for_less_is_the_cause():
    judge = judge_of(0, 1)
    for now in range(1, 15):
        judge.hear(now, {0: sign(1 + now), 1: sign(1 + now, rank=1)})
    for now in range(15, 21):
        judge.hear(now, {0: sign(1 + now)})
    assert judge.verdict(20.0, moving=False) is None
    verdict = judge.verdict(20.0, moving=True)
    assert verdict is not None and verdict.silent == [1]
    assert verdict.text.startswith("no sign of life for 6 s from rank 1 (process 101 ")


def test_what_moves_anywhere_is_progress_everywhere():
    judge = judge_of(0, 1)
    for now in range(1, 60):
        judge.hear(now, {0: sign(now + 1), 1: sign(now + 1, done=now // 15)})
        assert judge.verdict(now, moving=True) is None
    judge.hear(64.9, {0: sign(70), 1: sign(70, done=3)})
    assert judge.verdict(64.9, moving=True) is None
    judge.hear(65.0, {0: sign(71), 1: sign(71, done=3)})
    assert judge.verdict(65.0, moving=False) is None
    assert judge.verdict(65.0, moving=True) is not None


def test_who_is_behind_is_named_and_nobody_where_all_stand_together():
    judge = judge_of(0, 1, 2)
    places = {0: 7, 1: 6, 2: 7}
    judge.hear(5.0, {r: sign(2, done=1, place=p, rank=r) for r, p in places.items()})
    for number, now in enumerate((14.0, 23.0, 25.0), start=3):
        judge.hear(now, {r: sign(number, done=1, place=p, rank=r) for r, p in places.items()})
    verdict = judge.verdict(25.0, moving=True)
    assert verdict is not None and verdict.silent == []
    assert verdict.text == (
        "nothing has moved for 20 s: the others wait for rank 1 (process 101 on node, in gen)"
    )
    together = {r: sign(9, done=1, place=7, phase="update_actor") for r in places}
    judge.hear(26.0, together)
    verdict = judge.verdict(26.0, moving=True)
    assert verdict is not None
    assert verdict.text.endswith("all ranks stand at the same point, in update_actor")


def test_of_the_limits_of_nested_phases_the_shortest_counts():
    judge = judge_of(0, testing=30.0, reward_model=6.0)
    judge.hear(1.0, {0: sign(2, phase="testing/gen")})
    judge.hear(20.5, {0: sign(3, phase="testing/gen")})
    assert judge.verdict(29.9, moving=True) is None
    judge.hear(30.0, {0: sign(4, phase="testing/gen")})
    assert judge.verdict(30.0, moving=True) is not None
    judge.hear(30.0, {0: sign(5, done=1, phase="step/reward/reward_model")})
    assert judge.verdict(35.9, moving=True) is None
    assert judge.verdict(36.0, moving=True) is not None


def test_a_phase_may_have_a_shorter_limit_and_a_listener_that_was_stopped_counts_anew():
    judge = judge_of(0, 1, update_actor=6.0)
    judge.hear(4.0, {0: sign(2, phase="update_actor"), 1: sign(2)})
    assert judge.verdict(5.0, moving=True) is None
    judge.hear(6.0, {0: sign(3, phase="update_actor"), 1: sign(3)})
    assert judge.verdict(6.0, moving=True) is not None
    judge.forgive(500.0)  # Ctrl-Z, and hours later fg
    assert judge.verdict(505.0, moving=True) is None
    assert judge.verdict(506.0, moving=True) is not None
    assert judge.verdict(510.0, moving=False) is not None  # and now all are silent
