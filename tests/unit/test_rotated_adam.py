"""Rotated Adam: torch's own where nothing is rotated, and what rotation promises."""

from __future__ import annotations

import copy
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.base.errors import InputError
from penstock.engine.optimizers import RotatedAdam, delay_corrected
from tests.kit.optimizing import Delayed, assert_same, noise, train, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_rotated_has_the_bits_of_adamw(dtype):
    shapes = [(5,), (), (6, 4), (4, 1), (1, 4), (3, 0), (6, 2, 2)]
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    rotated = RotatedAdam(weights(*shapes, dtype=dtype), **options, max_dim=3)
    plain = torch.optim.AdamW(weights(*shapes, dtype=dtype), **options)
    assert_same(train(rotated, 25), train(plain, 25))


def test_diagonal_gradients_are_adams():
    """Their singular vectors are the axes, so turning there and back changes nothing."""
    own, reference = weights((3, 3)), weights((3, 3))
    optimizer = RotatedAdam(own, lr=0.01, weight_decay=0.1, refresh_every=2)
    adam = torch.optim.AdamW(reference, lr=0.01, weight_decay=0.1)
    for number in range(12):
        scales = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
        gradient = torch.diag(scales * (1 + 0.1 * noise(3, seed=number)))
        own[0].grad, reference[0].grad = gradient.clone(), gradient.clone()
        optimizer.step()
        adam.step()
        assert_same(own[0], reference[0], rtol=0, atol=1e-12)


def orthogonal(size, seed):
    return torch.linalg.qr(noise(size, size, seed=seed)).Q


def trajectory(make, start, turn=None, num_steps=25):
    """Minimise ½‖AWB−C‖², or, with ``turn``=(Q, P), the same loss of QᵀWP."""
    left, right, target = (noise(*start.shape, seed=seed) for seed in (91, 92, 93))
    turn = turn or (torch.eye(len(start)).to(start),) * 2
    weight = nn.Parameter(turn[0] @ start @ turn[1].mT)
    optimizer = make([weight])
    path = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        (0.5 * (left @ (turn[0].mT @ weight @ turn[1]) @ right - target).square().sum()).backward()
        optimizer.step()
        path.append(turn[0].mT @ weight.detach() @ turn[1])
    return torch.stack(path)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(2, 5), st.sampled_from([1, 3, 10]), st.sampled_from([0, 0.1])
)
def test_turning_the_loss_turns_the_trajectory(seed, size, refresh_every, weight_decay):
    start = noise(size, size, seed=seed)
    turn = orthogonal(size, seed + 1), orthogonal(size, seed + 2)

    # Where gradients are small against eps, Adam does not blow rounding up.
    options = {"eps": 1e-4, "weight_decay": weight_decay, "refresh_every": refresh_every}

    def make(parameters):
        return RotatedAdam(parameters, lr=0.01, **options)

    straight, turned = trajectory(make, start), trajectory(make, start, turn)
    assert_same(turned, straight, rtol=0, atol=1e-5)
    assert (straight[-1] - straight[0]).abs().max() > 0.01


def test_adam_has_no_such_law():
    start = noise(4, 4, seed=1)
    turn = orthogonal(4, 2), orthogonal(4, 3)

    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=0.01)

    apart = trajectory(adam, start, turn) - trajectory(adam, start)
    assert apart.abs().max() > 0.01


def test_one_side_turns_with_that_side_only():
    def one_sided(parameters):
        return RotatedAdam(parameters, lr=0.01, one_sided=True)

    start, axes = noise(3, 3, seed=1), torch.eye(3, dtype=torch.float64)
    straight = trajectory(one_sided, start)
    rows = trajectory(one_sided, start, (orthogonal(3, 2), axes))
    columns = trajectory(one_sided, start, (axes, orthogonal(3, 2)))
    assert_same(rows, straight, rtol=0, atol=1e-6)
    assert (columns - straight).abs().max() > 0.01


