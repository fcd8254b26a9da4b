"""A layer or a loss that raises: the error says where, with what, and what to do, in few lines."""

import traceback

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import penstock as pk
from tests.kit.planning import devices


class Moody(nn.Module):
    """Raises when it is told to."""

    bad = False

    def forward(self, value):
        if self.bad:
            raise ValueError("boom")
        return value


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture(scope="module")
def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Moody(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def plan(model):
    inputs, targets = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)
    graph = pk.profile(model, inputs, loss=cross_entropy, targets=targets, repeats=1, ranks=0)
    assert [layer.input_shape for layer in graph.layers] == ["(4, 8) float32"] * 4
    return pk.plan(graph, devices(2), microbatches=2, schedule="1f1b", stages=2, cuts=(2,))


@pytest.fixture(params=(0, 2), ids="after {} steps".format)
def pipeline(request, model, plan):
    """Once layers are known, they are called in fewer frames, in which to look for the layer."""
    with pk.Pipeline(model, plan, loss=cross_entropy, optimizer=sgd) as made:
        for _ in range(request.param):
            made.step(torch.ones(8, 8), TARGETS)
        yield made
    Moody.bad = False


def failure(pipeline, inputs, targets):
    with pytest.raises(pk.StageError) as raised:
        pipeline.step(inputs, targets)
    return raised.value


TARGETS = torch.zeros(8, dtype=torch.long)


def test_a_shape_that_was_not_profiled_is_set_beside_the_one_that_was(pipeline):
    text = str(failure(pipeline, torch.ones(8, 9), TARGETS))
    assert text.startswith("rank 0, stage 0, microbatch 0, op 0F0: RuntimeError: ")
    assert "in layer '0' (Linear), given (4, 9) float32; it was profiled with (4, 8)" in text
    assert "what to do: give inputs like those that were profiled, or profile and plan" in text


def test_the_line_of_a_layer_is_named(pipeline):
    Moody.bad = True
    error = failure(pipeline, torch.ones(8, 8), TARGETS)
    assert "rank 1, stage 1, microbatch 0, op 1F0: ValueError: boom" in str(error)
    assert "in layer '2' (Moody), given (4, 8) float32\n" in str(error)
    assert 'test_failures.py:21, in forward, `raise ValueError("boom")`' in str(error)
    assert "model(inputs) without a pipeline raises the same" in str(error)
    assert isinstance(error.__cause__, ValueError)


def test_a_loss_is_told_from_a_layer(pipeline):
    text = str(failure(pipeline, torch.ones(8, 8), TARGETS + 5))
    assert "in the loss, given outputs (4, 3) float32 and targets (4,) int64" in text
    assert "layer" not in text


def test_peers_do_not_hear_the_rank_twice(pipeline):
    from penstock.engine.run.drive.driver import failure_notice

    notice = failure_notice(0, failure(pipeline, torch.ones(8, 9), TARGETS))
    assert notice.startswith("rank 0 failed: stage 0, microbatch 0")


def lines_of(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("call", ["step", "steps"])
def test_the_traceback_has_lines_of_the_user_only(pipeline, monkeypatch, call):
    monkeypatch.delenv("PENSTOCK_TRACEBACK", raising=False)
    Moody.bad = True
    with pytest.raises(pk.StageError) as raised:
        if call == "step":
            pipeline.step(torch.ones(8, 8), TARGETS)
        else:
            list(pipeline.steps([(torch.ones(8, 8), TARGETS)]))
    error = raised.value
    assert lines_of(error.__cause__) == [__file__]
    assert {*lines_of(error)[1:]} <= {__file__, *lines_of(error)[-1:]}
    assert len(traceback.format_exception(error)) < 20
    assert sum(text.count("\n") for text in traceback.format_exception(error)) < 30


def test_the_whole_traceback_is_there_for_the_asking(pipeline, monkeypatch):
    monkeypatch.setenv("PENSTOCK_TRACEBACK", "full")
    Moody.bad = True
    error = failure(pipeline, torch.ones(8, 8), TARGETS)
    assert any("penstock" in file for file in lines_of(error))
    assert any("penstock" in file for file in lines_of(error.__cause__))


def test_what_penstock_breaks_itself_keeps_its_frames(monkeypatch):
    from penstock.base import tracebacks

    monkeypatch.delenv("PENSTOCK_TRACEBACK", raising=False)
    with pytest.raises(AttributeError) as raised:
        tracebacks._of_others("no traceback")
    tracebacks.shorten(raised.value)
    assert any("tracebacks.py" in file for file in lines_of(raised.value))
