"""Long orders that are worked out for a few microbatches, against the same op by op."""

from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import check, schedules
from penstock.core.schedule.families import building_block, stretched

hanayo_family = import_module("penstock.core.schedule.families.bidirectional")
"""The module: the room has a function of the same name."""


def both(monkeypatch, name, p, m, fewest, **options):
    """The same schedule op by op and stretched."""
    built = []
    for many in (10**9, 0):
        with monkeypatch.context() as patch:
            for module in (building_block, hanayo_family):
                patch.setattr(module, "LONG", many)
            patch.setattr(stretched, "_FEWEST", fewest)
            built.append(schedules.build(name, num_ranks=p, num_microbatches=m, **options))
    return built


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@settings(max_examples=40)
@given(p=st.integers(1, 6), m=st.integers(1, 90), fewest=st.sampled_from([1, 2, 4, 8]))
def test_a_stretched_order_is_what_ranks_would_choose(name, p, m, fewest):
    with pytest.MonkeyPatch.context() as patch:
        by_ops, long = both(patch, name, p, m, fewest)
    assert long == by_ops
    assert long.name == by_ops.name == name


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_the_middle_is_found(monkeypatch, name, p):
    by_ops, long = both(monkeypatch, name, p, 12 * p + 17, 3 * p + 4)
    assert "ranks" not in vars(long)
    assert long == by_ops


@settings(max_examples=40)
@given(
    p=st.integers(1, 5),
    m=st.integers(1, 80),
    waves=st.integers(1, 3),
    fewest=st.sampled_from([1, 2, 4, 8]),
)
def test_stretched_waves_are_what_ranks_would_choose(p, m, waves, fewest):
    few = max(p, fewest)
    with pytest.MonkeyPatch.context() as patch:
        by_ops, long = both(patch, "hanayo", p, max(p, m), few, num_waves=waves)
    assert long == by_ops


@pytest.mark.parametrize(("p", "waves"), [(2, 1), (3, 1), (4, 1), (6, 1), (2, 2), (3, 2), (2, 3)])
def test_the_middle_of_waves_is_found(monkeypatch, p, waves):
    by_ops, long = both(monkeypatch, "hanayo", p, 19 * p + 13, 8 * p + 4, num_waves=waves)
    assert "ranks" not in vars(long)
    assert long == by_ops


@pytest.mark.parametrize("name", ["v-half", "v-min", "hanayo"])
def test_the_ops_of_a_large_schedule_are_not_made(name):
    schedule = schedules.build(name, num_ranks=8, num_microbatches=4_000)
    check(schedule, 1)
    assert "ranks" not in vars(schedule)
    assert schedule.num_ops == (4 if name == "hanayo" else 6) * 8 * 4_000
