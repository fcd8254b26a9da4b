from math import inf

import numpy as np
import pytest

from penstock.base.errors import InputError, PlanError
from penstock.planning.partition import balance


@pytest.mark.parametrize(
    ("costs", "stages", "cuts"),
    [
        ([1], 1, (0, 1)),
        ([1, 1, 1, 1], 2, (0, 2, 4)),
        ([5, 1, 1, 1], 2, (0, 1, 4)),
        ([1, 2, 3, 4, 5, 6], 3, (0, 3, 5, 6)),
        ([0, 0, 0], 3, (0, 1, 2, 3)),
    ],
)
def test_small_chains(costs, stages, cuts):
    assert balance(costs, stages) == cuts


def test_among_equal_beats_the_even_one():
    # Any cut of the first four layers leaves the last stage slowest.
    assert balance([1, 1, 1, 1, 9], 3) == (0, 2, 4, 5)


def test_of_equally_even_ones_early_stages_get_more():
    assert balance([1, 1, 1, 1, 1], 3) == (0, 2, 4, 5)


def test_equal_layers_in_any_float_stay_even():
    assert balance([0.1] * 12, 4) == (0, 3, 6, 9, 12)


def test_a_faster_device_gets_more():
    assert balance([1] * 6, 2, speeds=[2, 1]) == (0, 4, 6)


def test_a_dear_edge_is_not_cut():
    assert balance([1, 1, 1, 1], 2) == (0, 2, 4)
    assert balance([1, 1, 1, 1], 2, edges=[0, 5, 0]) == (0, 3, 4)


def test_a_stage_can_have_a_limit_of_its_own():
    sizes = {0: 1, 1: 3}

    def extra(stage, starts, stops):
        return np.where(stops - starts <= sizes[stage], 0.0, inf)

    assert balance([1, 1, 1, 1], 2, extra=extra) == (0, 1, 4)
    assert balance([1, 1, 1, 1], 2, extra=extra, longest=[1, 3]) == (0, 1, 4)
    with pytest.raises(PlanError, match="no way to cut 5 layers into 2 stages"):
        balance([1] * 5, 2, extra=extra)


def test_a_thousand_layers():
    cuts = balance([1 + index % 7 for index in range(1000)], 16)
    assert len(cuts) == 17


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([1, 1, 1], 4), {}, PlanError, "3 layers cannot make 4 stages"),
        (([], 1), {}, PlanError, "0 layers cannot make 1 stages"),
        (([1, 1], 0), {}, InputError, "num_stages is 0"),
        (([1, -1], 1), {}, InputError, r"costs\[1\] is -1, but must be ≥ 0"),
        (([1, float("nan")], 1), {}, InputError, r"costs\[1\] is nan"),
        (([1, 1], 1), {"edges": [1, 1]}, InputError, "edges has 2 numbers, but 1 are needed"),
        (([1, 1], 2), {"speeds": [1]}, InputError, "speeds has 1 numbers, but 2 are needed"),
        (([1, 1], 2), {"speeds": [1, 0]}, InputError, r"speeds\[1\] is 0, but must be > 0"),
    ],
)
def test_what_is_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        balance(*arguments, **options)
