"""Optimizers for old gradients, against torch's own, their formulas, and what rotation promises."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from penstock.base.errors import InputError
from penstock.core.versions import rate_factor
from penstock.engine.optimizers import delay_corrected, nadamw
from tests.kit.optimizing import Delayed, assert_same, train, weights

# nadamw


def test_nadamw_is_torchs_nadam_with_decoupled_weight_decay():
    own = nadamw(weights((3, 2), (2,)), lr=0.01, weight_decay=0.1, eps=1e-6)
    reference = torch.optim.NAdam(
        weights((3, 2), (2,)),
        lr=0.01,
        betas=(0.99, 0.999),
        weight_decay=0.1,
        eps=1e-6,
        decoupled_weight_decay=True,
    )
    assert_same(train(own, 5), train(reference, 5))


@pytest.mark.parametrize(
    ("delay", "num_stages", "expected"),
    [(0, 4, 0.9), (1, 4, 0.93), (2, 4, 0.96), (3, 4, 0.99), (5.5, 4, 0.99), (0, 1, 0.9)],
)
def test_rising_beta1_is_linear_in_the_delay(delay, num_stages, expected):
    parameters = Delayed(weights((2,)), delay, num_stages)
    (group,) = nadamw(parameters, rising=True).param_groups
    assert group["betas"] == (pytest.approx(expected, abs=1e-15), 0.999)
    (group,) = nadamw(parameters).param_groups
    assert group["betas"] == (0.99, 0.999)


def test_nadamw_takes_what_torch_takes():
    assert nadamw(iter(weights((2,))), rising=True).param_groups[0]["betas"][0] == 0.9
    groups = nadamw([{"params": weights((2,)), "lr": 0.5}], beta1=0.95).param_groups
    assert (groups[0]["lr"], groups[0]["betas"]) == (0.5, (0.95, 0.999))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"beta1": 1.0}, "beta1 is 1.0"),
        ({"beta2": "x"}, "beta2 is 'x'"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
        ({"beta1": 0.5, "rising": True}, "rises from 0.9"),
    ],
)
def test_nadamw_refuses_numbers_out_of_range(options, message):
    with pytest.raises(InputError, match=message):
        nadamw(weights((2,)), **options)


# delay_corrected


def corrected_sgd(delay=8.0, anneal_updates=4, lr=0.5, shape=(2,)):
    make = delay_corrected(lambda p: torch.optim.SGD(p, lr=lr), anneal_updates=anneal_updates)
    return make(Delayed([nn.Parameter(torch.zeros(shape, dtype=torch.float64))], delay, 9))


def rate_of(optimizer):
    """The learning rate that a step really uses."""
    (parameter,) = optimizer.param_groups[0]["params"]
    before = parameter.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return (before - parameter.detach())[0].item()


def test_rate_factor_is_the_papers():
    assert rate_factor(8.0, 0, 4) == 1 / 8
    assert rate_factor(16.0, 2, 4) == 1 / 4
    assert rate_factor(8.0, 4, 4) == rate_factor(8.0, 400, 4) == 1.0
    assert rate_factor(0.5, 0, 4) == rate_factor(0.0, 0, 4) == 1.0


def test_each_step_is_divided_and_the_group_keeps_its_rate():
    optimizer = corrected_sgd()
    for update in range(7):
        expected = 0.5 / 8 ** (1 - min(update / 4, 1))
        assert rate_of(optimizer) == pytest.approx(expected, rel=1e-12)
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert optimizer.param_groups[0]["delay_corrected_updates"] == update + 1


def test_all_groups_are_divided():
    first, second = weights((1,), (1,))
    groups = [{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.25}]
    parameters = Delayed(groups, 4.0, 5)
    optimizer = delay_corrected(torch.optim.SGD, anneal_updates=10)(parameters)
    before = first.item(), second.item()
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
    optimizer.step()
    steps = before[0] - first.item(), before[1] - second.item()
    assert steps == pytest.approx((0.25, 0.0625), rel=1e-12)


@pytest.mark.parametrize("delay", [None, 0.0, 1.0])
def test_without_delay_nothing_changes(delay):
    parameters = weights((3, 2))
    given_parameters = iter(parameters) if delay is None else Delayed(parameters, delay, 4)
    own = delay_corrected(torch.optim.AdamW, anneal_updates=4)(given_parameters)
    assert_same(train(own, 6), train(torch.optim.AdamW(weights((3, 2))), 6))


def test_a_scheduler_sees_its_own_rates_only():
    optimizer = corrected_sgd(delay=4.0, anneal_updates=5)
    scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=5)
    plain = torch.optim.SGD(weights((1,)), lr=0.5)
    plain_scheduler = LinearLR(plain, start_factor=0.1, total_iters=5)
    for update in range(8):
        own = scheduler.get_last_lr()
        assert own == plain_scheduler.get_last_lr()
        assert rate_of(optimizer) == pytest.approx(own[0] * rate_factor(4.0, update, 5), rel=1e-9)
        plain.step()
        scheduler.step()
        plain_scheduler.step()


def test_a_rate_in_a_tensor_is_divided_and_kept():
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = corrected_sgd(lr=rate)
    assert rate_of(optimizer) == 0.5 / 8
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
    seen = []
    optimizer.step(lambda: seen.append(weakref.ref(optimizer.param_groups[0]["lr"])))
    assert seen[0]() is None  # no step's rate is kept


def test_the_count_is_saved_and_loaded():
    first = corrected_sgd(anneal_updates=10)
    for _ in range(3):
        rate_of(first)
    saved = copy.deepcopy(first.state_dict())
    assert saved["param_groups"][0]["lr"] == 0.5
    second = corrected_sgd(anneal_updates=10)
    second.load_state_dict(saved)
    assert rate_of(second) == pytest.approx(0.5 * rate_factor(8.0, 3, 10), rel=1e-12)
    # Taken back, as after an update on trust, the same update is made again.
    second.load_state_dict(saved)
    assert rate_of(second) == pytest.approx(0.5 * rate_factor(8.0, 3, 10), rel=1e-12)


def test_a_state_without_count_begins_at_0():
    optimizer = corrected_sgd()
    rate_of(optimizer)
    optimizer.load_state_dict(torch.optim.SGD(weights((2,)), lr=0.5).state_dict())
    assert rate_of(optimizer) == pytest.approx(0.5 / 8, rel=1e-12)


def test_a_group_that_comes_later_counts_with_the_others():
    optimizer = corrected_sgd()
    rate_of(optimizer)
    late = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer.add_param_group({"params": [late], "lr": 1.0})
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert -late.item() == pytest.approx(rate_factor(8.0, 1, 4), rel=1e-12)
    assert [g["delay_corrected_updates"] for g in optimizer.param_groups] == [2, 2]


def failing_step(optimizer):
    def closure():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure)


def test_a_step_that_raises_leaves_no_trace_in_later_ones():
    optimizer = corrected_sgd()
    failing_step(optimizer)
    failing_step(optimizer)
    assert rate_of(optimizer) == pytest.approx(0.5 / 8, rel=1e-12)
    assert optimizer.param_groups[0]["lr"] == 0.5
    failing_step(optimizer)
    saved = optimizer.state_dict()["param_groups"][0]
    assert (saved["lr"], saved["delay_corrected_updates"]) == (0.5, 1)
    failing_step(optimizer)
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 0.5


def test_a_rate_that_was_set_after_a_failed_step_stands():
    optimizer = corrected_sgd()
    failing_step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    assert rate_of(optimizer) == pytest.approx(0.25 / 8, rel=1e-12)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_loading_after_a_failed_step_gives_the_loaded_rate():
    optimizer = corrected_sgd()
    saved = corrected_sgd(lr=0.125).state_dict()
    failing_step(optimizer)
    optimizer.load_state_dict(saved)
    assert rate_of(optimizer) == pytest.approx(0.125 / 8, rel=1e-12)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_deep_copy_goes_on_by_itself():
    optimizer = corrected_sgd(anneal_updates=10)
    rate_of(optimizer)
    twin = copy.deepcopy(copy.deepcopy(optimizer))
    assert type(twin) is torch.optim.SGD
    for update in (1, 2):
        assert rate_of(twin) == pytest.approx(0.5 * rate_factor(8.0, update, 10), rel=1e-12)
    assert optimizer.param_groups[0]["delay_corrected_updates"] == 1
    assert rate_of(optimizer) == pytest.approx(0.5 * rate_factor(8.0, 1, 10), rel=1e-12)


def test_a_deep_copy_keeps_to_the_copied_model():
    model = nn.Linear(2, 1)
    optimizer = delay_corrected(torch.optim.AdamW, anneal_updates=10)(model.parameters())
    train(optimizer, 2)
    copied_model, copied = copy.deepcopy((model, optimizer))
    assert copied.param_groups[0]["params"][0] is copied_model.weight
    assert copied_model.weight in copied.state


def test_a_corrected_optimizer_is_freed_at_once():
    optimizer = corrected_sgd()
    rate_of(optimizer)
    reference = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert reference() is None
    finally:
        gc.enable()


def test_delay_corrected_refuses_what_it_cannot_correct():
    for wrong in (0, -3, 1.5, True, None):
        with pytest.raises(InputError, match=r"anneal_updates is .*≥ 1"):
            delay_corrected(torch.optim.SGD, anneal_updates=wrong)
    with pytest.raises(InputError, match="make is of type SGD"):
        delay_corrected(torch.optim.SGD(weights((1,))), anneal_updates=3)
    with pytest.raises(InputError, match="what make gave is of type list"):
        delay_corrected(list, anneal_updates=3)(weights((1,)))
    once = delay_corrected(torch.optim.SGD, anneal_updates=3)
    with pytest.raises(InputError, match="only once"):
        delay_corrected(once, anneal_updates=3)(weights((1,)))
