"""Counting activations: against numbers known on paper, and against what is really alive."""

from __future__ import annotations

import gc
import itertools
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from penstock.demo.gpt import Block
from penstock.engine.device.activation_meter import ActivationMeter
from tests.kit.alive import Alive
from tests.kit.examples import in_turns
from tests.kit.helpers import Lambda


class Checkpointed(nn.Module):
    """A layer that is run again in the backward."""

    def __init__(self, module, reentrant):
        super().__init__()
        self.module = module
        self.reentrant = reentrant

    def forward(self, value):
        return checkpoint(
            self.module, value, use_reentrant=self.reentrant, preserve_rng_state=False
        )


class Cube(torch.autograd.Function):
    """Saves its input, its output and something that is no tensor."""

    @staticmethod
    def forward(ctx, value):
        cube = value * value * value
        ctx.save_for_backward(value, cube, None)
        ctx.exponent = 3
        return cube

    @staticmethod
    def backward(ctx, gradient):
        value, _, _ = ctx.saved_tensors
        return gradient * ctx.exponent * value.square()


def meter_for(module):
    return ActivationMeter([*module.parameters(), *module.buffers()])


def measured(module, *shape):
    """Live bytes after a forward of which only the graph is left."""
    meter = meter_for(module)
    inputs = torch.randn(shape, requires_grad=True) * 1
    with meter.watching((0, 0)):
        edge = get_gradient_edge(module(inputs))
    del inputs
    bytes_held = meter.live_bytes
    del edge
    assert meter.live_bytes == 0
    return bytes_held


def two_layers():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


FLOAT = 4
ON_PAPER = {
    "Linear: its input": (lambda: nn.Linear(6, 5), (4, 6), 24),
    "ReLU: its output": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU()), (4, 6), 24 + 20),
    "ReLU in place: the same": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True)),
        (4, 6),
        24 + 20,
    ),
    "an output that the next layer saves, too": (
        lambda: nn.Sequential(nn.Tanh(), nn.Linear(6, 5)),
        (4, 6),
        24,
    ),
    "a tensor that many layers save": (
        lambda: Lambda(lambda value: value.sin() + value.cos() * value),
        (4, 6),
        24 + 24,  # the value, and its cosine for the product
    ),
    "views: the memory behind them": (
        lambda: Lambda(lambda value: value[0].sin() + value[1].sin() + value.t()[0, 0].sin()),
        (4, 6),
        24,
    ),
    "convolution and ReLU": (
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(inplace=True)),
        (2, 3, 8, 8),
        2 * 3 * 64 + 2 * 5 * 64,
    ),
    "a custom function": (lambda: Lambda(Cube.apply), (4, 6), 2 * 24),
    "checkpointed: its input": (lambda: Checkpointed(two_layers(), False), (4, 6), 24),
    "checkpointed, reentrant": (lambda: Checkpointed(two_layers(), True), (4, 6), 24),
    "batch norm: input, mean and deviation": (lambda: nn.BatchNorm1d(6), (4, 6), 24 + 6 + 6),
    "nothing": (lambda: Lambda(lambda value: value.reshape(-1)[2:] + 1), (4, 6), 0),
}


@pytest.mark.parametrize("what", ON_PAPER)
def test_it_counts_what_is_known_on_paper(what):
    build, shape, numbers = ON_PAPER[what]
    assert measured(build(), *shape) == numbers * FLOAT


def test_a_transformer_block_keeps_16_hidden_states():
    rows, length, width, heads = 2, 8, 12, 3
    hidden = rows * length * width
    # Stream, norm, queries and keys and values, mixed; stream, norm, and 4 + 4 in the MLP.
    states = 1 + 1 + 3 + 1 + 1 + 1 + 4 + 4
    norms, attention = 2 * 2 * rows * length, rows * heads * length
    expected = FLOAT * (states * hidden + norms + attention)
    assert measured(Block(width, heads, 0.0), rows, length, width) == expected


def test_sparse_tensors_count_as_their_indices_and_values():
    meter = ActivationMeter()
    weights = torch.randn(4, 3, requires_grad=True)
    with meter.watching(0):
        output = torch.sparse.mm(torch.eye(4).to_sparse(), weights)
    assert meter.live_bytes == 2 * 4 * 8 + 4 * FLOAT
    output.sum().backward()
    assert meter.live_bytes == 0


def test_wrapped_tensors_count_as_what_they_wrap():
    meter = ActivationMeter()
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    with meter.watching(0):
        output = nested.sin()
    assert meter.live_bytes == 6 * 3 * FLOAT + 3 * 8  # values and offsets
    del output
    assert meter.live_bytes == 0


