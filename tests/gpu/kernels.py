"""The tests that need a GPU, the head's kernel, and the embedded engine beside transformers'."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sharding.mesh import init_distributed
from tests.benchmarks.bench_generate import compare_engines
from tests.benchmarks.bench_logprobs import head_works
from tests.benchmarks.measure import fastest, peak_mib
from tests.gpu.parts import Options, Row
from tests.gpu.shapes import model_folder

TESTS = Path(__file__).parents[1]


class _Outcomes:
    """A plugin of pytest: what came of each test."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[tuple[str, str]] = []
        self.slowest: list[tuple[float, str]] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.counts["collected"] = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
            self.slowest.append((report.duration, report.nodeid))
        if report.failed:
            self.failed.append((report.nodeid, str(report.longrepr).strip().splitlines()[-1]))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append((report.nodeid, str(report.longrepr).strip().splitlines()[-1]))


def run_gpu_tests(options: Options) -> Iterator[Row]:
    """Tests marked `gpu`, those of SGLang left out; a dry run collects those of sharding/ alone."""
    mark = "mark." + "gpu"
    files = [path for path in TESTS.rglob("test_*.py") if mark in path.read_text(encoding="utf-8")]
    files = sorted(path for path in files if "sglang" not in path.parts)
    if options.dry:
        files = [path for path in files if path.parent.name == "sharding"]
    outcomes = _Outcomes()
    words = ["-q", "-m", "gpu and not sglang and not full", "-p", "no:cacheprovider"]
    words += ["-p", "no:timeout"]  # which may not be installed; this part has a limit of its own
    words += ["--rootdir", str(TESTS.parent), *map(str, files)]
    code = pytest.main([*(["--collect-only"] if options.dry else []), *words], plugins=[outcomes])
    for name, last in outcomes.failed:
        yield {"test": name.removeprefix("tests/"), "outcome": "failed", "why": last}
    for duration, name in sorted(outcomes.slowest, reverse=True)[:5]:
        yield {"test": name, "outcome": "took", "why": f"{duration:.1f} s"}
    yield {"test": "all", "outcome": ", ".join(f"{v} {k}" for k, v in outcomes.counts.items())}
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"pytest ended with {code!r}")


def measure_head(options: Options) -> Iterator[Row]:
    """Log-probs in blocks beside full logits: forward and backward of the head alone."""
    device = options.device
    for tokens in options.pick((4096, 16384), (32,)):
        sizes = options.pick({}, {"vocab": 512, "hidden": 64})
        works = head_works(tokens, device, **sizes)
        peaks = {name: peak_mib(work, device) for name, work in works.items()}
        times = fastest(works, device, options.pick(5, 1))
        yield {
            "tokens": tokens,
            **{f"{name}_ms": round(1000 * s, 2) for name, s in times.items()},
            **{f"{name}_mib": round(mib, 1) for name, mib in peaks.items()},
            "time_ratio": round(times["chunked"] / times["full"], 3),
            "peak_ratio": round(peaks["chunked"] / peaks["full"], 3),
        }


def measure_generation(options: Options) -> Iterator[Row]:
    """Tokens/s of the embedded engine and of transformers' generate, at the same lengths."""
    from transformers import AutoModelForCausalLM

    shape = options.pick("Qwen/Qwen2.5-0.5B", "tiny")
    dtype = options.pick("bfloat16", "float32")
    folder = model_folder(shape, options.folder, options.device)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model = model.to(options.device).eval()
    with init_distributed(options.device):
        for batch in options.pick((64, 256), (4,)):
            found = compare_engines(
                model,
                device=options.device,
                dtype=dtype,
                batch=batch,
                max_new_tokens=options.pick(128, 8),
                repeats=1,
            )
            yield {
                "batch": batch,
                "mean_length": round(found.mean_length, 1),
                "longest": found.longest,
                "engine_tokens_per_s": round(found.engine, 1),
                "transformers_tokens_per_s": round(found.transformers, 1),
                "ratio": round(found.ratio, 2),
            }