def loss_after(make, delay, seed, num_steps=400, size=8):
    """The last steps' mean loss on a turned quadratic of condition 10⁶, with old gradients."""
    scales = torch.diag(torch.logspace(0, -1.5, size, dtype=torch.float64))
    axes = orthogonal(size, seed), orthogonal(size, seed + 1)
    left, right = (own @ scales @ own.mT for own in axes)
    target = noise(size, size, seed=seed + 2)
    weight = nn.Parameter(torch.zeros_like(target))
    optimizer = make([weight])
    read = deque([weight.detach().clone()] * (delay + 1), maxlen=delay + 1)
    losses = []
    for _ in range(num_steps):
        weight.grad = left @ (left @ (read[0] - target) @ right) @ right
        optimizer.step()
        read.append(weight.detach().clone())
        losses.append((left @ (read[-1] - target) @ right).square().sum())
    return torch.stack(losses[-20:]).mean().item()


@pytest.mark.parametrize("seed", [0, 10, 20])
def test_old_gradients_harm_adam_more(seed):
    def best(kind):
        def make(rate):
            return lambda parameters: kind(parameters, lr=rate, betas=(0.9, 0.95))

        return min(loss_after(make(rate), 8, seed) for rate in (0.1, 0.03, 0.01, 0.003))

    assert best(RotatedAdam) < 0.5 * best(torch.optim.Adam)


def test_the_first_step_has_no_rounding_in_it():
    """−lr·UVᵀ: all else in the rotated gradient is rounding, and must not become whole steps."""
    gradient = noise(40, 24, seed=0, dtype=torch.float32) @ torch.diag(torch.logspace(0, -3, 24))
    weight = nn.Parameter(torch.zeros(40, 24))
    optimizer = RotatedAdam([weight], lr=1.0)
    left, _, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    for number in (1, 2):  # the same again, as with full batches and delay
        weight.grad = gradient.clone()
        optimizer.step()
        step = -weight.detach().double() / number
        assert torch.linalg.matrix_norm(step, 2) < 2  # above 10 without the floor
        assert (step * (left @ right)).sum() / 24 > 0.98


def test_refreshed_bases_follow_the_gradients():
    """When gradients come to vary along other axes, the bases do so too, largest first."""
    weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    optimizer = RotatedAdam([weight], lr=1e-3, betas=(0.9, 0.9), refresh_every=2)
    weight.grad = noise(4, 4, seed=50)
    optimizer.step()
    axes = orthogonal(4, 1), orthogonal(4, 2)
    scales = torch.tensor([1.0, 8.0, 2.0, 4.0], dtype=torch.float64)
    for number in range(400):
        weight.grad = axes[0] @ torch.diag(scales * noise(4, seed=number)) @ axes[1].mT
        optimizer.step()
    order = [1, 3, 2, 0]
    for basis, own in zip(("left_basis", "right_basis"), axes, strict=True):
        overlap = (own[:, order].mT @ optimizer.state[weight][basis]).abs()
        assert_same(overlap, torch.eye(4, dtype=torch.float64), rtol=0, atol=0.02)
    # The second moments lie where their directions lie.
    seen = optimizer.state[weight]["exp_avg_sq"].diagonal()
    assert (seen.diff() < 0).all()
    assert seen.sum() / optimizer.state[weight]["exp_avg_sq"].sum() > 0.99


def test_bases_last_for_as_many_updates_as_asked():
    optimizer = RotatedAdam(weights((3, 3)), refresh_every=4)
    seen = []
    for number in range(10):
        train(optimizer, 1, first=number)
        seen.append(next(iter(optimizer.state.values()))["left_basis"].clone())
    changes = [number for number in range(1, 10) if not torch.equal(*seen[number - 1 : number + 1])]
    assert changes == [4, 8]


