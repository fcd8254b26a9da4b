"""What tracing does not see is refused or said: draws, backwards, hooks, attributes."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.base.errors import ModelError
from penstock.engine.tracing import capture
from penstock.engine.tracing.unseen import check_backward

pytestmark = pytest.mark.xdist_group("capture")  # loading torch.export takes longest


class Model(nn.Module):
    """A model whose forward says in ``between`` what it does between its layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, value):
        return self.last(self.between(self.first(value)))

    def between(self, value):
        raise NotImplementedError


def captured(between):
    return capture(type("Named", (Model,), {"between": between})(), torch.randn(4, 6))


class WithPython(nn.Module):
    def forward(self, value):
        return value if random.random() < 0.5 else value + np.random.rand()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient


class Doubling(nn.Module):
    def forward(self, value):
        value.register_hook(lambda gradient: 3 * gradient)
        return Twice.apply(value)


def drawn_by_python(self, value):
    rate = random.uniform(0, 1)
    return value * rate


def drawn_by_numpy(self, value):
    return value * np.random.rand()


@pytest.mark.parametrize(
    ("between", "line"),
    [
        (drawn_by_python, r"in drawn_by_python, `rate = random\.uniform\(0, 1\)`"),
        (drawn_by_numpy, r"in drawn_by_numpy, `return value \* np\.random\.rand\(\)`"),
    ],
)
def test_numbers_that_a_graph_would_keep_are_refused_with_the_line(between, line):
    with pytest.raises(ModelError, match=f"Named would always do .*{line}.*Draw with torch"):
        captured(between)


def test_numbers_drawn_in_training_only_are_refused_whatever_they_are():
    def between(self, value):
        return value if self.training and random.random() < -1 else value + 1

    with pytest.raises(ModelError, match="would always do"):
        captured(between)


def test_a_frozen_draw_of_torch_is_no_second_choice():
    def between(self, value):
        return value if torch.rand(()) < 0.5 else value + 1

    model = type("Named", (Model,), {"between": between})()
    before = torch.get_rng_state()
    with pytest.raises(ModelError, match=r"in between, `return .*whether a layer runs.*Drop rows"):
        capture(model, torch.ones(4, 6))
    assert torch.equal(before, torch.get_rng_state())


def test_a_backward_of_its_own_is_refused_where_it_would_get_lost():
    with pytest.raises(ModelError, match=r"applies Twice, an autograd\.Function of its own"):
        captured(lambda self, value: Twice.apply(value))


def hooked(self, value):
    value.register_hook(lambda gradient: -gradient)
    return value


def hooked_if_trained(self, value):
    if value.requires_grad:
        value.register_hook(lambda gradient: -gradient)
    return value


@pytest.mark.parametrize("between", [hooked, hooked_if_trained])
def test_a_hook_on_a_tensor_is_refused_with_the_line(between):
    with pytest.raises(
        ModelError, match=rf"in {between.__name__}, `value\.register_hook.*no graph"
    ):
        captured(between)


def test_modules_that_stay_whole_may_do_all_of_that():
    class Whole(Model):
        def __init__(self):
            super().__init__()
            self.drawing, self.doubling = WithPython(), Doubling()

        def between(self, value):
            return self.doubling(self.drawing(value))

    model = Whole()
    python, numpy = random.getstate(), np.random.get_state()[1].copy()
    random.seed(0)
    state = random.getstate()
    whole = capture(model, torch.randn(4, 6), verify=False)
    assert random.getstate() == state
    value = torch.randn(3, 6)
    gradients = []
    for runs in (model, whole):
        random.seed(1)
        np.random.seed(1)
        model.zero_grad()
        runs(value).sum().backward()
        gradients.append(model.first.weight.grad.clone())
    assert torch.equal(*gradients)
    random.setstate(python)
    assert len(numpy)


def test_attributes_that_a_forward_sets_are_put_back_and_said():
    def between(self, value):
        self.calls += 1
        self.seen.append(value)
        self.newest = value
        return value

    model = type("Named", (Model,), {"between": between})()
    model.calls, model.seen = 0, []
    with pytest.warns(UserWarning, match="forward of Named sets calls, newest, seen") as said:
        capture(model, torch.randn(4, 6))
    assert said[0].filename == __file__
    assert (model.calls, model.seen, hasattr(model, "newest")) == (0, [], False)


def test_attributes_that_stay_as_they_are_are_nobodys_business():
    model = type("Named", (Model,), {"between": lambda self, value: value * len(self.kept)})()
    model.kept, model.scale = [1, 2], {"one": 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(model, torch.randn(4, 6))
    assert model.kept == [1, 2]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_torch_that_a_graph_would_not_run_again_is_refused(reentrant):
    def between(self, value):
        return checkpoint(self.inner, value, use_reentrant=reentrant)

    model = type("Named", (Model,), {"between": between})()
    model.inner = nn.Linear(6, 6)
    if reentrant:
        with pytest.raises(ModelError, match="give checkpoint use_reentrant=False, or leave it"):
            capture(model, torch.randn(4, 6))
        return
    layers = capture(model, torch.randn(4, 6))
    value = torch.randn(3, 6)
    layers(value).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(value).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_gradients_that_end_elsewhere_are_refused():
    value = torch.randn(2, 3, requires_grad=True)
    other = torch.randn(2, 3, requires_grad=True)
    check_backward("Model", value * other, other * value, None)
    with pytest.raises(ModelError, match="reach 2 of its parameters, but 1 if it is run layer by"):
        check_backward("Model", value * other, value.detach() * other, None)


def test_inputs_may_be_views():
    tokens = torch.randint(0, 5, (4, 7))
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3))
    layers = capture(model, tokens[:, :-1])
    for given in (tokens[:, 1:], tokens[:2, :-1].contiguous()):
        assert torch.equal(layers(given), model(given))


def test_a_tensor_that_the_first_call_keeps_is_refused():
    def kept_by_the_first_call(self, value):
        if not hasattr(self, "kept"):
            self.kept = self.first.weight.detach().clone()
        return value @ self.kept

    with pytest.raises(ModelError, match="makes a tensor when it is first called"):
        captured(kept_by_the_first_call)


def test_a_generator_of_its_own_is_told_apart_from_numbers_of_rows():
    generator = torch.Generator().manual_seed(0)

    def noisy(self, value):
        return value + torch.rand(value.shape, generator=generator)

    # Newer releases of torch trace it, and the model that comes out draws otherwise.
    with pytest.raises(
        ModelError, match=r"(another model: .* Its forward may do|traced) .*Generator"
    ):
        captured(noisy)
