"""A bar for a long phase."""

from __future__ import annotations

import sys

from tqdm import tqdm


def progress_bar(label: str, *, enabled: bool) -> tqdm:
    """A bar for a long phase, from 0 to 1: `with progress_bar(...) as bar: bar.update(0.1)`.

    Shows on a terminal only, and on the rank that asks for it.
    """
    return tqdm(
        total=1.0,
        desc=label,
        bar_format="{desc}: {percentage:3.0f}% |{bar:40}| {elapsed}",
        leave=False,
        disable=not enabled or not sys.stderr.isatty(),
    )
