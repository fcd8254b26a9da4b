"""The three cost models against formulas worked out by hand."""

import pytest

from penstock.base.errors import InputError
from penstock.core.cluster import Link
from penstock.planning.partition import COST_MODELS, cost_model

LINK = Link(latency_seconds=0.001, bytes_per_second=1000.0)
FREE = Link()


def stage_seconds(model, compute, parameter_bytes, num_replicas, link, updates=1.0):
    exchange = model.reduce_seconds(parameter_bytes, num_replicas, link)
    return model.shared_seconds(compute, exchange, num_replicas, updates)


def test_released_adds_the_exchange_and_divides_by_replicas_twice():
    model = cost_model("pipedream-released")
    # (T + 4(m−1)|w|/(mB))/m with T = 8, m = 4, |w|/B = 2
    assert stage_seconds(model, 8.0, 2000.0, 4, LINK) == pytest.approx((8 + 4 * 3 * 2 / 4) / 4)
    assert model.cut_seconds(3000.0, 4, LINK) == pytest.approx(2 * 3 / 4)


def test_paper_takes_the_longer_and_does_not_share_cuts():
    model = cost_model("pipedream-paper")
    assert stage_seconds(model, 8.0, 2000.0, 4, LINK) == pytest.approx(2 * 3 * 2 / 4)
    assert stage_seconds(model, 80.0, 2000.0, 4, LINK) == pytest.approx(80 / 4)
    assert model.cut_seconds(3000.0, 4, LINK) == pytest.approx(6.0)


def test_ring_has_latencies_and_overlap():
    exchange = 2 * 3 / 4 * 2 + 2 * 3 * 0.001
    hidden, half, none = (cost_model("ring", overlap=share) for share in (1.0, 0.5, 0.0))
    assert hidden.reduce_seconds(2000.0, 4, LINK) == pytest.approx(exchange)
    assert stage_seconds(hidden, 8.0, 2000.0, 4, LINK) == pytest.approx(8 / 4)
    assert stage_seconds(none, 8.0, 2000.0, 4, LINK) == pytest.approx((8 + exchange) / 4)
    assert stage_seconds(half, 8.0, 2000.0, 4, LINK) == pytest.approx((8 + exchange / 2) / 4)
    assert half.cut_seconds(3000.0, 2, LINK) == pytest.approx(2 * (3 + 0.001) / 2)


def test_rarer_updates_exchange_less_but_never_more_than_once_per_round():
    model = cost_model("ring", overlap=0.0)
    exchange = model.reduce_seconds(2000.0, 4, LINK)
    for updates in (0.01, 0.1, 0.25):
        expected = 8 / 4 + updates * exchange
        assert stage_seconds(model, 8.0, 2000.0, 4, LINK, updates) == pytest.approx(expected)
    often = stage_seconds(model, 8.0, 2000.0, 4, LINK, 1.0)
    assert often == pytest.approx(stage_seconds(model, 8.0, 2000.0, 4, LINK, 0.25))


@pytest.mark.parametrize("name", COST_MODELS)
def test_one_device_exchanges_nothing_and_a_free_link_costs_nothing(name):
    model = cost_model(name)
    assert model.reduce_seconds(1e9, 1, LINK) == 0
    assert stage_seconds(model, 8.0, 1e9, 1, LINK) == 8
    assert model.reduce_seconds(1e9, 4, FREE) == model.cut_seconds(1e9, 4, FREE) == 0


def test_pipedreams_models_have_their_own_overlap():
    assert cost_model("pipedream-released", 0.5).overlap == 0
    assert cost_model("pipedream-paper", 0.5).overlap == 1


@pytest.mark.parametrize("overlap", [-0.1, 1.1, float("nan"), "much", True])
def test_an_overlap_that_is_no_share_is_refused(overlap):
    with pytest.raises(InputError, match="overlap"):
        cost_model("ring", overlap)


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(InputError, match="pipedream-paper"):
        cost_model("pipedream")
