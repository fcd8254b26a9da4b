"""Who sums how much: the linear program, closed forms, and parts that miss no number."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from penstock.base.errors import InputError
from penstock.core.summation.split import best_part_bytes, best_split, parts_of

RATES = st.floats(0.1, 100.0)


def by_linear_program(num_bytes, workers, servers):
    """Seconds: the least t, the shares being free."""
    n, count = len(workers), len(workers) + len(servers)
    rows, limits = [], []
    for index, rate in enumerate((*workers, *servers)):
        row = [0.0] * (count + 1)
        row[index] = (n - 2 if index < n else n) / rate
        row[-1] = -1.0
        rows.append(row)
        limits.append(-num_bytes / rate if index < n else 0.0)
    found = linprog(
        [0.0] * count + [1.0],
        A_ub=rows,
        b_ub=limits,
        A_eq=[[1.0] * count + [0.0]],
        b_eq=[num_bytes],
        bounds=[(0, None)] * (count + 1),
    )
    return found.fun


def seconds_of(split, num_bytes, workers, servers):
    """What a split's own shares take."""
    n = len(workers)
    own = [(num_bytes + (n - 2) * g) / b for g, b in zip(split.workers, workers, strict=True)]
    return max(own + [n * c / b for c, b in zip(split.servers, servers, strict=True)])


@given(
    num_bytes=st.floats(1.0, 1000.0),
    workers=st.lists(RATES, min_size=2, max_size=8),
    servers=st.lists(RATES, max_size=10),
)
def test_the_split_is_the_linear_programs(num_bytes, workers, servers):
    split = best_split(num_bytes, workers, servers)
    assert split.seconds == pytest.approx(by_linear_program(num_bytes, workers, servers), rel=1e-7)
    assert seconds_of(split, num_bytes, workers, servers) <= split.seconds * (1 + 1e-12)
    assert sum(split.workers) + sum(split.servers) == pytest.approx(num_bytes, rel=1e-12)
    assert min(*split.workers, *split.servers, 0.0) == 0.0


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("k", range(12))
def test_equal_links_have_a_closed_form(n, k):
    split = best_split(6.0, [2.0] * n, [2.0] * k)
    d = n * n + k * n - 2 * k
    most = min(k, n)  # beyond, there is nothing left to win
    closed = 3.0 if k >= n else 2 * n * (n - 1) * 3.0 / d
    assert split.seconds == pytest.approx(closed, rel=1e-14)
    share = 6.0 / k if k > n else 2 * (n - 1) * 6.0 / d
    assert split.servers == pytest.approx((share,) * k, rel=1e-13)
    rest = (n - most) * 6.0 / d if k < n else 0.0
    assert split.workers == pytest.approx((rest,) * n, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(("fast", "slow"), [(1.0, 1.0), (4.0, 1.0), (1.0, 9.0)])
@pytest.mark.parametrize(("n", "k"), [(3, 1), (3, 5), (4, 2), (8, 3)])
def test_links_of_two_kinds_have_a_closed_form(n, k, fast, slow):
    split = best_split(1.0, [fast] * n, [slow] * k)
    if n * fast <= k * slow:
        assert split.seconds == pytest.approx(max(1 / fast, n / (k * slow)))
    else:
        g = (n * fast - k * slow) / (n * n * fast + k * (n - 2) * slow)
        assert split.workers == pytest.approx((g,) * n)
        assert split.seconds == pytest.approx((1 + (n - 2) * g) / fast)


def test_one_worker_has_nothing_to_exchange():
    assert best_split(5.0, [1.0], [3.0, 4.0]) == (0.0, (5.0,), (0.0, 0.0))
    assert best_split(0.0, [1.0, 2.0], [3.0]).seconds == 0.0


@pytest.mark.parametrize(
    ("workers", "servers"),
    [([], []), ([0.0, 1.0], []), ([1.0, 1.0], [-1.0]), ([1.0], [float("nan")])],
)
def test_what_cannot_be_split_is_refused(workers, servers):
    with pytest.raises(InputError, match="worker"):
        best_split(1.0, workers, servers)


@given(
    count=st.integers(0, 5000),
    shares=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=6).filter(lambda s: sum(s) > 1e-3),
    most=st.integers(1, 900),
)
def test_every_number_is_in_one_part_of_its_owner(count, shares, most):
    parts = parts_of(count, shares, most)
    assert all(before.stop == after.start for before, after in pairwise(parts))
    assert sum(part.stop - part.start for part in parts) == count
    assert all(0 < part.stop - part.start <= most for part in parts)
    for owner, share in enumerate(shares):
        own = sum(part.stop - part.start for part in parts if part.owner == owner)
        assert abs(own - count * share / sum(shares)) <= 1


@given(shares=st.lists(st.floats(0.2, 5.0), min_size=2, max_size=5), most=st.integers(5, 60))
def test_parts_of_all_owners_take_turns(shares, most):
    parts, sent = parts_of(2000, shares, most), [0.0] * len(shares)
    for number, part in enumerate(parts):
        sent[part.owner] += part.stop - part.start
        done = sum(sent) / 2000
        for owner, share in enumerate(shares):
            assert abs(sent[owner] - done * 2000 * share / sum(shares)) <= most * len(shares), (
                number
            )


def test_parts_are_as_large_as_the_link_is_fast():
    assert best_part_bytes(12.5e6, 12.5e6, 4) == pytest.approx(56e3, rel=0.01)
    assert best_part_bytes(100e6, 100e9 / 8, 4) == pytest.approx(5e6, rel=0.01)
    assert best_part_bytes(1.0, 1.0, 4) == 16 * 1024
