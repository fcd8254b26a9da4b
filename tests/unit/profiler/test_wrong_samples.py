"""What ``profile`` refuses before it measures: losses and samples that cannot be meant."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import penstock as pk

INPUTS, TARGETS = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)


class Unreached(nn.Linear):
    """Fails the test if it is measured."""

    def forward(self, value):
        raise AssertionError("measured")


MADE = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def raising(*_):
    raise ValueError("boom")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": nn.CrossEntropyLoss}, r"the class CrossEntropyLoss; .*loss=CrossEntropyLoss\(\)"),
        ({"loss": "mse"}, "loss is of type str; give a function"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, 'CrossEntropyLoss has reduction="none"'),
        ({"targets": TARGETS[:3]}, "inputs have 4 rows, but targets have 3"),
        ({"targets": None}, r"targets=… is missing, as in profile\(model, inputs, loss="),
        ({"loss": None}, "loss=… is missing"),
        ({"inputs": [(INPUTS, TARGETS)], "targets": None}, "a list with one batch; give the batch"),
        ({"inputs": DataLoader(TensorDataset(INPUTS))}, "a DataLoader; give the batch itself"),
        (
            {"inputs": INPUTS.tolist()},
            r"inputs hold no tensor, but \[\[1.0, .{50,90}as torch.tensor",
        ),
        ({"inputs": [INPUTS.numpy()] * 2}, "inputs hold an array of numpy, which cannot be cut"),
        ({"optimizer": MADE}, r"optimizer is made already \(SGD\), .* as in optimizer=lambda"),
    ],
)
def test_it_is_named_before_anything_is_measured(options, message):
    given = {"inputs": INPUTS, "loss": cross_entropy, "targets": TARGETS, **options}
    with pytest.raises(pk.InputError, match=message):
        pk.profile(nn.Sequential(Unreached(8, 3)), given.pop("inputs"), ranks=0, **given)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (raising, r"the loss failed on outputs \(4, 3\) float32 and targets \(4,\) int64: .*boom"),
        (lambda outputs, _: outputs, r"the loss must be one number, but it has shape \(4, 3\)"),
        (lambda outputs, _: outputs.sum().item(), "the loss is a plain float, .* without .item()"),
    ],
)
def test_the_last_layer_is_not_blamed_for_the_loss(loss, message):
    with pytest.raises(pk.InputError, match=message) as refused:
        pk.profile(nn.Sequential(nn.Linear(8, 3)), INPUTS, loss=loss, targets=TARGETS, ranks=0)
    assert "layer" not in str(refused.value)


def test_a_list_of_tensors_is_named_where_a_layer_cannot_take_it():
    with pytest.raises(pk.ModelError, match=r"failed on a list of 4 parts: .*as torch.stack"):
        pk.profile(nn.Sequential(nn.Linear(8, 3)), list(INPUTS), ranks=0)


def test_a_pipeline_refuses_them_too():
    model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 3))
    plan = pk.plan(pk.profile(model, INPUTS, ranks=0, repeats=1), microbatches=2)
    for loss in (nn.CrossEntropyLoss, nn.CrossEntropyLoss(reduction="none")):
        with pytest.raises(pk.InputError, match="CrossEntropyLoss"):
            pk.Pipeline(model, plan, loss=loss)
    scheduler = torch.optim.lr_scheduler.LinearLR(MADE)
    with pytest.raises(pk.InputError, match=r"lr_scheduler is made already \(LinearLR\)"):
        pk.Pipeline(model, plan, loss=cross_entropy, optimizer=type(MADE), lr_scheduler=scheduler)
