"""A divided layer computes what one device does, or says by name that it does not."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import ModelError, StageError
from tests.kit.helpers import Lambda, make_plan
from tests.kit.one_device import OneDevice, assert_same
from tests.kit.training import DEADLINE_SECONDS, momentum

TOLERANCE = 1e-12


def block(*modules, behind):
    """A block, and a head that reads ``behind`` numbers of each row."""
    return nn.Sequential(nn.Sequential(*modules), nn.Flatten(), nn.Linear(behind, 4))


def swapped():
    return Lambda(lambda value: value.transpose(1, 2))


def batch(*shape):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(7, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 4, (7,), generator=generator)


def trained(build, size, splits, shape):
    torch.manual_seed(0)
    ours = build().double()
    theirs = copy.deepcopy(ours)
    one = OneDevice(theirs, 2, F.cross_entropy, momentum)
    expected = [one.step(*batch(*shape)) for _ in range(2)]
    with pk.Pipeline(
        ours, make_plan(ours, 1, 2).with_tensor_split(size, splits), loss=F.cross_entropy,
        optimizer=momentum, deadline_seconds=DEADLINE_SECONDS,
    ) as pipeline:  # fmt: skip
        losses = [pipeline.step(*batch(*shape)) for _ in range(2)]
    torch.testing.assert_close(losses, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert_same(ours, theirs, TOLERANCE)


class Unbatched(nn.Module):
    """A convolution without a dimension of rows."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(7, 4, 3, padding=1)

    def forward(self, value):
        return self.conv(value.new_ones(7, 8) * value.mean()).expand(len(value), -1, -1)


ENDS = {
    "Conv1d": (lambda: block(nn.Conv1d(3, 4, 3, padding=1), nn.ReLU(), behind=32), (3, 8)),
    "Conv2d": (lambda: block(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), behind=64), (3, 4, 4)),
    "Conv3d": (lambda: block(nn.Conv3d(2, 4, 1), behind=32), (2, 2, 2, 2)),
    "unbatched": (lambda: block(Unbatched(), behind=32), (3, 8)),
    "flattened channels": (lambda: block(nn.Conv1d(3, 4, 3), nn.Flatten(), behind=24), (3, 8)),
    "channels last": (lambda: block(nn.Conv1d(3, 4, 1), swapped(), behind=32), (3, 8)),
    "Linear": (lambda: block(nn.Linear(6, 4), nn.Tanh(), behind=32), (8, 6)),
    "a view behind Linear": (lambda: block(nn.Linear(6, 4), swapped(), behind=32), (8, 6)),
    "a mean behind Linear": (
        lambda: block(nn.Linear(6, 4), Lambda(lambda value: value.mean(1)), behind=4),
        (8, 6),
    ),
    "Embedding": (
        lambda: block(
            Lambda(lambda value: value.argmax(-1)), nn.Embedding(6, 4), swapped(), behind=32
        ),
        (8, 6),
    ),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ENDS)
def test_a_block_that_ends_behind_a_column_is_put_together_where_its_features_are(name, size):
    build, shape = ENDS[name]
    splits = {"0.0.conv" if name == "unbatched" else "0.0": "column"}
    if name == "Embedding":
        splits = {"0.1": "column"}
    trained(build, size, splits, shape)


class Attending(nn.Module):
    """Attention that nobody has split, without a module of torch's that would tell."""

    def __init__(self, width=6):
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)

    def forward(self, value):
        return value + F.scaled_dot_product_attention(*self.mix(value).chunk(3, -1))


