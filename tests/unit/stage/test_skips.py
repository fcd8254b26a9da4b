"""Skips: what one layer leaves for another beyond the next, within a stage and across stages."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.base.errors import InputError, ModelError
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import run_spine, spine_of
from penstock.engine.stage.stage import Keep, Stage
from penstock.training.profiler import profile
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.helpers import Net


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value):
        return torch.tanh(self.linear(value))


class Stash(Plain):
    """Stashes nested values, one of which needs no gradient and one of which is the output."""

    def __init__(self, key):
        super().__init__()
        self.stashes = (key,)

    def forward(self, value):
        output = super().forward(value)
        return output, {self.stashes[0]: {"all": (value * 2, output), "sign": value.detach() > 0}}


class Recall(Plain):
    def __init__(self, key):
        super().__init__()
        self.recalls = (key,)

    def forward(self, value, **skips):
        skip = skips[self.recalls[0]]
        return super().forward(value) + skip["all"][0] * skip["sign"] - skip["all"][1]


class Exchange(nn.Module):
    """Recalls one key and stashes the same value under another."""

    recalls = ("first",)
    stashes = ("again",)

    def forward(self, value, first):
        return value + first["all"][0], {"again": first}


def u_net():
    torch.manual_seed(0)
    return Net(
        Plain(), Stash("first"), nn.Dropout(0.3), Stash("inner"), nn.ReLU(inplace=False),
        Recall("inner"), Exchange(), Plain(), Recall("again"), nn.Linear(4, 2),
    )  # fmt: skip


def loss(output, targets):
    return F.mse_loss(output, targets)


def stages_of(model, cuts, recompute_layers=False):
    layers = spine_of(model)
    borders = [0, *cuts, len(layers)]
    streams = LayerStreams(0)
    return [
        Stage(index, layers[start:end], start, streams, recompute_layers)
        for index, (start, end) in enumerate(itertools.pairwise(borders))
    ]


def run_stages(stages, inputs, targets, keep=Keep.EVERYTHING, after=Keep.EVERYTHING):
    """One microbatch through all stages and back; skips go straight to whoever recalls them."""
    value, skips, produced = inputs, {}, {}
    for stage in stages:
        last = stage is stages[-1]
        recalled = {key: skips.pop(key) for key in stage.recalls}
        result = stage.forward(
            0, value, 0, (lambda o: loss(o, targets)) if last else None, keep, recalled
        )
        value, produced[stage] = result.value, list(result.skips)
        skips.update(result.skips)
    assert not skips
    gradients, skip_gradients = [torch.ones(())], {}
    for stage in reversed(stages):
        if keep is Keep.INPUT:
            stage.recompute(0, after)
        wanted = {key: skip_gradients.pop(key) for key in produced[stage]}
        split = (after if keep is Keep.INPUT else keep) is Keep.SPLIT
        back = (stage.backward_input if split else stage.backward)(0, gradients, wanted)
        if split:
            stage.backward_weight(0)
        gradients, _ = back
        skip_gradients.update(back.skips)
    assert not skip_gradients
    return value


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 9), max_size=4).map(sorted),
    keep=st.sampled_from(Keep),
    after=st.sampled_from([Keep.EVERYTHING, Keep.SPLIT]),
    recompute_layers=st.booleans(),
)
def test_wherever_the_model_is_cut_skips_arrive_and_their_gradients_return(
    cuts, keep, after, recompute_layers
):
    model = u_net()
    twin = copy.deepcopy(model)
    inputs, targets = torch.randn(5, 4), torch.randn(5, 2)
    expected = SingleDevice(twin, 1, loss, None).step(inputs, targets)
    found = run_stages(stages_of(model, cuts, recompute_layers), inputs, targets, keep, after)
    assert torch.equal(found, expected)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_without_dropout_the_models_own_forward_is_the_same():
    model = u_net().eval()
    inputs, targets = torch.randn(5, 4), torch.randn(5, 2)
    found = run_stages(stages_of(model, [3, 4, 7]), inputs, targets)
    assert torch.equal(found, loss(model(inputs), targets))
    assert torch.equal(SingleDevice(model, 1, loss, None).evaluate(inputs), model(inputs))


def test_a_skip_within_a_stage_does_not_leave_it():
    stage = stages_of(Net(Stash("first"), Recall("first")), [])[0]
    produced = stage.forward(0, torch.ones(1, 4))
    assert produced.skips == {}
    assert stage.recalls == ()
    assert stage.backward(0, [torch.ones(1, 4)]).skips == {}


def test_a_produced_skip_has_no_graph_and_a_recalled_one_gives_a_gradient_per_leaf():
    first, second = stages_of(Net(Stash("first"), Recall("first")), [1])
    produced = first.forward(0, torch.ones(1, 4))
    leaves = [*produced.skips["first"]["all"], produced.skips["first"]["sign"]]
    assert [leaf.requires_grad for leaf in leaves] == [False, True, False]
    assert all(leaf.is_leaf for leaf in leaves)
    second.forward(0, produced.value, skips=produced.skips)
    back = second.backward(0, [torch.ones(1, 4)])
    assert [gradient is None for gradient in back.skips["first"]] == [True, False, True]
    first.backward(0, back.inputs, back.skips)
    # A skip that gets no gradient contributes none.
    first.forward(0, torch.ones(1, 4))
    first.backward(0, [torch.ones(1, 4)])
    first.forward(0, torch.ones(1, 4))
    with pytest.raises(InputError, match=r"skips \['other'\], but the forward gave \['first'\]"):
        first.backward(0, [torch.ones(1, 4)], {"other": [None]})


def test_a_stage_takes_exactly_the_skips_that_it_recalls():
    _, second = stages_of(Net(Stash("first"), Recall("first")), [1])
    with pytest.raises(InputError, match=r"stage 1 recalls \['first'\] .* was given \[\]"):
        second.forward(0, torch.ones(1, 4))
    with pytest.raises(InputError, match=r"was given \['first', 'other'\]"):
        second.forward(0, torch.ones(1, 4), skips={"first": 1, "other": 2})


def naming(stashes=(), recalls=()):
    layer = nn.Identity()
    layer.stashes, layer.recalls = stashes, recalls
    return layer


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([naming(["a"]), naming(["a"])], r"'layers.0' and 'layers.1' both stash 'a'"),
        (
            [naming(["a"]), naming((), ["a"]), naming((), ["a"])],
            r"'layers.1' and 'layers.2' both recall 'a'",
        ),
        ([naming((), ["a"])], r"'layers.0' recalls 'a', which no layer before it stashes"),
        ([naming((), ["a"]), naming(["a"])], r"'layers.0' recalls 'a', which no layer before"),
        ([naming(["a"], ["a"])], r"'layers.0' recalls 'a', which no layer before"),
        ([naming(["a"]), naming()], r"'layers.0' stashes 'a', which no layer after it recalls"),
        ([naming(["a b"])], r"'layers.0' has stashes = \['a b'\]; .* names"),
        ([naming((), "a")], r"'layers.0' has recalls = 'a'; they must be a tuple"),
        ([naming([1])], r"'layers.0' has stashes = \[1\]"),
        ([naming(["class"])], r"'layers.0' has stashes = \['class'\]"),
    ],
)
def test_skips_that_do_not_fit_together_are_refused_by_name(layers, message):
    with pytest.raises(ModelError, match=message):
        spine_of(Net(*layers))
    with pytest.raises(ModelError):
        run_spine(layers, torch.ones(1))


@pytest.mark.parametrize("result", [1, (1,), (1, 2), (1, {}), (1, {"a": 1, "b": 2}), [1, {"a": 1}]])
def test_a_layer_must_return_what_it_says_it_stashes(result):
    class Wrong(nn.Module):
        stashes = ("a",)

        def forward(self, value):
            return result

    with pytest.raises(ModelError, match=r"layer '0 \(Wrong\)' says it stashes a, .*\{'a': …\}"):
        run_spine([Wrong(), naming((), ["a"])], torch.ones(1))


@pytest.mark.parametrize("cuts", [[], [1], [2]])
def test_a_skip_that_is_overwritten_in_place_is_noticed(cuts):
    class Both(nn.Module):
        stashes = ("a",)

        def forward(self, value):
            output = value * 2
            return output, {"a": output}

    class Sum(nn.Module):
        recalls = ("a",)

        def forward(self, value, a):
            return value + a

    model = Net(Both(), nn.ReLU(inplace=True), Sum())
    with pytest.raises(ModelError, match="skip 'a' was overwritten in place"):
        model(torch.ones(2))
    if cuts != [1]:
        with pytest.raises(ModelError, match="skip 'a' was overwritten in place"):
            run_stages(stages_of(model, cuts), torch.ones(2), torch.ones(2))


def test_a_profile_counts_the_skips_that_cross_a_cut():
    model = Net(Plain(), Stash("a"), Plain(), Recall("a"))
    graph = profile(model, torch.randn(3, 4), repeats=1, ranks=0)
    value = 3 * 4 * 4
    skip = 2 * value + 3 * 4
    sizes = [layer.output_bytes for layer in graph.layers]
    assert sizes == [value] * 4
    assert graph.crossing_bytes == (value, value + skip, value + skip)
    assert all(layer.backward_seconds > 0 for layer in graph.layers)


def test_a_profile_with_a_loss_runs_through_skips():
    model = u_net()
    graph = profile(
        model, torch.randn(3, 4), loss=loss, targets=torch.randn(3, 2), repeats=1, ranks=0
    )
    assert len(graph.layers) == 10
    assert all(parameter.grad is None for parameter in model.parameters())
