"""Which metrics stand in which chart.

Owns the choice; a metric that no panel names is in the table of all metrics. Must not know how a
chart is drawn.
"""

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from ppo.report.charts import NUM_COLOURS, Line
from ppo.report.downsample import points_of
from ppo.report.record import Record, Series

MOST_LINES = 8
"""of a chart, over all runs"""


class Panel(NamedTuple):
    """A chart: its title and the metrics in it, as shell patterns."""

    title: str
    patterns: Sequence[str]


PANELS = (
    Panel("Reward", ("critic/score/mean", "critic/rewards/mean", "reward/greedy_score")),
    Panel("Reward: parts", ("reward/function_score", "reward/model_score", "reward/extra/*")),
    Panel("Validation: mean score", ("val-core/*/mean@*", "val-core/*/maj@*")),
    Panel("Validation: pass@k", ("val-core/*/pass@*",)),
    Panel("Validation: response length, tokens", ("val-aux/*/response_length/mean",)),
    Panel("KL to the reference", ("actor/ref_kl", "actor/reward_kl_penalty", "actor/kl_loss")),
    Panel("KL of the update", ("actor/ppo_kl_k3", "actor/ppo_kl")),
    Panel("KL coefficient", ("actor/kl_coef",)),
    Panel("Response length, tokens", ("response_length/mean", "response_length/max")),
    Panel("Share of responses cut by length", ("response_length/clip_ratio",)),
    Panel("Entropy, nats", ("actor/entropy",)),
    Panel("Explained variance of the values", ("critic/vf_explained_var",)),
    Panel("Clip share", ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_clipfrac")),
    Panel("Losses", ("actor/pg_loss", "critic/vf_loss")),
    Panel("Gradient norm", ("actor/grad_norm", "critic/grad_norm")),
    Panel("Learning rate", ("actor/lr", "critic/lr")),
    Panel("Trainer against engine", ("training/rollout_probs_diff_mean",)),
    Panel("Rejected by the rollout correction", ("rollout_corr/*fraction",)),
    Panel("Weights of the rollout correction", ("rollout_corr/eff*", "rollout_corr/is_m*")),
    Panel("Groups of responses", ("filter_groups/*",)),
    Panel("Factors of guards", ("guard/*factor*",)),
    Panel("Throughput, tokens/s of a device", ("perf/throughput",)),
    Panel("Utilisation", ("perf/mfu/*", "rollout/kv_util", "rollout/cache_hit")),
)
PHASES = (
    *("gen", "reshard", "release", "reward", "old_log_prob", "ref", "values", "adv"),
    *("update_critic", "update_actor"),
)
"""of timing_s, in the order of an iteration"""
INSIDE_GEN = ("reshard", "release")
OUTSIDE_STEP = ("testing", "save_checkpoint")


def lines_of(panel: Panel, records: Sequence[Record], most_points: int) -> list[Line]:
    """The curves of a panel: coloured by metric, or of several runs by run and dashed by metric."""
    names = matching(panel.patterns, records)[: max(2, MOST_LINES // len(records))]
    span = span_of(records)
    lines = []
    for run, record in enumerate(records):
        for number, name in enumerate(names):
            if name in record.series:
                points = points_of(record.series[name], most_points, span)
                if all(math.isnan(point.mean) for point in points):
                    continue
                several = len(records) > 1
                label = f"{record.label}: {_shortened(name)}" if several else _shortened(name)
                colour = (run if several else number) % NUM_COLOURS
                lines.append(Line(label, points, colour, number % 3 if several else 0))
    return lines


def matching(patterns: Iterable[str], records: Sequence[Record]) -> list[str]:
    """Metrics of any run, in the order of the patterns, each once."""
    known = sorted({name for record in records for name in record.series})
    found = [name for pattern in patterns for name in known if fnmatchcase(name, pattern)]
    return list(dict.fromkeys(found))


def time_lines(record: Record, most_points: int, span: tuple[int, int]) -> list[Line]:
    """Seconds of each phase of an iteration, to be stacked, with what none of them covers."""
    step = record.series.get("timing_s/step")
    if step is None:
        return []
    parts = {name: _filled(record.series.get(f"timing_s/{name}"), step) for name in PHASES}
    inside = [parts[name] for name in INSIDE_GEN]
    parts["gen"] = [max(0.0, x - sum(y)) for x, *y in zip(parts["gen"], *inside, strict=True)]
    sums = [sum(column) for column in zip(*parts.values(), strict=True)]
    parts["other"] = [max(0.0, x - y) for x, y in zip(step.values, sums, strict=True)]
    outside = {name: _filled(record.series.get(f"timing_s/{name}"), step) for name in OUTSIDE_STEP}
    parts |= outside
    used = {name: values for name, values in parts.items() if any(values)}
    return [
        Line(
            name,
            points_of(Series(step.steps, values), most_points, span),  # pyright: ignore[reportArgumentType]
            number,
        )
        for number, (name, values) in enumerate(used.items())
    ]


def memory_panel(record: Record) -> Panel:
    """Device memory by phase where it was measured, else that of the processes."""
    if any(name.startswith("memory_gib/") for name in record.series):
        return Panel("Device memory by phase, GiB", ("memory_gib/*",))
    names = ("perf/max_memory_allocated_gb", "perf/cpu_memory_used_gb")
    return Panel("Memory, GiB", names)


def span_of(records: Sequence[Record]) -> tuple[int, int]:
    """First and last step of all runs."""
    return min(r.first_step for r in records), max(r.last_step for r in records)


def _filled(series: Series | None, like: Series) -> list[float]:
    """The values at the steps of another series, 0 where there is none."""
    known = {} if series is None else dict(zip(series.steps, series.values, strict=True))
    values = (known.get(step, 0.0) for step in like.steps)
    return [0.0 if math.isnan(value) else value for value in values]


def _shortened(name: str) -> str:
    for prefix in ("actor/", "val-core/", "val-aux/", "timing_s/", "memory_gib/"):
        name = name.removeprefix(prefix)
    return name