LAYERS = {
    "Linear": lambda: nn.Linear(6, 6),
    "in place": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)),
    "Tanh": nn.Tanh,
    "GELU": nn.GELU,
    "LayerNorm": lambda: nn.LayerNorm(6),
    "BatchNorm": lambda: nn.BatchNorm1d(6),
    "Dropout": lambda: nn.Dropout(0.5),
    "view": lambda: Lambda(lambda value: value.flip(0).t().contiguous().t()),
    "chunks": lambda: Lambda(lambda value: torch.cat([v.exp() for v in value.chunk(2, 1)], 1)),
    "residual": lambda: Lambda(lambda value: value + value.sigmoid()),
    "custom": lambda: Lambda(Cube.apply),
    "Softmax": lambda: nn.Softmax(dim=1),
    "checkpointed": lambda: Checkpointed(two_layers(), reentrant=False),
}


@settings(max_examples=60)
@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6),
    order=st.permutations(range(3)),
)
def test_it_counts_exactly_what_is_alive(names, order):
    module = nn.Sequential(*(LAYERS[name]() for name in names))
    meter = meter_for(module)
    leaf = torch.randn(4, 6, requires_grad=True)
    edges, totals = {}, []
    with Alive([*module.parameters(), *module.buffers(), leaf]) as alive:
        for microbatch in range(3):
            inputs = leaf * 1
            with meter.watching((0, microbatch)):
                output = module(inputs)
            edges[microbatch] = get_gradient_edge(output)
            del inputs, output
            assert meter.live_bytes == alive.num_bytes()
            totals.append(meter.live_bytes)
        for microbatch in order:
            torch.autograd.backward([edges.pop(microbatch)], [torch.ones(4, 6)])
            for trained in (*module.parameters(), leaf):
                trained.grad = None
            assert (0, microbatch) not in meter.live_bytes_by_key
            assert meter.live_bytes == alive.num_bytes()
    assert meter.live_bytes == 0
    assert meter.peak_bytes == max(totals)


def test_what_several_microbatches_share_counts_once():
    meter = ActivationMeter()
    shared = torch.randn(5, requires_grad=True) * 1
    outputs = []
    for microbatch in range(3):
        with meter.watching(microbatch):
            outputs.append(shared.sin())
    assert meter.live_bytes == 20
    assert meter.live_bytes_by_key == {0: 20, 1: 20, 2: 20}
    del outputs[0]
    assert meter.live_bytes_by_key == {1: 20, 2: 20}
    assert (meter.live_bytes, meter.peak_bytes, meter.peak_keys) == (20, 20, 3)
    outputs.clear()
    assert meter.live_bytes == 0


def test_peaks_begin_anew_with_what_is_alive():
    meter = ActivationMeter()
    leaf = torch.randn(5, requires_grad=True)
    outputs = []
    for microbatch in range(3):
        with meter.watching(microbatch):
            outputs.append((leaf * 1).sin())
    del outputs[1:]
    with meter.watching(3):
        (leaf * 1).sin()
    assert (meter.peak_bytes, meter.peak_keys) == (60, 3)
    meter.reset_peak()
    assert (meter.peak_bytes, meter.peak_keys) == (20, 1)


def test_what_was_freed_before_is_in_no_peak():
    meter = ActivationMeter()
    for microbatch in range(3):
        with meter.watching(microbatch):
            for _ in range(2):
                output = (torch.randn(5, requires_grad=True) * 1).sin()
                output.sum().backward()
                del output
    assert (meter.peak_bytes, meter.peak_keys) == (20, 1)


def test_what_is_kept_outside_autograd_counts_until_released_or_dropped():
    meter = ActivationMeter()
    inputs = torch.randn(5, requires_grad=True)
    released, dropped = (meter.keep((0, k), [inputs, inputs[1:]]) for k in range(2))
    with meter.watching((0, 0)):
        output = inputs.sin()
    assert meter.live_bytes_by_key == {(0, 0): 20, (0, 1): 20}
    assert meter.live_bytes == 20
    released.release()
    released.release()
    assert meter.live_bytes_by_key == {(0, 0): 20, (0, 1): 20}
    del output
    assert meter.live_bytes_by_key == {(0, 1): 20}
    del dropped
    assert meter.live_bytes == 0


def test_what_is_kept_holds_its_memory_so_that_no_address_means_two_things():
    meter = ActivationMeter()
    tensor = torch.randn(5)
    memory = StorageWeakRef(tensor.untyped_storage())
    kept = meter.keep(0, [tensor])
    del tensor
    assert not memory.expired()
    kept.release()
    assert memory.expired()


def test_parameters_are_no_activations_even_after_their_memory_was_replaced():
    layer = nn.Linear(64, 64, bias=False)
    meter = meter_for(layer)
    inputs = torch.randn(2, 64, requires_grad=True)
    for _ in range(2):
        with meter.watching(0):
            output = layer(inputs)
        assert meter.live_bytes == 2 * 64 * FLOAT
        output.sum().backward()
        left = layer.weight.data
        layer.weight.data = torch.randn(64, 64)
    # What was a parameter's memory may be an activation's now.
    with meter.watching(0):
        output = layer(left[:2].requires_grad_())
    assert meter.live_bytes == 64 * 64 * FLOAT