def test_second_moments_move_with_their_directions():
    """Two directions change places in size, without turning: their moments change places too."""
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    optimizer = RotatedAdam([weight], betas=(0.9, 0.5), refresh_every=4)
    moments = torch.zeros(2, dtype=torch.float64)
    for scales in [(2.0, 1.0)] + [(1.0, 3.0)] * 4:
        weight.grad = torch.diag(torch.tensor(scales, dtype=torch.float64))
        moments = 0.5 * moments + 0.5 * weight.grad.diagonal().square()
        optimizer.step()
    state = optimizer.state[weight]
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    assert_same(state["left_basis"].abs(), swap, rtol=0, atol=1e-12)
    assert_same(state["exp_avg_sq"].diagonal(), moments.flip(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("shape", "options", "sides"),
    [
        ((6, 4), {}, {"left": 6, "right": 4}),
        ((6, 4), {"max_dim": 4}, {"right": 4}),
        ((4, 6), {"max_dim": 5}, {"left": 4}),
        ((6, 4), {"max_dim": 3}, {}),
        ((6, 4), {"one_sided": True}, {"right": 4}),
        ((4, 6), {"one_sided": True}, {"left": 4}),
        ((4, 4), {"one_sided": True}, {"left": 4}),
        ((3, 2, 2, 2), {}, {"left": 3, "right": 8}),
        ((5, 1), {}, {}),
        ((5,), {}, {}),
    ],
)
def test_which_sides_are_rotated(shape, options, sides):
    optimizer = RotatedAdam(weights(shape), refresh_every=2, **options)
    train(optimizer, 5)
    (state,) = optimizer.state.values()
    kept = {f"{side}_{what}": (n, n) for side, n in sides.items() for what in ("moment", "basis")}
    usual = {"step", "exp_avg", "exp_avg_sq"}
    assert {name: tuple(value.shape) for name, value in state.items() if name not in usual} == kept
    for side, length in sides.items():
        basis = state[f"{side}_basis"]
        assert_same(basis.mT @ basis, torch.eye(length, dtype=basis.dtype), rtol=0, atol=1e-12)


def test_a_convolution_is_a_matrix_in_any_memory_format():
    plain, last = weights((3, 2, 2, 2)), weights((3, 2, 2, 2))
    last[0].data = last[0].data.to(memory_format=torch.channels_last)
    matrix = [nn.Parameter(plain[0].detach().flatten(1).clone())]
    optimizers = [RotatedAdam(own, refresh_every=2) for own in (plain, last, matrix)]
    for number in range(7):
        gradient = noise(3, 2, 2, 2, seed=number)
        plain[0].grad, matrix[0].grad = gradient, gradient.flatten(1)
        last[0].grad = gradient.to(memory_format=torch.channels_last)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(plain[0].flatten(1), matrix[0])
    assert_same(last[0], plain[0].data, rtol=0, atol=1e-12)
    assert last[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_to_the_bit(dtype, tmp_path):
    shapes = [(4, 3), (3,), (2, 2, 2)]
    whole = RotatedAdam(weights(*shapes, dtype=dtype), lr=0.1, refresh_every=3)
    expected = [train(whole, 5), train(whole, 8, first=5)][1]
    first = RotatedAdam(weights(*shapes, dtype=dtype), lr=0.1, refresh_every=3)
    middle = train(first, 5)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    resumed = RotatedAdam([nn.Parameter(weight) for weight in middle], lr=0.5)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert resumed.param_groups[0]["refresh_every"] == 3
    assert_same(train(resumed, 8, first=5), expected)
    for state in resumed.state.values():
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        assert {v.dtype for v in state.values() if isinstance(v, torch.Tensor)} == {kept}


def test_a_deep_copy_of_rotated_adam_goes_on_to_the_bit():
    optimizer = RotatedAdam(weights((4, 3), (3,)), lr=0.1, refresh_every=3)
    train(optimizer, 5)
    twin = copy.deepcopy(optimizer)
    expected = train(optimizer, 8, first=5)
    assert_same(train(twin, 8, first=5), expected)


def test_half_precision_follows_full_precision():
    full = train(RotatedAdam(weights((4, 3), dtype=torch.float32), lr=0.1), 4)[0]
    half = train(RotatedAdam(weights((4, 3), dtype=torch.bfloat16), lr=0.1), 4)[0]
    assert half.dtype == torch.bfloat16
    assert_same(half.float(), full, rtol=0.02, atol=0.05)


def test_parameters_without_gradient_are_left_alone():
    parameters = weights((2, 2), (2, 2))
    before = parameters[1].detach().clone()
    optimizer = RotatedAdam(parameters, weight_decay=0.1)
    parameters[0].grad = noise(2, 2, seed=1)
    optimizer.step()
    assert_same(parameters[1].detach(), before)
    assert parameters[1] not in optimizer.state


def test_gradients_of_0_at_first_give_no_directions():
    """As behind a head that begins at 0: the bases are those of the first real gradient."""
    late, early = weights((3, 3)), weights((3, 3))
    optimizers = RotatedAdam(late, weight_decay=0.1), RotatedAdam(early)
    late[0].grad = torch.zeros_like(late[0])
    optimizers[0].step()
    assert_same(late[0].detach(), 0.9999 * early[0].detach(), rtol=1e-12, atol=0)
    late[0].grad, early[0].grad = noise(3, 3, seed=1), noise(3, 3, seed=1)
    for optimizer in optimizers:
        optimizer.step()
    bases = [
        optimizer.state[own[0]] for optimizer, own in zip(optimizers, (late, early), strict=True)
    ]
    assert_same(bases[0]["left_basis"], bases[1]["left_basis"])


def test_a_gradient_that_is_not_finite_can_be_taken_back():
    parameters = weights((3, 3))
    optimizer = RotatedAdam(parameters)
    before, saved = parameters[0].detach().clone(), copy.deepcopy(optimizer.state_dict())
    parameters[0].grad = torch.full_like(parameters[0], float("inf"))
    optimizer.step()
    assert parameters[0].isnan().any()
    with torch.no_grad():
        parameters[0].copy_(before)
    optimizer.load_state_dict(saved)
    assert_same(train(optimizer, 3), train(RotatedAdam(weights((3, 3))), 3))


def test_other_kinds_of_gradient_are_refused_before_anything_changes():
    matrix, table = nn.Parameter(torch.ones(2, 2)), nn.Embedding(3, 2, sparse=True)
    optimizer = RotatedAdam([matrix, table.weight])
    matrix.grad = torch.ones(2, 2)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError, match=r"sparse gradient of a parameter of shape \(3, 2\)"):
        optimizer.step()
    assert_same(matrix.detach(), torch.ones(2, 2))
    waves = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    waves.grad = torch.ones_like(waves)
    with pytest.raises(InputError, match="complex gradient"):
        RotatedAdam([waves]).step()


def test_a_closure_is_evaluated_with_gradients():
    (weight,) = weights((2, 2))
    optimizer = RotatedAdam([weight])

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


def test_groups_have_options_of_their_own():
    first, second = weights((3, 3), (3, 3))
    optimizer = RotatedAdam([{"params": [first], "lr": 0.0}, {"params": [second], "max_dim": 2}])
    before = first.detach().clone()
    train(optimizer, 2)
    assert_same(first.detach(), before)
    assert "left_basis" not in optimizer.state[second]
    with pytest.raises(InputError, match="refresh_every is 0"):
        optimizer.add_param_group({"params": weights((2,)), "refresh_every": 0})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1}, "lr is -1"),
        ({"betas": (1.0, 0.9)}, "beta1 is 1.0"),
        ({"betas": (0.9, -0.1)}, "beta2 is -0.1"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"weight_decay": "0.1"}, "weight_decay is '0.1'"),
        ({"refresh_every": 0}, "refresh_every is 0"),
        ({"max_dim": 2.5}, "max_dim is 2.5"),
    ],
)
def test_rotated_adam_refuses_options_out_of_range(options, message):
    with pytest.raises(InputError, match=message):
        RotatedAdam(weights((2, 2)), **options)


def test_rotation_and_delay_correction_go_together():
    parameters = Delayed(weights((3, 3)), 4.0, 5)
    before = parameters[0].detach().clone()
    make = delay_corrected(lambda own: RotatedAdam(own, lr=0.1), anneal_updates=10)
    own = train(make(parameters), 1)[0] - before
    plain = train(RotatedAdam(weights((3, 3)), lr=0.1), 1)[0] - before
    assert_same(own, plain / 4, rtol=1e-9, atol=1e-12)
