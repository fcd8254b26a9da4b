"""A stage without layers is one for the engine, and no ``Stage``."""

from __future__ import annotations

import torch

from penstock.core.schedule import Op
from penstock.engine.stage.protocol import RunnableStage
from penstock.engine.stage.stage import Stage
from penstock.training.rehearsal.emulated import EmulatedStage, Waits


class Noting(Waits):
    """Notes the ops and waits for none."""

    def __init__(self):
        self.ops = []

    def wait(self, op):
        self.ops.append(op)


def test_it_takes_the_time_of_its_ops_and_has_nothing_to_observe():
    waits = Noting()
    stage: RunnableStage = EmulatedStage(1, False, 64, waits)
    assert not isinstance(stage, Stage)
    assert not stage.layer_modules
    produced = stage.forward(3, torch.zeros(2))
    assert produced.value.numel() == 64
    stage.recompute(3)
    (gradient,) = stage.backward_input(3, []).inputs
    assert gradient.numel() == 64
    stage.backward_weight(3)
    assert stage.held(3) == []
    assert waits.ops == [Op.parse(text) for text in ("1F3", "1R3", "1I3", "1W3")]
