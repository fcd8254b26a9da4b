"""Long orders that are worked out for a few microbatches, against the same op by op."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import check, schedules
from penstock.schedule.families import building_block, layout


def both(monkeypatch, name, p, m, fewest):
    """The same schedule op by op and stretched."""
    built = []
    for many in (10**9, 0):
        with monkeypatch.context() as patch:
            for module in (building_block, layout):
                patch.setattr(module, "MANY_OPS", many)
            patch.setattr(building_block, "_FEWEST", fewest)
            built.append(schedules.build(name, num_ranks=p, num_microbatches=m))
    return built


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@settings(max_examples=40)
@given(p=st.integers(1, 6), m=st.integers(1, 90), fewest=st.sampled_from([1, 2, 4, 8]))
def test_a_stretched_order_is_what_ranks_would_choose(name, p, m, fewest):
    with pytest.MonkeyPatch.context() as patch:
        by_ops, stretched = both(patch, name, p, m, fewest)
    assert stretched == by_ops
    assert stretched.name == by_ops.name == name


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_the_middle_is_found(monkeypatch, name, p):
    by_ops, stretched = both(monkeypatch, name, p, 12 * p + 17, 3 * p + 4)
    assert "ranks" not in vars(stretched)
    assert stretched == by_ops


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_millions_of_ops_are_not_reordered_one_by_one(name):
    schedule = schedules.build(name, num_ranks=8, num_microbatches=20_000)
    check(schedule, 1)
    assert "ranks" not in vars(schedule)
    assert schedule.num_ops == 6 * 8 * 20_000