class Gated(nn.Module):
    """A gate that halves what a column has given in one piece."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(8, 6)

    def forward(self, value):
        one, other = self.up(value).chunk(2, -1)
        return self.down(one * torch.tanh(other))


class Centred(nn.Module):
    """Looks at all rows."""

    def forward(self, value):
        return value - value.mean(0)


WRONG = {
    "features in another order": (
        lambda: block(nn.Linear(6, 4), nn.Flatten(), behind=32),
        {"0.0": "column"},
        r"'0.0': 'column'.*gives numbers that are off by .*end a \"column\" with a \"row\"",
    ),
    "features mixed": (
        lambda: block(nn.Linear(6, 4), nn.Softmax(-1), behind=32),
        {"0.0": "column"},
        r"layer '0' does not compute .*'0.0': 'column'.*gives numbers that are off by",
    ),
    "a gate of one piece": (
        lambda: block(Gated(), behind=48),
        {"0.0.up": "column", "0.0.down": "row"},
        r"'0.0.up': 'column', '0.0.down': 'row'.*gives numbers that are off by",
    ),
    "heads of nobody": (
        lambda: block(nn.Linear(6, 4), Lambda(lambda v: v.view(len(v), 8, 4)), behind=32),
        {"0.0": "column"},
        r"'0.0': 'column'.*it fails there \(RuntimeError: shape",
    ),
    "complex numbers": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(6, 4), Lambda(torch.fft.fft)),
            Lambda(torch.abs),
            nn.Flatten(),
            nn.Linear(32, 4),
        ),
        {"0.0": "column"},
        "'0.0': 'column'.*gives numbers that are off by",
    ),
    "whole numbers": (
        lambda: nn.Sequential(
            Lambda(lambda v: (v, torch.arange(len(v)))),
            Lambda(lambda both: both[0] * both[1][:, None, None]),
            nn.Flatten(),
            nn.Linear(48, 4),
        ),
        {"0": "data"},
        "'0': 'data'.*gives other numbers",
    ),
    "a number of rows": (
        lambda: nn.Sequential(
            Lambda(lambda v: (v, len(v))),
            Lambda(lambda both: both[0] * both[1]),
            nn.Flatten(),
            nn.Linear(48, 4),
        ),
        {"0": "data"},
        r"'0': 'data'.*gives the numbers \[2\], and \[4\] on one device",
    ),
    "infinity elsewhere": (
        lambda: block(
            nn.Linear(6, 4),
            Lambda(lambda v: v.masked_fill(v < v.amax(-1, keepdim=True), -torch.inf)),
            behind=32,
        ),
        {"0.0": "column"},
        "'0.0': 'column'.*gives other numbers",
    ),
    "two dimensions": (
        lambda: block(nn.Linear(6, 4), Lambda(lambda v: v @ v.transpose(1, 2)), behind=64),
        {"0.0": "column"},
        r"'0.0': 'column'.*gives shape \(4, 8, 16\), and \(4, 8, 8\) on one device",
    ),
    "attention of some positions": (
        lambda: block(Attending(), behind=48),
        {"0": "sequence"},
        r"'0': 'sequence'.*off by.*some of its positions.*\"heads\"",
    ),
    "pooled positions": (
        lambda: block(nn.AdaptiveAvgPool2d((8, 6)), Lambda(lambda v: v.cumsum(1)), behind=48),
        {"0": "sequence"},
        r"layer '0' does not compute .*'0': 'sequence'.*some of its positions",
    ),
    "rows mixed": (
        lambda: block(Centred(), behind=48),
        {"0": "data"},
        r"'0': 'data'.*some of its rows",
    ),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", WRONG)
def test_a_layer_that_would_compute_something_else_is_refused_by_name(name, size):
    build, splits, message = WRONG[name]
    torch.manual_seed(0)
    model = build().double()
    before = copy.deepcopy(model)
    with pk.Pipeline(
        model, make_plan(model, 1, 2).with_tensor_split(size, splits), loss=F.cross_entropy,
        optimizer=momentum, deadline_seconds=DEADLINE_SECONDS,
    ) as pipeline:  # fmt: skip
        for _ in range(2):  # and not only once
            with pytest.raises(StageError, match=message if size == 2 else "does not compute"):
                pipeline.step(*batch(8, 6))
    assert_same(model, before)


def test_a_row_alone_is_refused_before_anything_runs():
    model = block(nn.Linear(6, 4), behind=32)
    plan = make_plan(model, 1, 2).with_tensor_split(2, {"0.0": "row"})
    with pytest.raises(ModelError, match=r"'0\.0' is split as \"row\".* nothing in layer '0' div"):
        pk.Pipeline(model, plan, loss=F.cross_entropy, optimizer=momentum)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), "0.self_attn"),
        (lambda: Lambda(lambda v, lstm: lstm(v)[0], nn.LSTM(6, 6)), "0.modules_used.0"),
    ],
)
def test_modules_that_mix_positions_are_refused_before_anything_runs(module, name):
    model = nn.Sequential(module(), nn.Linear(6, 4))
    plan = make_plan(model, 1, 2).with_tensor_split(2, {"0": "sequence"})
    with pytest.raises(ModelError, match=f"'sequence'.* {name!r} in it .* mixes positions"):
        pk.Pipeline(model, plan, loss=F.cross_entropy, optimizer=momentum)


def test_the_comparison_disturbs_neither_random_numbers_nor_statistics_nor_hooks():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Sequential(
                nn.Conv1d(3, 4, 3, padding=1), nn.Dropout(0.3), nn.BatchNorm1d(4),
                nn.ReLU(inplace=True), nn.Conv1d(4, 4, 1),
            ),
            nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 4),
        ).double()  # fmt: skip

    def steps(model, plan):
        calls = []
        model[0][1].register_forward_hook(lambda *_: calls.append(1))
        with pk.Pipeline(
            model, plan, loss=F.cross_entropy, optimizer=momentum, seed=3,
            deadline_seconds=DEADLINE_SECONDS,
        ) as pipeline:  # fmt: skip
            losses = torch.stack([pipeline.step(*batch(3, 8)) for _ in range(3)])
        return losses, len(calls)

    ours, theirs = build(), build()
    splits = {"0.0": "column", "0.1": "heads", "0.2": "features", "0.4": "row"}
    losses, calls = steps(ours, make_plan(ours, 1, 2).with_tensor_split(2, splits))
    expected, once = steps(theirs, make_plan(theirs, 1, 2))
    torch.testing.assert_close(losses, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert_same(ours, theirs, TOLERANCE)
    assert calls == 2 * once
