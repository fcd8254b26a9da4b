import pytest

from penstock import Costs, Op
from penstock.base.errors import InputError


def duration(costs, text):
    return costs.duration(Op.parse(text))


def test_a_full_backward_is_both_halves():
    costs = Costs(forward=1, backward_input=2, backward_weight=4, hop=8, update=16)
    assert [duration(costs, f"0{kind}0") for kind in "FIWB"] == [1, 2, 4, 6]
    assert duration(costs, "0UPDATE0") == 16
    assert duration(costs, "0SEND_F0") == 0


def test_a_full_backward_may_take_less_than_its_halves():
    costs = Costs(backward_input=[2, 2], backward_weight=[4, 4], backward=[5, 3])
    assert [duration(costs, f"1{kind}0") for kind in "IWB"] == [2, 4, 3]
    assert duration(Costs(backward=0), "0B0") == 0
    with pytest.raises(InputError, match=r"costs: backward has 2 numbers, .* 3 stages"):
        Costs(backward=[5, 3]).check_stages(3)


def test_how_long_a_message_keeps_its_link_busy():
    assert not Costs(hop=3).has_busy_links
    assert not Costs(link=[0, 0]).has_busy_links
    costs = Costs(link=[0, 2])
    assert costs.has_busy_links
    assert [costs.occupies(0), costs.occupies(1), Costs(link=7).occupies(1)] == [0, 2, 7]
    costs.check_stages(3)  # the last stage has no link behind it
    with pytest.raises(InputError, match=r"costs: link has 2 numbers, .* 4 stages"):
        costs.check_stages(4)


def test_links_are_not_shared_out_with_the_compute_of_a_rank():
    found = Costs(backward=4.0, link=3.0).spread(2)
    assert (found.backward, found.link) == (2.0, 3.0)


def test_a_cost_per_stage():
    costs = Costs(forward=[1, 2], backward_input=[3, 4], backward_weight=[5, 6], update=[7, 8])
    assert [duration(costs, f"1{kind}0") for kind in ("F", "B", "UPDATE")] == [2, 10, 8]


def test_a_hop_belongs_to_its_edge_in_both_directions():
    costs = Costs(hop=[1, 2])
    there, back = (Op.parse("0F0"), Op.parse("1F0")), (Op.parse("1B0"), Op.parse("0B0"))
    assert costs.delay(*there) == costs.delay(*back) == 1
    assert costs.delay(Op.parse("2B0"), Op.parse("1B0")) == 2
    costs.check_stages(3)


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), [1, -1]])
@pytest.mark.parametrize("field", ["forward", "backward_input", "backward_weight", "hop", "update"])
def test_a_cost_is_finite_and_not_negative(field, bad):
    with pytest.raises(InputError, match=f"costs: {field} is .*≥ 0"):
        Costs(**{field: bad})


@pytest.mark.parametrize("field", ["forward", "hop"])
def test_a_number_for_each_stage(field):
    with pytest.raises(InputError, match=f"costs: {field} has 2 numbers, .* 4 stages"):
        Costs(**{field: [1, 2]}).check_stages(4)


@pytest.mark.parametrize("bad", ["1", None, {0: 1}, True, ["1"], [None]])
def test_a_cost_is_a_number_or_a_list(bad):
    with pytest.raises(InputError, match=r"costs: forward is .*; give a number, or a list"):
        Costs(forward=bad)
