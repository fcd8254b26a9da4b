"""Numbers on record: bubbles and peak activations of each family at F = I = W = 1 and no hops.

They come from the papers and from running the published generators (REFERENCE.md, section 1), not
from this code.
"""

from __future__ import annotations

import pytest

from penstock import schedules, simulate
from penstock.core.schedule.op import Kind

SIZES = [(4, 8), (4, 16), (8, 16), (8, 32)]
V2, V4 = {"stages_per_rank": 2}, {"stages_per_rank": 4}
# Makespan bubble and peak; the stage bubble where it differs.
GOLDEN = [
    ("gpipe", {}, [(0.2727, 8), (0.1579, 16), (0.3043, 16), (0.1795, 32)]),
    ("1f1b", {}, [(0.2727, 4), (0.1579, 4), (0.3043, 8), (0.1795, 8)]),
    ("interleaved-1f1b", V2, [(0.1579, 5.5), (0.0857, 5.5), (0.1795, 11.5), (0.0986, 11.5)]),
    ("interleaved-1f1b", V4, [(0.0857, 4.75), (0.0448, 4.75), (0.0986, 9.75), (0.0519, 9.75)]),
    ("breadth-first", V2, [(0.1579, 8), (0.0857, 16), (0.1795, 16), (0.0986, 32)]),
    ("zb-h1", {}, [(0.1111, 4), (0.0588, 4), (0.1273, 8), (0.0680, 8)]),
    ("zb-h2", {}, [(0.1111, 7, 0), (0.0588, 7, 0), (0.1273, 15, 0), (0.0680, 15, 0)]),
    ("zb-v", {}, [(0.0588, 4, 0), (0.0303, 4, 0), (0.0680, 8, 0), (0.0352, 8, 0)]),
    ("interleaved-zb", V2, [(0.0588, 4), (0.0303, 4), (0.0680, 8), (0.0352, 8)]),
    ("v-half", {}, [(0.0943, 3), (0.0495, 3), (0.1504, 5), (0.0813, 5)]),
    ("v-min", {}, [(0.1864, 2), (0.1028, 2), (0.2195, 4), (0.1233, 4)]),
]
ROWS = [
    (name, options, *size, *numbers[:2], numbers[-1] if len(numbers) > 2 else numbers[0])
    for name, options, row in GOLDEN
    for size, numbers in zip(SIZES, row, strict=True)
]


@pytest.mark.parametrize(("name", "options", "p", "m", "bubble", "peak", "stage_bubble"), ROWS)
def test_bubbles_and_peak(name, options, p, m, bubble, peak, stage_bubble):
    timeline = simulate(schedules.build(name, num_ranks=p, num_microbatches=m, **options))
    assert round(timeline.bubble, 4) == bubble
    assert round(timeline.stage_bubble, 4) == stage_bubble
    assert max(timeline.peak_activations) == peak


DUALPIPE_V = [(0.1111, 4.5), (0.0588, 4.5), (0.1273, 8.5), (0.0680, 8.5)]


@pytest.mark.parametrize(
    ("p", "m", "bubble", "peak"),
    [(*size, *row) for size, row in zip(SIZES, DUALPIPE_V, strict=True)],
)
def test_dualpipe_v_as_published(p, m, bubble, peak):
    # On record a pair of F and B is one unit of work, whose results leave when both are done.
    schedule = schedules.build("dualpipe-v", num_ranks=p, num_microbatches=m)
    assert round(1 - 6 * m / makespan_in_pairs(schedule), 4) == bubble
    assert max(simulate(schedule).peak_activations) == peak


def makespan_in_pairs(schedule):
    ahead = [pairs(ops) for ops in schedule.ranks]
    free, end = [0] * len(ahead), {}
    while any(ahead):
        ready = [
            rank
            for rank, units in enumerate(ahead)
            if units and inputs(schedule, units[0]) <= end.keys()
        ]
        assert ready, "the pairs wait for each other"
        for rank in ready:
            unit = ahead[rank].pop(0)
            arrival = max((end[op] for op in inputs(schedule, unit)), default=0)
            lasts = sum(2 if op.kind is Kind.BACKWARD else 1 for op in unit)
            free[rank] = max(free[rank], arrival) + lasts
            end |= dict.fromkeys(unit, free[rank])
    return max(free)


def pairs(ops):
    """Ops one by one, but each F together with a B right behind it."""
    units = []
    for op in ops:
        if op.kind is Kind.BACKWARD and units[-1][-1].kind is Kind.FORWARD:
            units[-1].append(op)
        else:
            units.append([op])
    return units


def inputs(schedule, unit):
    return {needed for op in unit for needed in schedule.dependencies(op)} - set(unit)
