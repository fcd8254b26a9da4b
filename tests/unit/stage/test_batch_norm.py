"""Running statistics of whole minibatches: against torch's batch norm on the uncut minibatch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.base.errors import InputError
from penstock.engine.stage.batch_norm import MinibatchStatistics

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def buffers(layer):
    return {name: getattr(layer, name).clone() for name in BUFFERS}


def assert_same(layer, expected, tolerance=0.0):
    for name in BUFFERS:
        torch.testing.assert_close(
            getattr(layer, name), getattr(expected, name), rtol=tolerance, atol=tolerance
        )


def assert_unmoved(layer, before):
    assert all(torch.equal(getattr(layer, name), before[name]) for name in BUFFERS)


SHAPES = {
    "NC": (nn.BatchNorm1d, (3,)),
    "NCL": (nn.BatchNorm1d, (3, 5)),
    "NCHW": (nn.BatchNorm2d, (3, 4, 2)),
    "NCDHW": (nn.BatchNorm3d, (3, 2, 2, 2)),
}


@settings(max_examples=100)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    steps=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=5), min_size=1, max_size=3),
    momentum=st.sampled_from([0.1, 1.0, 0.0, None]),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    offset=st.sampled_from([0.0, 3.0]),
)
def test_however_it_is_cut_the_statistics_are_those_of_the_whole_minibatch(
    shape, steps, momentum, dtype, offset
):
    kind, rest = SHAPES[shape]
    layer = kind(3, momentum=momentum, dtype=dtype)
    expected = copy.deepcopy(layer)
    statistics = MinibatchStatistics([layer])
    least = 2 if shape == "NC" else 1  # torch refuses one value per channel
    for sizes in steps:
        pieces = [torch.randn(max(size, least), *rest, dtype=dtype) + offset for size in sizes]
        before = buffers(layer)
        for piece in pieces:
            layer(piece)
        assert_unmoved(layer, before)
        statistics.commit()
        expected(torch.cat(pieces))
        assert_same(layer, expected, TOLERANCE[dtype])


def test_a_large_mean_cancels_no_digits():
    layer = nn.BatchNorm1d(3, momentum=1.0, dtype=torch.float64)
    expected = copy.deepcopy(layer)
    inputs = torch.randn(64, 3, dtype=torch.float64) + 1e6
    statistics = MinibatchStatistics([layer])
    for piece in inputs.split([5, 2, 40, 17]):
        layer(piece)
    statistics.commit()
    expected(inputs)
    assert_same(layer, expected, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_the_microbatch_to_the_bit(dtype):
    layer = nn.BatchNorm2d(3, dtype=dtype)
    plain = copy.deepcopy(layer)
    inputs = torch.randn(4, 3, 5, 5, dtype=dtype)
    MinibatchStatistics([layer])
    results = []
    for one in (layer, plain):
        leaf = inputs.clone().requires_grad_()
        output = one(leaf)
        output.square().sum().backward()
        results.append([output, leaf.grad, one.weight.grad, one.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_layers_inside_a_model_are_found_once():
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Sequential(nn.BatchNorm1d(4), shared))
    statistics = MinibatchStatistics([model, shared])
    assert statistics.layers == (shared, model[2][0])


def test_a_layer_without_running_statistics_is_left_alone():
    layer = nn.BatchNorm1d(3, track_running_stats=False)
    statistics = MinibatchStatistics([layer, nn.Linear(3, 3)])
    assert statistics.layers == ()
    layer(torch.randn(4, 3))
    statistics.commit()
    assert layer.running_mean is None


def test_batch_norm_that_spans_processes_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.SyncBatchNorm(3))
    with pytest.raises(InputError, match=r"layer '1' of Sequential is a SyncBatchNorm.*BatchNorm"):
        MinibatchStatistics([model])


def test_evaluation_is_untouched():
    layer = nn.BatchNorm1d(3)
    statistics = MinibatchStatistics([layer])
    layer(torch.randn(5, 3))
    statistics.commit()
    twin = nn.BatchNorm1d(3)
    twin.load_state_dict(layer.state_dict())
    before = buffers(layer)
    inputs = torch.randn(1, 3)
    layer.eval()
    assert torch.equal(layer(inputs), twin.eval()(inputs))
    statistics.commit()
    assert_unmoved(layer, before)


def test_commit_counts_a_minibatch_once():
    layer = nn.BatchNorm1d(3)
    statistics = MinibatchStatistics([layer])
    layer(torch.randn(5, 3))
    statistics.commit()
    before = buffers(layer)
    statistics.commit()
    assert_unmoved(layer, before)


def test_a_failed_step_leaves_nothing():
    layer = nn.BatchNorm1d(3)
    expected = copy.deepcopy(layer)
    statistics = MinibatchStatistics([layer])
    layer(torch.randn(5, 3) + 100)
    statistics.forget()
    inputs = torch.randn(5, 3)
    layer(inputs)
    statistics.commit()
    expected(inputs)
    assert_same(layer, expected, 1e-6)


def test_a_forward_that_fails_counts_nothing_and_puts_the_layer_back():
    layer = nn.BatchNorm1d(3)
    before = buffers(layer)
    statistics = MinibatchStatistics([layer])
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1, 3))
    assert layer.track_running_stats
    statistics.commit()
    assert_unmoved(layer, before)


def test_a_recomputation_counts_nothing_while_paused():
    layer = nn.BatchNorm1d(3)
    expected = copy.deepcopy(layer)
    statistics = MinibatchStatistics([layer])
    inputs = torch.randn(6, 3)
    for piece in inputs.split(2):
        layer(piece)
    with statistics.paused():
        for piece in inputs.split(2):
            layer(piece)
            with statistics.paused():
                layer(piece)
            layer(piece)
    statistics.commit()
    expected(inputs)
    assert_same(layer, expected, 1e-6)


def test_a_checkpointed_layer_counts_once_if_its_backward_is_paused():
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    expected = copy.deepcopy(layer)
    statistics = MinibatchStatistics([layer])
    inputs = torch.randn(6, 3, requires_grad=True)
    for piece in inputs.split([4, 2]):
        output = checkpoint(layer, piece, use_reentrant=False)
        with statistics.paused():
            output.square().sum().backward()
    statistics.commit()
    expected(inputs)
    assert_same(layer[1], expected[1], 1e-6)


def test_after_a_pause_that_fails_counting_goes_on():
    layer = nn.BatchNorm1d(3)
    statistics = MinibatchStatistics([layer])
    with pytest.raises(KeyError), statistics.paused():
        raise KeyError
    layer(torch.randn(5, 3))
    statistics.commit()
    assert layer.num_batches_tracked == 1


def test_infinite_values_reach_the_statistics_only_with_the_commit():
    layer = nn.BatchNorm1d(3)
    before = buffers(layer)
    statistics = MinibatchStatistics([layer])
    layer(torch.full((2, 3), math.inf))
    assert_unmoved(layer, before)
    statistics.commit()
    assert not layer.running_mean.isfinite().any()


def test_closed_it_lets_the_layer_move_by_itself_again():
    layer = nn.BatchNorm1d(3)
    expected = copy.deepcopy(layer)
    statistics = MinibatchStatistics([layer])
    layer(torch.randn(5, 3))
    statistics.close()
    inputs = torch.randn(5, 3)
    layer(inputs)
    expected(inputs)
    assert_same(layer, expected)
    statistics.commit()
    assert_same(layer, expected)
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_half_precision_inputs_are_gathered_in_more():
    layer = nn.BatchNorm1d(3, momentum=1.0)
    expected = copy.deepcopy(layer)
    inputs = (torch.randn(64, 3) + 50).bfloat16()
    statistics = MinibatchStatistics([layer])
    for piece in inputs.split(16):
        layer(piece)
    statistics.commit()
    expected(inputs)
    assert_same(layer, expected, 1e-4)


def test_nothing_of_the_graph_is_kept():
    layer = nn.BatchNorm1d(3)
    statistics = MinibatchStatistics([layer])
    layer(torch.randn(5, 3, requires_grad=True))
    statistics.commit()
    assert not layer.running_mean.requires_grad
    assert layer.running_mean.grad_fn is None