OVERWRITES = {
    "an output": (torch.exp, lambda inputs, output: output.mul_(2), True),
    "an output, through a view": (torch.exp, lambda inputs, output: output[0].zero_(), True),
    "an output, detached": (torch.exp, lambda inputs, output: output.detach().zero_(), True),
    "an output that is not needed": (torch.sin, lambda inputs, output: output.mul_(2), False),
    "an input": (torch.sin, lambda inputs, output: inputs.mul_(2), True),
    "an input through .data": (torch.sin, lambda inputs, output: inputs.data.mul_(2), False),
    "an input that is not needed": (torch.exp, lambda inputs, output: inputs.mul_(2), False),
    "what a custom function saved": (Cube.apply, lambda inputs, output: output.mul_(2), True),
}


@pytest.mark.parametrize("metered", [False, True])
@pytest.mark.parametrize("what", OVERWRITES)
def test_overwriting_is_noticed_exactly_where_it_is_without_the_meter(what, metered):
    function, overwrite, wrong = OVERWRITES[what]
    inputs = torch.randn(3, requires_grad=True) * 1
    with ActivationMeter().watching(0) if metered else nullcontext():
        output = function(inputs)
    result = output.clone()
    with torch.no_grad():
        overwrite(inputs, output)
    message = (
        r"modified by an inplace operation: \[torch.FloatTensor \[3\]\].* is at version 1; exp"
    )
    with pytest.raises(RuntimeError, match=message) if wrong else nullcontext():
        result.sum().backward()


def test_a_parameter_updated_before_the_backward_is_noticed():
    layer = nn.Linear(3, 3)
    inputs = torch.randn(2, 3, requires_grad=True)
    with meter_for(layer).watching(0):
        output = layer(inputs)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_gradients_are_the_same_to_the_bit_also_of_gradients():
    def gradients(meter):
        torch.manual_seed(0)
        module = nn.Sequential(Block(12, 3, 0.1), nn.Tanh(), nn.Linear(12, 12), nn.Softplus())
        inputs = torch.randn(2, 5, 12, requires_grad=True)
        with meter.watching(0) if meter else nullcontext():
            output = module[1:](inputs).square().sum() + module(inputs).sum()
        trained = [inputs, *module.parameters()]
        first = torch.autograd.grad(output, trained, retain_graph=True)
        with meter.watching(0) if meter else nullcontext():
            again = torch.autograd.grad(module[1:](inputs).exp().sum(), inputs, create_graph=True)
        again[0].square().sum().backward()
        return [*first, *again, inputs.grad]

    plain, metered = gradients(None), gradients(ActivationMeter())
    assert all(torch.equal(a, b) for a, b in zip(plain, metered, strict=True))


@contextmanager
def no_collector():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("name", "end"), in_turns(itertools.product(LAYERS, ["backward", "dropped"]), 3)
)
def test_memory_is_free_as_early_as_without_the_meter(name, end):
    module = nn.Sequential(LAYERS[name](), nn.Softplus())
    meter = meter_for(module)
    with no_collector():
        inputs = torch.randn(4, 6, requires_grad=True) * 1
        between = []
        hook = module[0].register_forward_hook(
            lambda layer, args, output: between.append(StorageWeakRef(output.untyped_storage()))
        )
        with meter.watching(0):
            output = module(inputs)
        hook.remove()
        memories = [StorageWeakRef(inputs.untyped_storage()), *between]
        del inputs
        if end == "backward":
            output.sum().backward()
        del output
        assert all(memory.expired() for memory in memories)
        assert meter.live_bytes == 0


def test_activations_may_be_freed_in_another_thread():
    meter = ActivationMeter()
    graphs = []
    for microbatch in range(20):
        with meter.watching(microbatch):
            graphs.append((torch.randn(5, requires_grad=True) * 1).sin())
    thread = threading.Thread(target=graphs.clear)
    thread.start()
    while thread.is_alive():
        with meter.watching("beside"):
            (torch.randn(5, requires_grad=True) * 1).sin()
    thread.join()
    assert meter.live_bytes == 0
    assert 20 <= meter.peak_keys <= 21


def test_activations_in_a_cycle_are_freed_by_the_collector_in_the_middle_of_counting():
    meter = ActivationMeter()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for step in range(200):
            with meter.watching(step):
                cycle = [(torch.randn(5, requires_grad=True) * 1).sin()]
            cycle.append(cycle)
            del cycle
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert meter.live_bytes == 0
    assert not meter.live_bytes_by_key


def test_without_gradients_nothing_is_counted():
    meter = ActivationMeter()
    with meter.watching(0), torch.no_grad():
        two_layers()(torch.randn(4, 6))
    assert (meter.live_bytes, meter.peak_bytes, meter.peak_keys) == (0, 0, 0)


def test_a_loss_that_is_kept_counts_nothing_after_its_backward():
    meter = ActivationMeter()
    module = two_layers()
    with meter.watching(0):
        loss = F.mse_loss(module(torch.randn(4, 6)), torch.zeros(4, 6))
    loss.backward()
    assert meter.live_bytes == 0
