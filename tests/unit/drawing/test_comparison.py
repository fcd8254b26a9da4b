import math
from itertools import combinations
from xml.etree import ElementTree

import pytest

from penstock import errors, schedules, simulate
from penstock.drawing import draw_scatter
from penstock.drawing.comparison import ScatterMark, scatter
from penstock.drawing.markup import text_width

SVG = "{http://www.w3.org/2000/svg}"

CASES = {
    "none": [],
    "one": [ScatterMark("1f1b", 4, 0.27, 0.27)],
    "no bubble": [ScatterMark("perfect", 1, 0.0, 0.0)],
    "the same point": [
        ScatterMark("a", 8, 0.1, 0.1),
        ScatterMark("b", 8, 0.1, 0.1),
        ScatterMark("c", 8, 0.1, 0.0),
    ],
    "a crowd": [
        ScatterMark(f"schedule-number-{n}", 8 + n % 4 / 4, 0.1 + n // 4 / 100, 0.0)
        for n in range(16)
    ],
    "far apart": [ScatterMark("little", 0.5, 0.9, 0.9), ScatterMark("much", 500, 0.001, 0.0)],
}


def elements(picture, class_):
    tree = ElementTree.fromstring(picture)
    return [one for one in tree.iter() if class_ in one.get("class", "").split()]


def boxes(picture):
    """Where each name stands."""
    for one in elements(picture, "name"):
        width = text_width(one.text, 12)
        x = (
            float(one.get("x"))
            - {"start": 0, "middle": width / 2, "end": width}[one.get("text-anchor")]
        )
        yield one.text, x, float(one.get("y")) - 10, x + width, float(one.get("y")) + 2


@pytest.mark.parametrize("marks", CASES.values(), ids=CASES.keys())
def test_every_point_has_its_name_inside_the_picture(marks):
    picture = scatter(marks)
    tree = ElementTree.fromstring(picture)
    width, height = float(tree.get("width")), float(tree.get("height"))
    assert {one.text for one in elements(picture, "name")} == {mark.name for mark in marks}
    for _, left, top, right, bottom in boxes(picture):
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
    for circle in tree.iter(f"{SVG}circle"):
        assert math.isfinite(float(circle.get("cx"))) and 0 <= float(circle.get("cy")) <= height


@pytest.mark.parametrize("marks", CASES.values(), ids=CASES.keys())
def test_no_name_covers_another_or_a_point(marks):
    picture = scatter(marks)
    for (one, *a), (two, *b) in combinations(boxes(picture), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (one, two)
    dots = elements(picture, "dot")[1:] + elements(picture, "ring")[1:]
    for name, left, top, right, bottom in boxes(picture):
        for dot in dots:
            inside = left < float(dot.get("cx")) < right and top < float(dot.get("cy")) < bottom
            assert not inside, name


def test_a_stage_bubble_is_drawn_where_it_differs_and_named_where_that_is_not_clear():
    picture = scatter(CASES["the same point"])
    assert len(elements(picture, "join")) == 1
    assert len(elements(picture, "ring")) == 1 + 1, "one, and the key"
    assert [one.text for one in elements(picture, "name")] == ["a", "b", "c", "c"]
    assert not elements(scatter(CASES["one"]), "ring")


def test_further_right_is_more_memory_and_higher_is_more_bubble(tmp_path):
    names = ("1f1b", "gpipe", "zb-h1")
    timelines = [
        (name, simulate(schedules.build(name, num_ranks=4, num_microbatches=8))) for name in names
    ]
    picture = draw_scatter(timelines, tmp_path / "points.svg")
    assert (tmp_path / "points.svg").read_text() == picture + "\n"
    dots = [(float(one.get("cx")), float(one.get("cy"))) for one in elements(picture, "dot")[1:]]
    zb, one_f_one_b, gpipe = sorted(dots, key=lambda dot: (dot[0], -dot[1]))
    assert zb[0] == one_f_one_b[0] < gpipe[0]
    assert zb[1] > one_f_one_b[1] == gpipe[1]


def test_only_svg(tmp_path):
    with pytest.raises(errors.InputError, match=r"end the name in \.svg"):
        draw_scatter([], tmp_path / "points.txt")
