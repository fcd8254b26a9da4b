"""Profiles: exact where bytes are counted, sane where time is measured, and nothing disturbed."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import InputError, ModelError
from penstock.training.profiler.alone import measure_hand_over
from tests.kit.helpers import make_mlp
from tests.kit.training import KeepingGradients, momentum, sgd

ROWS, FLOAT = 8, 4


def quick(model, inputs, **options):
    return pk.profile(model, inputs, **{"repeats": 1, "ranks": 0, **options})


def test_bytes_of_a_known_model_are_the_analytic_numbers():
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64), nn.Tanh(), nn.Flatten(), nn.Linear(64, 4)
    )
    graph = quick(model, torch.randn(ROWS, 16))
    # What backward needs: the input of each Linear, the output of ReLU and Tanh. Where one layer's
    # output is the next one's input, it is one memory and counted once.
    assert [layer.activation_bytes for layer in graph.layers] == [
        ROWS * 16 * FLOAT,
        ROWS * 32 * FLOAT,
        0,
        ROWS * 64 * FLOAT,
        0,
        0,
    ]
    widths = (32, 32, 64, 64, 64, 4)
    assert [layer.output_bytes for layer in graph.layers] == [ROWS * w * FLOAT for w in widths]
    assert [layer.parameter_bytes for layer in graph.layers] == [
        *(FLOAT * (16 * 32 + 32), 0, FLOAT * (32 * 64 + 64), 0, 0, FLOAT * (64 * 4 + 4)),
    ]
    assert graph.input_bytes == ROWS * 16 * FLOAT
    assert graph.microbatch_size == ROWS


def test_overwriting_in_place_saves_activations_and_keeps_the_inputs():
    inputs = torch.randn(ROWS, 16)
    before = inputs.clone()
    model = nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 4)
    )
    graph = quick(model, inputs)
    assert torch.equal(inputs, before)
    assert [layer.activation_bytes for layer in graph.layers] == [0, 512, 1024, 0]


@pytest.mark.parametrize(
    ("optimizer", "copies", "extra"),
    [(sgd, 0, 0), (momentum, 1, 0), (torch.optim.AdamW, 2, 2 * FLOAT), (None, 2, 0)],
)
def test_optimizer_state_is_counted(optimizer, copies, extra):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4).requires_grad_(False))
    layers = quick(model, torch.randn(ROWS, 16), optimizer=optimizer).layers
    # Adam counts its steps, in one number per parameter.
    assert layers[0].optimizer_bytes == copies * layers[0].parameter_bytes + extra
    assert layers[1].optimizer_bytes == layers[2].optimizer_bytes == 0
    assert (layers[0].update_seconds > 0) == (optimizer is not None)
    assert layers[1].update_seconds == layers[2].update_seconds == 0


def test_gradients_that_an_optimizer_takes_away_are_counted():
    graph = quick(
        nn.Sequential(nn.Linear(16, 32)), torch.randn(ROWS, 16), optimizer=KeepingGradients
    )
    layer = graph.layers[0]
    assert layer.summed_bytes == layer.optimizer_bytes == layer.parameter_bytes


def test_layers_are_named_as_in_the_state_dict_and_fingerprinted_as_by_the_pipeline():
    model = make_mlp()
    graph = quick(model, torch.randn(ROWS, 16))
    assert [layer.name for layer in graph.layers] == [str(index) for index in range(6)]
    assert [layer.kind for layer in graph.layers][:3] == ["Linear", "ReLU", "Dropout"]
    plan = pk.plan(graph, pk.Cluster.local(2), microbatches=2)
    with pk.Pipeline(model, plan, loss=F.cross_entropy) as pipeline:
        pipeline.step(torch.randn(4, 16), torch.randint(0, 4, (4,)))


class Embedding(nn.Linear):
    """No embedding at all."""


def test_kinds_tell_the_planner_what_can_be_divided_when_it_runs():
    model = nn.Sequential(nn.Conv1d(2, 4, 1, groups=2), nn.Conv1d(4, 4, 1), Embedding(3, 3))
    inputs = torch.randn(ROWS, 2, 3)
    kinds = [layer.kind for layer in quick(model, inputs).layers]
    assert kinds == ["Conv1d(groups=2)", "Conv1d", "own Embedding"]


def test_layers_without_parameters_have_no_weight_gradient():
    for layer in quick(make_mlp(), torch.randn(ROWS, 16)).layers:
        assert (layer.backward_weight_seconds > 0) <= (layer.parameter_bytes > 0)
    frozen = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False))
    assert quick(frozen, torch.randn(ROWS, 16)).layers[1].backward_weight_seconds == 0


@pytest.mark.parametrize(
    ("first", "inputs"),
    [
        (nn.Embedding(50, 512), torch.randint(0, 50, (4000,))),
        (nn.Linear(512, 512), torch.randn(512, 512)),
    ],
)
def test_the_first_layer_gives_no_input_gradient(first, inputs):
    # Its half of a backward has little to do but to put the weight's gradient off.
    def is_mostly_weights():
        layers = quick(nn.Sequential(first, nn.Linear(512, 4)), inputs).layers
        assert layers[1].backward_input_seconds > 0
        return layers[0].backward_input_seconds < 0.5 * layers[0].backward_weight_seconds

    assert any(is_mostly_weights() for _ in range(5))


class Counter(nn.Module):
    """Puts a new tensor in the place of its buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, value):
        self.calls = self.calls + 1
        return value


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_model_is_changed(fails):
    model = nn.Sequential(
        nn.Linear(16, 16), nn.BatchNorm1d(16), Counter(), nn.Dropout(0.5), nn.Linear(16, 4).eval()
    )
    model[1].eval()
    model[0].weight.grad = kept = torch.ones(16, 16)
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    buffers = dict(model.named_buffers())
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    if fails:
        with pytest.raises(ModelError):
            quick(nn.Sequential(*model, nn.Linear(5, 5)), torch.randn(ROWS, 16), num_threads=2)
        torch.set_rng_state(state)
    inputs = torch.ones(ROWS, 16)
    if not fails:
        with torch.no_grad():
            quick(model, inputs, num_threads=2, optimizer=torch.optim.AdamW)
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert list(model.state_dict()) == list(before)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    assert model[0].weight.grad is kept
    assert torch.equal(kept, torch.ones(16, 16))
    others = [p.grad for name, p in model.named_parameters() if name != "0.weight"]
    assert others == [None] * len(others)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(inputs, torch.ones(ROWS, 16))


