"""The partition is exact: no composition of up to ten layers beats it."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import PlanError
from penstock.planning.partition import balance

costs = st.lists(st.floats(0, 100), min_size=1, max_size=10)
whole = st.lists(st.integers(0, 5), min_size=1, max_size=10)


def compositions(num_layers, num_stages):
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield (0, *inner, num_layers)


def stage_seconds(cuts, costs, edges, speeds):
    edges = (*(edges or [0] * (len(costs) - 1)), 0)
    speeds = speeds or [1] * (len(cuts) - 1)
    return [
        sum(costs[start:stop]) / speed + edges[stop - 1]
        for (start, stop), speed in zip(pairwise(cuts), speeds, strict=True)
    ]


def with_extra(cuts, extra, *arguments):
    return [
        seconds + extra(stage, *bounds)
        for seconds, (stage, bounds) in zip(
            stage_seconds(cuts, *arguments), enumerate(pairwise(cuts)), strict=True
        )
    ]


def elementwise(extra):
    """What ``balance`` asks for: many starts and stops of a stage at once."""
    return np.vectorize(extra, otypes=[float])


def brute_force(costs, num_stages, edges=(), speeds=(), extra=lambda *_: 0.0):
    """(slowest stage, sum of squares) of the best cuts, or None; looks at all there are."""
    scores = []
    for cuts in compositions(len(costs), num_stages):
        seconds = with_extra(cuts, extra, costs, edges, speeds)
        if max(seconds) < inf:
            scores.append((max(seconds), sum(one * one for one in seconds)))
    return min(scores, default=None)


@given(costs=costs, data=st.data())
def test_equals_brute_force(costs, data):
    p = data.draw(st.integers(1, len(costs)))
    cuts = balance(costs, p)
    assert cuts in set(compositions(len(costs), p))
    slowest, _ = brute_force(costs, p)
    assert max(stage_seconds(cuts, costs, (), ())) == pytest.approx(slowest)


@given(costs=whole, data=st.data())
def test_of_equal_beats_the_most_even_cuts_win(costs, data):
    p = data.draw(st.integers(1, len(costs)))
    seconds = stage_seconds(balance(costs, p), costs, (), ())
    assert (max(seconds), sum(one * one for one in seconds)) == brute_force(costs, p)


@given(costs=costs, data=st.data())
def test_equals_brute_force_with_edges_speeds_and_limits(costs, data):
    n = len(costs)
    p = data.draw(st.integers(1, n))
    edges = data.draw(st.lists(st.floats(0, 50), min_size=n - 1, max_size=n - 1))
    speeds = data.draw(st.lists(st.floats(0.1, 8), min_size=p, max_size=p))
    weights = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    limits = data.draw(st.lists(st.integers(5, 40), min_size=p, max_size=p))

    again = data.draw(st.floats(0, 1))

    def extra(stage, start, stop):
        """Half of what is over the limit may be bought off."""
        over = sum(weights[start:stop]) - limits[stage]
        if over <= 0:
            return 0.0
        return again * sum(costs[start:stop]) if 2 * over <= limits[stage] else inf

    expected = brute_force(costs, p, edges, speeds, extra)
    if expected is None:
        with pytest.raises(PlanError, match="within its limit"):
            balance(costs, p, edges=edges, speeds=speeds, extra=elementwise(extra))
    else:
        cuts = balance(costs, p, edges=edges, speeds=speeds, extra=elementwise(extra))
        assert max(with_extra(cuts, extra, costs, edges, speeds)) == pytest.approx(expected[0])


@given(costs=whole, data=st.data())
def test_a_stage_takes_no_longer_than_it_may_where_it_begins(costs, data):
    p = data.draw(st.integers(1, len(costs)))
    most = data.draw(st.lists(st.integers(0, 30), min_size=len(costs), max_size=len(costs)))

    def too_long(stage, start, stop):
        return inf if sum(costs[start:stop]) > most[start] else 0.0

    expected = brute_force(costs, p, extra=too_long)
    if expected is None:
        with pytest.raises(PlanError, match="within its limit"):
            balance(costs, p, most=most)
    else:
        seconds = with_extra(balance(costs, p, most=most), too_long, costs, (), ())
        assert (max(seconds), sum(one * one for one in seconds)) == expected
