"""Numbers on record of the families whose stages go round the ranks in one direction.

They come from the papers and from running the published generators (REFERENCE.md, section 1), not
from this code.
"""

from __future__ import annotations

import pytest

from penstock import Costs, schedules, simulate

SIZES = [(4, 8), (4, 16), (8, 16), (8, 32)]
GOLDEN = [
    ("interleaved-1f1b", 2, [(0.1579, 5.5), (0.0857, 5.5), (0.1795, 11.5), (0.0986, 11.5)]),
    ("interleaved-1f1b", 4, [(0.0857, 4.75), (0.0448, 4.75), (0.0986, 9.75), (0.0519, 9.75)]),
    ("breadth-first", 2, [(0.1579, 8), (0.0857, 16), (0.1795, 16), (0.0986, 32)]),
    ("zb-h1", None, [(0.1111, 4), (0.0588, 4), (0.1273, 8), (0.0680, 8)]),
    ("zb-h2", None, [(0.1111, 7, 0), (0.0588, 7, 0), (0.1273, 15, 0), (0.0680, 15, 0)]),
    ("interleaved-zb", 2, [(0.0588, 4), (0.0303, 4), (0.0680, 8), (0.0352, 8)]),
]
ROWS = [
    (name, stages_per_rank, *size, *numbers[:2], numbers[-1] if len(numbers) > 2 else numbers[0])
    for name, stages_per_rank, row in GOLDEN
    for size, numbers in zip(SIZES, row, strict=True)
]


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "p", "m", "bubble", "peak", "stage_bubble"), ROWS
)
def test_bubble_and_peak(name, stages_per_rank, p, m, bubble, peak, stage_bubble):
    """F = I = W = 1 and no hops; the stage bubble differs for ZB-H2 alone."""
    options = {} if stages_per_rank is None else {"stages_per_rank": stages_per_rank}
    timeline = simulate(schedules.build(name, num_ranks=p, num_microbatches=m, **options))
    assert round(timeline.bubble, 4) == bubble
    assert round(timeline.stage_bubble, 4) == stage_bubble
    assert max(timeline.peak_activations) == peak


PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), {"zb-h1": 0.1585, "zb-h2": 0.1083}),
    (8, 32, (18.513, 18.086, 9.331, 0.626), {"zb-h1": 0.1242, "zb-h2": 0.0837}),
    (8, 64, (18.546, 18.097, 9.321, 0.762), {"zb-h1": 0.0674, "zb-h2": 0.0444}),
    (16, 48, (11.347, 11.248, 8.132, 0.377), {"zb-h1": 0.1397, "zb-h2": 0.0672}),
    (16, 64, (11.307, 11.254, 8.101, 0.379), {"zb-h1": 0.1088, "zb-h2": 0.0516}),
    (16, 128, (11.325, 11.308, 8.109, 0.378), {"zb-h1": 0.0576, "zb-h2": 0.0266}),
]


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
@pytest.mark.parametrize(("p", "m", "costs", "rates"), PUBLISHED)
def test_published_rates_of_zero_bubble(name, p, m, costs, rates):
    # Tables 5 and 6 of arXiv 2401.10241; its rate is 1 − mT / cost.
    schedule = schedules.build(name, num_ranks=p, num_microbatches=m)
    assert simulate(schedule, Costs(*costs)).stage_bubble == pytest.approx(rates[name], abs=6e-5)