def test_no_callers_mode_hides_the_backward():
    for mode in (torch.no_grad, torch.inference_mode):
        inputs, model = torch.randn(ROWS, 16), make_mlp()
        expected = [layer.activation_bytes for layer in quick(model, inputs).layers]
        with mode():
            layers = quick(model, inputs).layers
        assert [layer.activation_bytes for layer in layers] == expected
        assert all(layer.backward_input_seconds > 0 for layer in layers[1:])


def test_the_layers_sum_to_about_a_whole_step():
    # The house's machine is shared: a factor of two is what can be asserted.
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)], nn.Tanh(), nn.Linear(512, 8))
    inputs, targets = torch.randn(64, 512), torch.randint(0, 8, (64,))

    def ratio():
        graph = pk.profile(model, inputs, loss=F.cross_entropy, targets=targets, repeats=9, ranks=0)
        times = []
        for _ in range(9):
            start = time.perf_counter()
            F.cross_entropy(model(inputs), targets).backward()
            times.append(time.perf_counter() - start)
        return sum(layer.compute_seconds for layer in graph.layers) / sorted(times)[4]

    assert any(0.5 < ratio() < 2 for _ in range(3))


def test_loss_and_targets_come_together():
    targets = torch.randint(0, 4, (ROWS,))
    for options in ({"loss": F.cross_entropy}, {"targets": targets}):
        with pytest.raises(InputError, match="give loss and targets together, or neither"):
            quick(make_mlp(), torch.randn(ROWS, 16), **options)
    graph = quick(make_mlp(), torch.randn(ROWS, 16), loss=F.cross_entropy, targets=targets)
    assert graph.layers[-1].output_bytes == FLOAT  # the loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "must be ≥ 1"),
        ({"num_threads": 0}, "must be ≥ 1"),
        ({"repeats": -1}, "must be ≥ 1"),
        ({"ranks": -1}, "ranks is -1, but must be ≥ 0"),
        ({"ranks": 0.5}, "ranks is 0.5"),
        ({"sizes": [4, 9]}, "9 rows cannot be taken from a sample of 8"),
        ({"sizes": [0]}, "0 rows cannot be taken"),
        ({"sizes": [1.5]}, "1.5 rows cannot be taken"),
    ],
)
def test_impossible_numbers_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        quick(make_mlp(), torch.randn(ROWS, 16), **options)


