"""Families from checkpoint to sampled tokens: right, or refused with the reason."""

import pytest

from tests.ppo.models.families import families
from tests.ppo.models.matrix import rows


def test_a_family_with_sinks_is_trained_packed_and_generates_as_transformers_scores():
    row = next(rows(["granite_swa"]))
    assert row[1:5] == ("packed", "yes", "own cache", "no"), row
    assert row.difference <= 1e-6


@pytest.mark.full
def test_no_family_of_transformers_ends_in_a_traceback_or_in_other_numbers():
    for row in rows(families()):
        assert "wrong" not in (row.trainer, row.engine), row
        assert row.reason or row.trainer in ("packed", "padded"), row
