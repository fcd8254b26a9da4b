"""Between groups of different sizes every number goes to whom it belongs, once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.tensor.group import bounds
from penstock.engine.tensor.unequal_groups import receivers, senders, slices

counts = st.integers(1, 6)


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), num_targets=counts)
def test_slices_are_the_targets_parts_and_have_everything_once(lengths, num_targets):
    starts = [sum(lengths[:source]) for source in range(len(lengths))]
    got = {target: [] for target in range(num_targets)}
    order = []
    for source, target, within in slices(lengths, num_targets):
        assert 0 <= within.start <= within.stop <= lengths[source]
        got[target] += [starts[source] + place for place in range(*within)]
        order.append((source, target))
    assert order == [(s, t) for s in range(len(lengths)) for t in range(num_targets)]
    for target, places in got.items():
        assert places == list(range(*bounds(sum(lengths), num_targets, target)))


@given(num_sources=counts, num_targets=counts, divided=st.booleans())
def test_whoever_is_waited_for_sends(num_sources, num_targets, divided):
    waits = {
        (source, target)
        for target in range(num_targets)
        for source in senders(num_sources, target, divided=divided)
    }
    sends = {
        (source, target)
        for source in range(num_sources)
        for target in receivers(source, num_sources, num_targets, divided=divided)
    }
    assert waits == sends
    assert all(any(target == one for _, target in waits) for one in range(num_targets))


def test_groups_of_equal_size_hand_over_part_by_part():
    for own in range(3):
        assert senders(3, own, divided=False) == receivers(own, 3, 3, divided=False) == [own]
