"""The report as a file that a browser opens, the dashboard, and what both are made of."""

import json
import math
from array import array
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ppo.report.__main__ import main
from ppo.report.charts import short
from ppo.report.downsample import grid_of, points_of
from ppo.report.page import LARGEST_BYTES, build_page
from ppo.report.record import Histogram, Series, load_record, load_records
from ppo.report.samples import choose, tokens_html
from ppo.report.watch import dashboard, sparkline
from tests.ppo.report.made_run import HOSTILE, make_run

VOID = {"meta", "input", "br", "img", "link"}


class Page(HTMLParser):
    """Elements in their order; fails where one is not closed as it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data) -> None:
        self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        make_run(folder / name, steps=120, num_extra=5, seed=seed)
        for seed, name in enumerate(("first", "second"))
    ]


@pytest.fixture(scope="module")
def page(runs) -> Page:
    text = build_page(load_records(runs))
    assert len(text.encode()) < LARGEST_BYTES
    return Page(text)


def test_the_page_needs_nothing_else_and_runs_no_script_but_its_own(page) -> None:
    assert len(page.named("script")) == 1
    assert not any(page.named(tag) for tag in ("img", "link", "iframe", "object", "b><"))
    for tag, attributes in page.elements:
        assert not any(name.startswith("on") or name == "src" for name in attributes), tag
        assert (attributes.get("href") or "#").startswith("#")
    (policy,) = (m["content"] for m in page.named("meta") if "http-equiv" in m)
    assert policy is not None and "default-src 'none'" in policy


def test_what_models_write_is_text(page) -> None:
    text = "".join(page.text)
    assert "<script>alert(1)</script>" in text and "<img src=x" in text and "\x1b" not in text
    assert "ValueError: <i>" in text and "gsm8k" in text and "<b>odd</b>" in text


def test_the_page_says_what_the_run_was(page) -> None:
    text = "".join(page.text)
    for word in ("Reward", "Validation: mean score", "KL to the reference", "Entropy, nats",
                 "Explained variance", "Clip share", "Seconds of an iteration by phase",
                 "Device memory by phase", "Response lengths", "Rewards", "best", "worst",
                 "random", "failed", "ended by stop", "config.yaml of first"):  # fmt: skip
        assert word in text, word
    assert text.count("trainer.seed") == 1 and "trainer.seed01" in text  # the values of both runs
    classes = {name for i in page.named("i") for name in (i.get("class") or "").split()}
    assert {name[0] for name in classes} == {"k", "m", "p", "n"}


def test_guards_alarms_failures_and_odd_numbers_are_events(runs) -> None:
    found = {event.text: (event.first, event.last) for event in load_record(runs[0]).events}
    assert found == {
        "reward/failed above 0": (7, 9),
        "critic/vf_loss is not finite": (30, 30),
        "guard/skip_update = 1": (40, 40),
        "guard/lr_factor = 0.5": (61, 120),
        "alarm ref_kl: 0.2 > 0.1": (120, 120),
    }


def test_a_guard_that_acts_again_is_one_event_for_each_run_of_steps(tmp_path) -> None:
    taken = {3: 1, 4: 1, 5: 2, 8: 2}  # steps without it have no such number
    rows = [{"step": s} | ({"guard/skip_update": taken[s]} if s in taken else {"x": 0.0})
            for s in range(1, 10)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    events = load_record(tmp_path).events
    assert [(e.first, e.last, e.count, e.text[-1]) for e in events] == [
        (3, 4, 2, "1"),
        (5, 5, 1, "2"),
        (8, 8, 1, "2"),
    ]


def test_a_page_of_many_runs_stays_small(runs) -> None:
    records = load_records(runs) * 4
    assert len(build_page(records).encode()) < LARGEST_BYTES


def test_the_command_writes_the_page_and_refuses_what_is_no_run(runs, tmp_path, caplog) -> None:
    caplog.set_level("INFO", "ppo.report")
    assert main([str(runs[0]), "--out", str(tmp_path / "deep" / "r.html")]) == 0
    assert (tmp_path / "deep" / "r.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main([str(tmp_path), "--out", str(tmp_path / "r.html")]) == 2
    assert "no run with metrics" in caplog.text and not (tmp_path / "r.html").exists()
    assert main([str(runs[0].parent)]) == 2 and "there is" in caplog.text
    assert main([str(tmp_path / "none")]) == 2 and "no such folder" in caplog.text


def test_a_run_of_one_row_and_nothing_else_is_shown(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val-core/x/reward/mean@1": 0.5}\n')
    Page(build_page(load_records([tmp_path])))
    assert "step 0" in dashboard(tmp_path, width=80, height=24)


def test_rows_that_are_none_are_left_out_and_the_last_word_on_a_step_counts(tmp_path) -> None:
    lines = ['{"step": 2, "a": 1}', "null", '{"step": "3", "a": 9}', '{"a": 1}', "x",
             '{"step": 3, "a": null, "b": "text", "c": [1], "d": true}', '{"step": 2, "a": 5}',
             '{"step": 4, "a"']  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "status.json").write_text("[")
    record = load_record(tmp_path)
    assert list(record.series) == ["a"]
    assert list(record.series["a"].steps) == [2, 3] and record.series["a"].values[0] == 5
    assert math.isnan(record.series["a"].last) and record.status == {}


def test_points_keep_spikes_and_gaps() -> None:
    series = Series(array("q", range(1, 1001)), array("d", [1.0] * 1000))
    series.values[500], series.values[501] = 99.0, math.nan
    points = points_of(series, 100, (1, 1000))
    assert len(points) == 100 and max(p.high for p in points) == 99.0
    spike = next(p for p in points if p.high == 99.0)
    assert (spike.low, spike.mean) == (1.0, (99 + 8) / 9)  # ten steps, one not finite
    few = Series(array("q", [1, 2, 9]), array("d", [1.0, math.nan, 3.0]))
    assert [p.step for p in points_of(few, 100, (1, 10))] == [1, 2, 9]
    assert math.isnan(points_of(few, 100, (1, 10))[1].mean)


def test_a_grid_holds_all_values_where_they_lie() -> None:
    grid = grid_of([Histogram(1, 0.0, 4.0, [2, 0, 0, 2]), Histogram(2, 4.0, 4.0, [5, 0])], 10, 8)
    assert (grid.low, grid.high, grid.span) == (0.0, 4.0, (1, 2))
    first, second = grid.shares
    assert first == pytest.approx([0.25, 0.25, 0, 0, 0, 0, 0.25, 0.25])
    assert second == pytest.approx([0, 0, 0, 0, 0, 0, 0, 1])


def test_best_worst_and_failed_samples_are_chosen_once() -> None:
    rows = [{"score": s, "id": i} for i, s in enumerate([0.5, 1.0, None, 0.0, 0.5])]
    rows[2]["failure"] = "error"
    chosen = [(shown.why, shown.row["id"]) for shown in choose(rows, 1)]
    assert chosen[:2] == [("best", 1), ("worst", 3)] and chosen[3] == ("failed", 2)
    assert chosen[2][0] == "random" and chosen[2][1] in (0, 4)
    assert [shown.why for shown in choose(rows[:1], 1)] == ["best"] and not list(choose([], 1))


def test_tokens_are_shaded_by_their_share_of_the_largest() -> None:
    tokens = {"text": ["a", "<", "c"], "kl": [0.6, -0.1, 0.0], "advantage": [-3.0, 3.0, None]}
    assert tokens_html(tokens, 2) == (
        '<i class="k6 n6" title="KL 0.6, A -3">a</i><i class="m1 p6" title="KL -0.1, A 3">&lt;</i>'
        "<u> ... 1 tokens more</u>"
    )
    assert tokens_html({"text": ["a"], "kl": [1, 2]}, 9) == "<i>a</i>"
    assert tokens_html({"text": None}, 9) == ""


def test_the_dashboard_is_one_screen_of_text(runs) -> None:
    lines = dashboard(runs[0], width=100, height=45).splitlines()
    assert len(lines) <= 44 and all(len(line) <= 100 for line in lines)
    text = "\n".join(lines)
    assert text.isprintable() or all(line.isprintable() for line in lines)
    for word in ("running", "step 120 of 120", "reward", "val gsm8k", "update_actor", "memory, GiB",
                 "alarm ref_kl", "train sample of step 120"):  # fmt: skip
        assert word in text, word
    assert HOSTILE not in text
    assert all(len(line) <= 40 for line in dashboard(runs[0], width=40, height=10).splitlines())


def test_the_summary_draws_validations_as_bars(tmp_path, capsys) -> None:
    rows = [
        {"step": 0, "val-core/sums/reward/mean@1": 0.2},
        {"step": 1, "critic/score/mean": 0.1},
        {"step": 2, "critic/score/mean": 0.4, "val-core/sums/reward/mean@1": 0.8},
        {"step": 3, "critic/score/mean": 0.3, "val-core/sums/reward/mean@1": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "status.json").write_text('{"state": "failed", "reason": "no\\u001b[31m memory"}')
    assert main([str(tmp_path), "--summary"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"run {tmp_path}: failed after step 3: no·[31m memory",
        "",
        "validation, sums/reward/mean@1",
        "  step      0     0.200  " + "█" * 10,
        "  step      2     0.800  " + "█" * 40,
        "  step      3       nan",
        "",
        "sampled reward      ▁█▆  0.1 to 0.3",
    ]


def test_a_sparkline_by_hand() -> None:
    assert sparkline([0, 7, math.nan, 3.5, 1]) == "▁█ ▅▂"
    assert sparkline([2, 2]) == "▁▁" and sparkline([math.nan]) == " "


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (12345, "12.3k"), (-2.5e9, "-2.5G"), (0, "0"), (1234.5, "1234"),
     (1e-6, "1e-06"), (2e15, "2e+15"), (math.nan, "nan"), (1e6, "1M")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_what_the_trainer_writes_is_read(tmp_path) -> None:
    from ppo.tracking.tracker import Tracker

    with Tracker(tmp_path, enabled=True, loggers=["jsonl"]) as tracker:
        tracker.log(1, {"critic/score/mean": 0.5, "actor/grad_norm": math.inf})
        tracker.histogram(1, "score", [0.0, 1.0])
        tracker.samples(1, [{"prompt": "p", "score": 1.0}], split="train", num_text=1)
    record = load_record(tmp_path)
    assert record.series["critic/score/mean"].last == 0.5
    assert record.histograms["score"][0].counts[0] == 1
    assert [event.text for event in record.events] == ["actor/grad_norm is not finite"]
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["actor/grad_norm"] is None
