"""What is wrong with the training rows as a whole: too few for a batch, or a mix that is of others.

Owns what takes reading many rows, which `--check` does and a start leaves to the loading of its
data. Says only what is sure: files that are absent, or too large to be read in seconds, pass.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice
from pathlib import Path

from ppo.config import Config, Problem
from ppo.data.columns import NO_SOURCE, is_tiny
from ppo.data.facts import Kind, kinds_by_name
from ppo.data.rows import JSON_LINES, DataError, find_files, read_rows
from ppo.data.tiny import tiny_rows

MOST_BYTES = 1 << 26
"""of JSONL files that are read whole, for data.mix: about a second"""


def row_problems(config: Config) -> list[Problem]:
    """What a start would refuse of the rows that are here, besides what is wrong inside of one."""
    data = config.data
    if data.custom_cls.path is not None:
        return []
    batch_key = "train_batch_size"
    if config.algorithm.filter_groups.enable:
        batch_key = "gen_batch_size"
    batch = getattr(data, batch_key)
    try:
        kinds = _count_kinds(config, most=None if data.mix else batch)
    except DataError as error:
        if error.row is None:  # absent, empty: said where files are looked at
            return []
        return [Problem("data.train_files", None, str(error))]
    if kinds is None:
        return []
    usable = sum(kinds.values())
    if data.mix:
        try:
            meant = kinds_by_name(list(kinds), data.mix)
        except DataError as error:
            return [Problem(error.file, None, error.problem)]
        numbers = [n for name, found in meant.items() if data.mix[name] > 0 for n in found]
        usable = sum(list(kinds.values())[number] for number in numbers)
    if usable < (batch if data.drop_last else 1):
        rule = f"hold {usable} rows to draw from, fewer than data.{batch_key} = {batch}"
        fix = "add data, lower it, or set data.drop_last=false"
        return [Problem("data.train_files", data.train_files, rule, fix)]
    return []


def _count_kinds(config: Config, *, most: int | None) -> Counter[Kind] | None:
    """How many rows there are of each kind, of the first `most`; None where that takes too long."""
    data, limits = config.data, [n for n in (most, config.data.train_max_samples) if n and n > 0]
    if is_tiny(data.train_files):
        rows = ((Path("tiny"), row) for row in tiny_rows("train", data.seed))
    else:
        files = find_files(data.train_files)
        sizes = [file.stat().st_size for file in files if file.suffix.lower() in JSON_LINES]
        if most is None and sum(sizes) > MOST_BYTES:
            return None
        columns = [data.reward_fn_key]
        found = chain.from_iterable(read_rows(file, columns=columns) for file in files)
        rows = ((row.file, row.values) for row in found)
    rows = islice(rows, min(limits)) if limits else rows
    return Counter(
        Kind(str(file), str(values.get(data.reward_fn_key) or NO_SOURCE)) for file, values in rows
    )
