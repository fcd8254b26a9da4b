"""A model that names no spine goes from ``profile`` to ``Pipeline`` as it is."""

from __future__ import annotations

import copy
import io
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import penstock as pk
from penstock.core.example import Example
from penstock.engine.tracing.entrance import as_planned
from penstock.engine.tracing.inputs import described, inputs_like
from penstock.trial.reference.single_device import SingleDevice


class Residual(nn.Module):
    """No chain: what goes past a layer is added behind it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.second = nn.Linear(12, 12)
        self.noise = nn.Dropout(0.2)
        self.last = nn.Linear(12, 3)

    def forward(self, value):
        value = torch.relu(self.first(value))
        return self.last(value + self.noise(self.second(value)))


class Tagger(nn.Module):
    """Takes sequences of any length, and computes its loss if it gets labels."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, words, labels=None):
        value = self.words(words)
        scores = self.head(value + torch.tanh(self.mix(value)))
        if labels is None:
            return {"scores": scores}
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


def made(kind):
    torch.manual_seed(5)
    return kind()


def planned(model, inputs, targets=None, loss=None, **options):
    graph = pk.profile(model, inputs, loss=loss, targets=targets, repeats=1, ranks=0)
    return pk.plan(graph, pk.Cluster.local(2), microbatches=4, stages=2, **options)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def trained(model, plan, batches, **options):
    with pk.Pipeline(model, plan, optimizer=sgd, seed=3, **options) as pipeline:
        return [float(pipeline.step(*batch)) for batch in batches]


@pytest.fixture(scope="module")
def residual():
    """A model that was profiled, its plan, and batches."""
    model = made(Residual)
    draws = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 6, generator=draws), torch.randn(8, 3, generator=draws)) for _ in range(3)
    ]
    inputs, targets = (part[:2] for part in batches[0])
    return model, planned(model, inputs, targets, F.mse_loss), batches


def losses_of_one_device(batches):
    alone = SingleDevice(pk.capture(made(Residual), batches[0][0]), 4, F.mse_loss, sgd, seed=3)
    return [float(alone.step(*batch)) for batch in batches]


def test_the_model_itself_trains_as_on_one_device(residual):
    model, plan, batches = residual
    state = copy.deepcopy(model.state_dict())
    assert trained(model, plan, batches, loss=F.mse_loss) == losses_of_one_device(batches)
    assert any(not torch.equal(state[key], value) for key, value in model.state_dict().items())
    model.load_state_dict(state)


@pytest.mark.parametrize("way", ["new", "deepcopy", "pickle", "torch.save"])
def test_a_copy_of_the_model_is_cut_as_the_plan_says(residual, way, tmp_path):
    model, plan, batches = residual
    plan.save(tmp_path / "plan.json")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copied = {
        "new": lambda: made(Residual),
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.loads(pickle.dumps(model)),
        "torch.save": lambda: torch.load(buffer, weights_only=False),
    }[way]()
    losses = trained(copied, pk.Plan.load(tmp_path / "plan.json"), batches, loss=F.mse_loss)
    assert losses == losses_of_one_device(batches)


def test_a_model_is_traced_once(residual, monkeypatch):
    model, plan, _ = residual

    def never(*_, **__):
        raise AssertionError("traced again")

    monkeypatch.setattr("penstock.engine.tracing.entrance.capture", never)
    pk.Pipeline(model, plan).close()
    with pytest.raises(AssertionError, match="traced again"):
        pk.Pipeline(made(Residual), plan)


def test_the_mode_of_the_model_itself_counts(residual):
    model, plan, batches = residual
    state = copy.deepcopy(model.state_dict())
    quiet = copy.deepcopy(model).eval()
    try:
        model.eval()  # as for some who freeze dropout
        losses = trained(model, plan, batches[:1], loss=F.mse_loss)
    finally:
        model.train()
        model.load_state_dict(state)
    parts = zip(*(part.chunk(4) for part in batches[0]), strict=True)
    expected = sum(F.mse_loss(quiet(x), y).item() for x, y in parts) / 4
    assert losses == [pytest.approx(expected)]


def test_another_model_is_refused_by_its_layers(residual):
    _, plan, _ = residual
    with pytest.raises(pk.ModelError, match="plan"):
        pk.Pipeline(made(Tagger), plan)


def test_without_an_example_the_error_says_what_to_do(residual):
    _, plan, _ = residual
    with pytest.raises(pk.ModelError, match="does not name its spine"):
        pk.Pipeline(made(Residual), replace(plan, example=None))


