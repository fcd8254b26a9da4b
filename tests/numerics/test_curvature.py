"""The estimate of a loss's curvature is the largest eigenvalue of its Hessian, or is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.base.errors import InputError, ModelError
from penstock.trial import Workload, largest_curvature, stage_curvatures
from tests.kit.helpers import make_batch, make_plan
from tests.kit.tiny_models import Once


class Bowl(nn.Module):
    """A quadratic with given curvatures, one per entry of its only weight."""

    def __init__(self, curvatures):
        super().__init__()
        self.curvatures = torch.tensor(curvatures, dtype=torch.float64)
        self.weight = nn.Parameter(torch.ones_like(self.curvatures))

    def forward(self, value):
        return 0.5 * (self.curvatures * self.weight**2).sum()


def curvature_of(curvatures, steps):
    bowl = Bowl(curvatures)
    nothing = torch.zeros(1)
    return largest_curvature(bowl, lambda out, _: out, (nothing, nothing), [bowl.weight], steps)


@pytest.mark.parametrize("largest", [14.0, 0.002])
def test_the_curvature_of_a_quadratic_is_its_largest_eigenvalue(largest):
    spectrum = [largest * factor for factor in (0.1, 0.3, 0.5, 0.8, 1.0)]
    assert curvature_of(spectrum, 5) == pytest.approx(largest, rel=1e-9)
    assert curvature_of(spectrum, 50) == pytest.approx(largest, rel=1e-9)
    wide = torch.linspace(0, 0.7 * largest, 300).tolist()
    assert curvature_of([*wide, largest], 20) == pytest.approx(largest, rel=1e-3)
    estimates = [curvature_of([*wide, largest], steps) for steps in (1, 3, 6, 12)]
    assert estimates == sorted(estimates) and estimates[-1] <= largest


def test_a_large_negative_eigenvalue_hides_nothing_and_a_plane_has_none():
    assert curvature_of([-50.0, 1.0, 3.0], 3) == pytest.approx(3, rel=1e-9)
    assert curvature_of([-5.0, -2.0], 2) == pytest.approx(-2, rel=1e-9)
    assert curvature_of([0.0, 0.0], 5) == 0


def test_parameters_without_a_part_in_the_loss_have_no_curvature():
    class Aside(Bowl):
        def __init__(self):
            super().__init__([2.0, 5.0])
            self.straight = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.unused = nn.Parameter(torch.ones(2))

        def forward(self, value):
            return super().forward(value) + self.straight.sum()

    aside, batch = Aside(), (torch.zeros(1), torch.zeros(1))

    def estimate(parameters):
        return largest_curvature(aside, lambda out, _: out, batch, parameters, 4)

    assert estimate(aside.parameters()) == pytest.approx(5, rel=1e-9)
    assert estimate([aside.straight, aside.unused]) == 0


def test_the_curvature_of_each_stage_is_that_of_its_block_of_the_hessian():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.Flatten()]
    model = nn.Sequential(*layers).double()
    inputs, targets = torch.randn(6, 4).double(), torch.randn(6, 2).double()
    small = Workload(lambda: model, F.mse_loss, torch.optim.SGD, lambda: iter([(inputs, targets)]))
    told = []
    plan = make_plan(model, 3, 2, cuts=[1, 3])
    found = stage_curvatures(small, plan, 12, lambda *done: told.append(done))
    assert told == [(1, 3), (2, 3), (3, 3)]

    def loss_of(index):
        def loss(weight, bias):
            own = {f"{index}.weight": weight, f"{index}.bias": bias}
            return F.mse_loss(torch.func.functional_call(model, own, (inputs,)), targets)

        return loss

    first = block_curvature(loss_of(0), (layers[0].weight, layers[0].bias))
    # Tanh stands in the second stage, without weights.
    second = block_curvature(loss_of(2), (layers[2].weight, layers[2].bias))
    assert found == pytest.approx([first, second, 0.0], rel=1e-3)


def block_curvature(loss, parameters):
    blocks = torch.autograd.functional.hessian(loss, parameters)
    sizes = [one.numel() for one in parameters]
    rows = [
        torch.cat([block.reshape(size, -1) for block in row], dim=1)
        for size, row in zip(sizes, blocks, strict=True)
    ]
    return float(torch.linalg.eigvalsh(torch.cat(rows))[-1])


def test_an_estimate_leaves_no_trace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    state = torch.get_rng_state()
    with torch.no_grad():
        found = largest_curvature(model, F.cross_entropy, make_batch(8), model.parameters(), 4)
    assert found > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())


class OnlyOnce(nn.Linear):
    def forward(self, value):
        return Once.apply(super().forward(value) ** 2)


class Kernel(nn.Linear):
    """As an op of which torch knows no second derivative."""

    def forward(self, value):
        rows = super().forward(value).view(len(value), 1, 1, 4)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(rows, rows, rows).view(len(value), 4)


@pytest.mark.parametrize(
    ("layer", "why"), [(OnlyOnce, "Once is once_differentiable"), (Kernel, "not implemented")]
)
def test_what_cannot_be_differentiated_twice_is_said(layer, why):
    model = layer(16, 4)
    with pytest.raises(ModelError, match=rf"cannot be differentiated twice: .*{why}"):
        largest_curvature(model, F.cross_entropy, make_batch(8), model.parameters())


def test_estimates_that_make_no_sense_are_refused():
    model = nn.Linear(16, 4)
    with pytest.raises(InputError, match="steps is 0"):
        largest_curvature(model, F.cross_entropy, make_batch(8), model.parameters(), 0)
    with pytest.raises(ModelError, match="the loss of the first minibatch is nan"):
        largest_curvature(model, lambda *_: torch.tensor(torch.nan), make_batch(8),
                          model.parameters())  # fmt: skip
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert largest_curvature(model, F.cross_entropy, make_batch(8), model.parameters()) == 0
