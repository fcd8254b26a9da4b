"""A process that trains parts has whole values of one layer at a time, and of none in the end."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from penstock.base.errors import ModelError
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.run.layout import Layout
from penstock.engine.run.materialising import Initialiser, Wholes, check_there
from tests.kit.groups import together
from tests.kit.helpers import make_plan

WIDTH, NUM_LAYERS = 64, 4
SPLITS = {"0": "column", "1": "row", "2": "column", "3": "row"}
BUILDING = threading.Lock()


def build(device):
    """A model whose first and third layer are tied."""
    with BUILDING, torch.device(device):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    model[2].weight = model[0].weight
    return model


class Counting:
    """Notes how many bytes of a model have memory when each layer is about to get its values."""

    def __init__(self, model, values):
        self._model, self._values = model, values
        self.most = 0

    def count(self):
        there = [one for one in self._model.parameters() if not one.is_meta]
        return sum(one.nbytes for one in there)

    def draw(self, index):
        self.most = max(self.most, self.count())
        with BUILDING:  # torch has one default generator for all threads
            return self._values.draw(index)


def built(group, device):
    """(most bytes of whole values when a layer came, in the end, parts) of a member."""
    model = build(device)
    layers, plan = spine_of(model), make_plan(build("cpu"), 1, 2).with_tensor_split(2, SPLITS)
    devices = {group.index: torch.device("cpu")}
    layout = Layout(model, plan, layers, LayerStreams(0), one_process=False, devices=devices)
    counting = Counting(model, Initialiser(layers, 7, anew=False))
    wholes = Wholes(layout.layers_of(0), counting, group, layout.sharings.cuts)
    stages = layout.stages(0, group, wholes)
    parts = [tensor.detach().clone() for tensor in stages[0].parameters()]
    layout.let_go()  # what has gone is not put back
    layout.follow()
    assert all(map(torch.equal, parts, stages[0].parameters()))
    with pytest.raises(ModelError, match="has no values any more: an earlier Pipeline has trained"):
        check_there(layers)
    return counting.most, counting.count(), parts


def test_a_model_that_lies_nowhere_never_lies_here_as_a_whole():
    size = 4 * WIDTH * WIDTH
    members = together(2, lambda group: built(group, "meta"))
    for most, left, _ in members:
        assert most <= size  # of the tied one, until the third layer has it, too
        assert left == 0
    expected = build("meta")
    values = Initialiser(spine_of(expected), 7, anew=False)
    for index in range(NUM_LAYERS):
        values.draw(index)
    for index, (whole, dim) in enumerate(zip(expected.parameters(), (0, 1, 1), strict=True)):
        first, second = (parts[index] for *_, parts in members)
        assert torch.equal(torch.cat([first, second], dim=dim), whole)
        assert first.nbytes == size // 2


def test_a_model_with_values_keeps_none_of_those_that_are_divided():
    whole = [*build("cpu").parameters()]
    for _, left, parts in together(2, lambda group: built(group, "cpu")):
        assert left == 0
        assert sum(part.nbytes for part in parts) == sum(one.nbytes for one in whole) // 2