def test_a_loss_that_the_model_computes_needs_no_argument_and_lengths_may_differ():
    model = made(Tagger)
    draws = torch.Generator().manual_seed(2)

    def batch(rows, length):
        words = torch.randint(20, (rows, length), generator=draws)
        return {"words": words, "labels": words % 5}

    plan = planned(model, batch(2, 7))
    batches = [batch(8, 7), batch(8, 9), batch(6, 4)]
    twin = made(Tagger)
    optimizer = sgd(twin.parameters())
    expected = []
    for each in batches:
        loss = twin(**each)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    with pk.Pipeline(model, plan, optimizer=sgd) as pipeline:
        losses = [float(pipeline.step(each)) for each in batches]
        assert float(pipeline.evaluate_loss([batches[0]])) < expected[0]
    assert losses == pytest.approx(expected)


def test_another_order_of_layers_is_taken_from_the_plan(residual):
    model, plan, batches = residual
    kept = model.__dict__["_penstock_captured"].captured
    assert kept.names == plan.layers
    reordered = planned(made(Residual), batches[0][0], batches[0][1], F.mse_loss, layer_order="any")
    assert sorted(reordered.layers) == sorted(plan.layers)
    losses = trained(made(Residual), reordered, batches, loss=F.mse_loss)
    assert losses == losses_of_one_device(batches)


@pytest.mark.parametrize(
    "inputs",
    [
        torch.zeros(2, 3),
        (torch.full((2,), 7), None, 2.5),
        {"ids": torch.ones(2, 4, dtype=torch.bool), "deep": [torch.zeros(2), {"x": "text"}]},
        torch.full((2, 2), float("inf")),
        torch.zeros(2, 0, dtype=torch.int64),
    ],
)
def test_inputs_have_the_same_form_behind_a_file(inputs):
    example = described(inputs, "module", "all")
    again = inputs_like(Example.from_json(example.to_json()), torch.device("cpu"))

    def form(value):
        if isinstance(value, torch.Tensor):
            first = value.flatten()[:1].tolist() if not value.is_floating_point() else None
            return value.shape, value.dtype, first
        if isinstance(value, dict):
            return {key: form(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value), [form(inner) for inner in value]
        return value

    assert form(again) == form(inputs)


def test_inputs_that_no_file_has_are_not_described():
    assert described({3: torch.zeros(2)}, "module", "rows") is None
    assert described((torch.zeros(2), object()), "module", "rows") is None


@pytest.mark.parametrize(
    "inputs",
    [{"tensor": "float32"}, {"tuple": 3}, {"a": 1}, [{"tensor": "x y", "shape": [1], "value": 0}]],
)
def test_an_example_that_is_none_is_refused(inputs):
    with pytest.raises(pk.InputError, match="is no input of a model"):
        Example(inputs=inputs)


def test_a_dtype_that_torch_does_not_have_is_refused():
    example = Example(inputs={"tensor": "float31", "shape": [2], "value": 0})
    with pytest.raises(pk.InputError, match="torch has no dtype 'float31'"):
        inputs_like(example, None)


class Wide(Residual):
    """The same layers, of which one has 256 MiB."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 1 << 13)
        self.second = nn.Linear(1 << 13, 1 << 13)
        self.last = nn.Linear(1 << 13, 3)


def peak_bytes():
    """The most memory that this process has held since the last call."""
    text = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) * 1024


def test_a_model_on_meta_is_traced_and_takes_no_memory(residual):
    _, plan, _ = residual
    with torch.device("meta"):
        wide = Wide()
    before = [*wide.parameters()]
    peak_bytes()
    least = peak_bytes()
    captured = as_planned(wide, plan)
    assert peak_bytes() < least + wide.second.weight.nbytes / 2
    assert captured.names == plan.layers
    assert all(mine is other for mine, other in zip(wide.parameters(), before, strict=True))
    assert all(parameter.is_meta for parameter in wide.parameters())


def test_a_plan_of_a_chain_says_that_the_model_is_another():
    chain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    of_chain = pk.plan(pk.profile(chain, torch.ones(4, 6), repeats=1, ranks=0), microbatches=2)
    with pytest.raises(pk.ModelError, match=r"another model .*not in the model: 0, 1"):
        pk.Pipeline(made(Residual), of_chain)


def test_inputs_of_a_plan_that_do_not_fit_are_blamed_on_the_plan(residual):
    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(6, 6)

        def forward(self, batch, extra):
            return self.one(batch["x"]) + extra

    _, plan, _ = residual
    with pytest.raises(pk.ModelError, match=r"^the plan was made for another model, or"):
        pk.Pipeline(Keyed(), plan)


def test_targets_in_a_tuple_are_not_taken_for_an_argument_of_the_model():
    model = made(Residual)
    model.forward = lambda value, cache=None: Residual.forward(model, value)
    captured = pk.capture(model, torch.ones(4, 6))
    with pytest.raises(pk.InputError, match="if targets are in it, give them apart") as refused:
        captured((torch.ones(4, 6), torch.ones(4, 6)))
    assert "leave out cache" not in str(refused.value)
