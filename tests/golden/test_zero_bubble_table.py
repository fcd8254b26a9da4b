"""Tables 5 and 6 of the zero-bubble paper (arXiv 2401.10241), to the digits it prints."""

from __future__ import annotations

import pytest

from benchmarks.planning.zero_bubble_table import SETTINGS, least_rate, rate, searched, sizes
from tests.kit.examples import more

EFFORT = {("1.5B", 24): 10, ("14.6B", 64): 3}
"""How long zb-auto has to look for ZB-2p; elsewhere the default is enough."""

rows = pytest.mark.parametrize("row", SETTINGS, ids=lambda row: f"{row.model}-{row.m}")


@rows
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_fixed_families_have_the_published_rates(row, name):
    assert round(rate(row, name), 4) == row.published[name]


@rows
def test_under_1p_the_search_finds_what_the_authors_found(row):
    # ZB-H1 keeps to this limit and is among the seeds; a longer search finds nothing better.
    assert round(rate(row, "zb-1p", effort=0), 4) <= row.published["zb-1p"]


@pytest.mark.parametrize(
    "row",
    [SETTINGS[1], more(SETTINGS[0]), *map(more, SETTINGS[2:])],
    ids=lambda row: f"{row.model}-{row.m}",
)
def test_under_2p_the_search_is_better_wherever_something_is_left(row):
    found = rate(row, "zb-2p", EFFORT.get((row.model, row.m), 1))
    published = row.published["zb-2p"]
    if round(least_rate(row), 4) == published:
        assert round(found, 4) == published
    else:
        assert found < published


def test_the_first_row_of_2p_leaves_nothing():
    """No order of 24 microbatches on 8 stages comes below what the authors print."""
    assert round(least_rate(SETTINGS[0]), 4) == SETTINGS[0].published["zb-2p"]


def test_the_limit_counts_what_stays_until_the_weight_gradient():
    row = SETTINGS[1]
    kept = sizes(row).kept_for_weight[0]
    assert kept == pytest.approx(0.3664, abs=1e-4)
    schedule = searched(row, limit=1, effort=0)
    from penstock.core.schedule.memory import peaks

    assert max(peaks(schedule.ranks, sizes(row))) <= row.p + 1e-9
