"""Numbers on record: bubble and peak activations of each family at F = I = W = 1 and no hops.

They come from running the published generators (REFERENCE.md, section 1), not from this code.
"""

from __future__ import annotations

import pytest

from penstock import Costs, schedules, simulate

SIZES = [(4, 8), (4, 16), (8, 16), (8, 32)]
GOLDEN = {
    "gpipe": [(0.2727, 8), (0.1579, 16), (0.3043, 16), (0.1795, 32)],
    "1f1b": [(0.2727, 4), (0.1579, 4), (0.3043, 8), (0.1795, 8)],
}
ROWS = [
    (name, *size, *numbers)
    for name, row in GOLDEN.items()
    for size, numbers in zip(SIZES, row, strict=True)
]


@pytest.mark.parametrize(("name", "p", "m", "bubble", "peak"), ROWS)
def test_bubble_and_peak(name, p, m, bubble, peak):
    timeline = simulate(schedules.build(name, num_ranks=p, num_microbatches=m))
    assert round(timeline.bubble, 4) == bubble
    assert round(timeline.stage_bubble, 4) == bubble
    assert max(timeline.peak_activations) == peak


PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), 0.2431),
    (8, 32, (18.513, 18.086, 9.331, 0.626), 0.1985),
    (8, 64, (18.546, 18.097, 9.321, 0.762), 0.1240),
    (16, 48, (11.347, 11.248, 8.132, 0.377), 0.2552),
    (16, 64, (11.307, 11.254, 8.101, 0.379), 0.2082),
    (16, 128, (11.325, 11.308, 8.109, 0.378), 0.1251),
]


@pytest.mark.parametrize(("p", "m", "costs", "rate"), PUBLISHED)
def test_published_rate_of_1f1b(p, m, costs, rate):
    # Tables 5 and 6 of arXiv 2401.10241; its rate is 1 − mT / cost.
    schedule = schedules.build("1f1b", num_ranks=p, num_microbatches=m)
    assert simulate(schedule, Costs(*costs)).stage_bubble == pytest.approx(rate, abs=6e-5)
