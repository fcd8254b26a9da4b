"""The picture of two ticks of PARTIME, held to the order of its ops."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from penstock import Costs, schedules, simulate
from penstock.base.errors import InputError
from penstock.core.schedule.op import Kind
from penstock.drawing import draw, draw_borrowed
from penstock.drawing.borrowed import borrowed
from tests.kit.paths import GOLDEN

_SVG = "{http://www.w3.org/2000/svg}"


def test_golden_drawing(tmp_path):
    golden = GOLDEN / "borrowed_3_stages.svg"
    draw_borrowed(tmp_path / golden.name)
    assert (tmp_path / golden.name).read_bytes() == golden.read_bytes()


@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
def test_what_is_drawn_is_the_order_of_the_schedule(num_stages):
    """Stage by stage, two forwards and the backwards that follow them."""
    picture = ElementTree.fromstring(borrowed(num_stages))
    drawn = [group.get("data-op") for group in picture.iter(f"{_SVG}g") if group.get("data-op")]
    schedule = schedules.build("partime", num_ranks=num_stages, num_microbatches=8 * num_stages)
    first = 2 * num_stages
    expected = []
    for stage, ops in enumerate(schedule.ranks):
        begin = next(
            place
            for place, op in enumerate(ops)
            if op.kind is Kind.FORWARD and op.microbatch == first - stage
        )
        expected += [f"{op.kind.value}{op.microbatch}" for op in ops[begin : begin + 4]]
    assert drawn == expected
    ages = re.findall(r">(\d+) frames younger<", borrowed(num_stages))
    assert ages == [str(2 * (num_stages - 1 - s)) for s in range(num_stages - 1) for _ in "ab"]


@pytest.mark.parametrize("num_stages", [0, 9, "3"])
def test_another_number_of_rows_is_refused(num_stages, tmp_path):
    with pytest.raises(InputError, match="num_stages"):
        draw_borrowed(tmp_path / "x.svg", num_stages)


def test_a_part_of_a_stream_has_one_shade_per_stage(tmp_path):
    """Frames that came in before what is shown were once taken for those of another pipeline."""
    stream = schedules.build("partime", num_ranks=3, num_microbatches=18)
    picture = draw(simulate(stream, Costs(), arrivals=1 / 3).steady(5), tmp_path / "part.svg")
    shown = picture[picture.index('class="panel"') :]
    assert {*re.findall(r'class="[FB] (s\d)"', shown)} == {"s0"} and "paler" not in shown


def test_a_stream_that_is_too_short_has_no_steady_state():
    stream = schedules.build("partime", num_ranks=3, num_microbatches=16)
    with pytest.raises(InputError, match="5 ticks of the steady state need 17 microbatches, but"):
        simulate(stream).steady(5)