@pytest.mark.parametrize("where", [("meta", "meta"), ("cpu", "meta"), ("meta", "cpu")])
def test_what_has_no_values_cannot_be_measured(where):
    """ "unknown device type for autocast in get_autocast_dispatch_key_from_device_type"."""
    of_model, of_inputs = where
    model, inputs = make_mlp().to(of_model), torch.randn(ROWS, 16, device=of_inputs)
    with pytest.raises(InputError, match=r"meta device, .* model.to_empty\(device=.cpu.\)"):
        quick(model, inputs)


def test_it_says_where_and_with_what_it_was_measured():
    graph = quick(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(ROWS, 4))
    assert graph.dtype == "float32"
    assert graph.device.endswith("CPU")
    assert graph.software["torch"] == torch.__version__
    assert set(graph.software) == {"torch", "python", "penstock"}
    assert 0 < graph.op_seconds < 0.1


def test_other_sizes_are_measured_with_rows_of_the_sample():
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    targets = torch.randint(0, 4, (ROWS,))
    graph = quick(
        model, torch.randn(ROWS, 16), loss=F.cross_entropy, targets=targets,
        optimizer=torch.optim.AdamW, sizes=[4, 1, 4, ROWS],
    )  # fmt: skip
    assert graph.sizes == (1, 4, ROWS)
    half = graph.at(4)
    assert (half.microbatch_size, half.input_bytes) == (4, graph.input_bytes // 2)
    for layer, other in zip(graph.layers, half.layers, strict=True):
        assert other.activation_bytes * 2 == layer.activation_bytes or layer is graph.layers[-1]
        assert other.parameter_bytes == layer.parameter_bytes
        assert other.optimizer_bytes == layer.optimizer_bytes
        assert other.update_seconds == layer.update_seconds
        assert other.forward_seconds > 0
    assert [layer.output_bytes for layer in half.layers] == [4 * 32 * FLOAT, 4 * 32 * FLOAT, FLOAT]
    assert pk.LayerGraph.from_json(graph.to_json()) == graph


def test_a_failing_layer_is_named_with_its_input():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(9, 4))
    message = r"layer '1' \(Linear\) failed on an input of shape \(8, 8\) float32: Runtime"
    with pytest.raises(ModelError, match=message) as caught:
        quick(model, torch.randn(ROWS, 16))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_targets_of_another_microbatch_are_refused():
    with pytest.raises(InputError, match="inputs have 8 rows, but targets have 3"):
        quick(make_mlp(), torch.randn(ROWS, 16), loss=F.cross_entropy, targets=torch.ones(3).long())


class Nested(nn.Module):
    """Takes and gives a dictionary, with an integer tensor and a number in it."""

    def __init__(self, last=False):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.last = last

    def forward(self, value):
        hidden = self.linear(value["hidden"])
        return hidden if self.last else {**value, "hidden": hidden}


def test_nested_values_are_profiled():
    inputs = {"hidden": torch.randn(ROWS, 16), "mask": torch.ones(ROWS, dtype=torch.int64), "n": 3}
    graph = quick(nn.Sequential(Nested(), Nested(last=True)), inputs)
    assert [layer.output_bytes for layer in graph.layers] == [ROWS * (16 * FLOAT + 8), 512]
    assert graph.layers[1].backward_input_seconds > 0


def test_progress_is_told():
    seen = []
    quick(make_mlp(), torch.randn(ROWS, 16), progress=lambda *done: seen.append(done), repeats=2)
    total = seen[-1][1]
    assert total == 1 + 2
    assert seen == [(index, total) for index in range(1, total + 1)]


def test_handing_over_takes_time_but_not_long():
    assert 0 < measure_hand_over(repeats=20) < 0.1
