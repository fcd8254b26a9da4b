import pytest

from penstock import Kind, Op
from penstock.base.errors import ScheduleError
from penstock.core.schedule.op import dependencies


def needed(text, last_stage=2, present=""):
    """``dependencies`` in the notation of the CSV."""
    ops = {Op.parse(one) for one in present.split()}
    return " ".join(map(str, dependencies(Op.parse(text), last_stage, ops)))


@pytest.mark.parametrize("kind", list(Kind))
def test_text_and_back(kind):
    op = Op(12, kind, 345)
    assert Op.parse(str(op)) == op


def test_slices_of_a_microbatch():
    assert str(Op(0, Kind.FORWARD, 3, 2)) == "0F3.2"
    assert Op.parse("0F3.2") == Op(0, Kind.FORWARD, 3, slice=2)
    assert Op.parse("0F3") == Op(0, Kind.FORWARD, 3, slice=0)
    # A later slice attends to the earlier ones; its gradient reaches them on the way back.
    assert needed("1F0.1") == "0F0.1 1F0"
    assert needed("2B0.1", present="2F0.1 2B0.1 2B0.2") == "2F0.1 2B0.2"
    assert needed("2B0.2", present="2F0.2 2B0.1 2B0.2") == "2F0.2"


@pytest.mark.parametrize(
    "text",
    ["0F1xyz", "F0", "0F", "0X1", " 0F1", "0F1 ", "-1F0", "00F1", "", "0F1.", "0F1.0", "0F1.x"],
)
def test_only_an_op_is_an_op(text):
    with pytest.raises(ScheduleError, match="is not an op; write stage, kind, microbatch"):
        Op.parse(text)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("0F3", ""),
        ("1F3", "0F3"),
        ("2B3", "2F3"),
        ("1B3", "1F3 2B3"),
        ("2I3", "2F3"),
        ("1I3", "1F3 2B3"),
        ("1W3", "1I3"),
        ("1SEND_F3", "1F3"),
        ("1RECV_F3", "0SEND_F3"),
        ("1SEND_B3", "1B3"),
        ("1RECV_B3", "2SEND_B3"),
        ("1UPDATE3", "1B3"),
        ("1R3", "1F3"),
        ("1FREE3", "1B3"),
        ("1FREE_I3", "1I3"),
        ("1REDUCE3", "1B3"),
    ],
)
def test_the_rule(op, expected):
    assert needed(op) == expected


@pytest.mark.parametrize(
    ("op", "present", "expected"),
    [
        ("1F0", "0F0 1RECV_F0", "1RECV_F0"),
        ("1B0", "1F0 2I0 2W0", "1F0 2I0"),
        ("1I0", "1F0 2B0", "1F0 2B0"),
        ("1B0", "1F0 2B0 1RECV_B0", "1F0 1RECV_B0"),
        ("1SEND_B0", "1I0 1W0", "1I0"),
        ("1UPDATE0", "1I0 1W0", "1W0"),
    ],
)
def test_of_several_sources_the_one_present_is_named(op, present, expected):
    assert needed(op, present=present) == expected


def test_a_receive_without_a_neighbour_still_needs_its_other_end():
    assert needed("2RECV_B0", last_stage=2) == "3SEND_B0"
