"""Everything that belongs to the whole model, over stages on several ranks: clipping, loss scaling,
accumulation, schedulers, parameter groups. Always against one device, to the bit."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from penstock.base.errors import InputError
from penstock.engine.run.rank.on_trust import UpdatesOnTrust
from tests.kit.examples import crossed
from tests.kit.helpers import make_batch, make_mlp, same_order_families
from tests.kit.one_device import OneDevice, assert_same, assert_same_gradients, same
from tests.kit.training import adamw, momentum, pipeline_of

SHAPES = ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v"]
"""Straight, split, interleaved and V: what differs for whatever crosses stages."""


def scaler(**options):
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**16, "growth_interval": 2, **options})


def pair(**options):
    model = make_mlp(**{"dropout": 0.0, **options})
    return model, copy.deepcopy(model)


def infinite_batch(at=5, seed=1):
    """A minibatch whose gradients overflow once they are scaled, though its loss is finite."""
    inputs, targets = make_batch(13, seed=seed)
    inputs[at] = 1e36
    return inputs, targets


@pytest.fixture
def rollbacks(monkeypatch):
    """Counts the steps that were undone."""
    undone = []
    settle = UpdatesOnTrust.settle

    def counted(self):
        stands = settle(self)
        if not stands:
            undone.append(self)
        return stands

    monkeypatch.setattr(UpdatesOnTrust, "settle", counted)
    return undone


@pytest.mark.parametrize("schedule", same_order_families())
@pytest.mark.parametrize("clip_norm", [0.05, 1e3])
def test_the_norm_of_the_whole_model_is_clipped(schedule, clip_norm):
    # Summed in another order, a clipped run drifts away from one device after some steps.
    ours, theirs = pair()
    reference = OneDevice(theirs, 4, optimizer=adamw, clip_norm=clip_norm)
    with pipeline_of(ours, schedule, optimizer=adamw, clip_norm=clip_norm) as pipeline:
        for seed in range(4):
            batch = make_batch(13, seed=seed)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
            assert torch.equal(pipeline.grad_norm, reference.norm)
    assert_same(ours, theirs)


def test_a_norm_is_summed_in_the_order_of_the_model_not_of_the_spine():
    class Backwards(torch.nn.Module):
        """Names its last layer first."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.last = torch.nn.Linear(33, 4)
            self.middle = torch.nn.Linear(77, 33)
            self.first = torch.nn.Linear(16, 77)

        def spine(self):
            return [self.first, self.middle, self.last]

        def forward(self, value):
            return self.last(self.middle(self.first(value)))

    ours = Backwards()
    theirs = copy.deepcopy(ours)
    reference = OneDevice(theirs, 4, optimizer=momentum, clip_norm=0.1)
    with pipeline_of(ours, num_ranks=3, optimizer=momentum, clip_norm=0.1) as pipeline:
        for seed in range(8):
            batch = make_batch(13, seed=seed)
            pipeline.step(*batch)
            reference.step(*batch)
            assert torch.equal(pipeline.grad_norm, reference.norm)
    assert_same(ours, theirs)


@pytest.mark.parametrize("schedule", SHAPES)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_updates_with_infinite_gradients_are_skipped_everywhere(schedule, clip_norm):
    ours, theirs = pair()
    ours_scaler, theirs_scaler = scaler(), scaler()
    options = {"optimizer": adamw, "clip_norm": clip_norm}
    reference = OneDevice(theirs, 4, grad_scaler=theirs_scaler, **options)
    skipped = 0
    with pipeline_of(ours, schedule, grad_scaler=ours_scaler, **options) as pipeline:
        for step in range(7):
            batch = infinite_batch() if step in (1, 4) else make_batch(13, seed=step)
            before = copy.deepcopy(ours.state_dict())
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
            assert same(pipeline.grad_norm, reference.norm)
            assert ours_scaler.state_dict() == theirs_scaler.state_dict()
            skipped += all(torch.equal(before[k], v) for k, v in ours.state_dict().items())
    assert skipped == 2
    assert_same(ours, theirs)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_norm_that_overflows_is_no_infinite_gradient(clip_norm):
    # A loss scaler looks at every number, and here they are all finite.
    ours, theirs = pair()
    inputs, targets = make_batch(13)
    inputs[5] = 1e30
    options = {"optimizer": momentum, "clip_norm": clip_norm}
    scalers = [scaler(init_scale=1.0), scaler(init_scale=1.0)]
    reference = OneDevice(theirs, 4, grad_scaler=scalers[1], **options)
    with pipeline_of(ours, grad_scaler=scalers[0], **options) as pipeline:
        for batch in (make_batch(13), (inputs, targets), make_batch(13)):
            assert same(pipeline.step(*batch), reference.step(*batch))
            assert same(pipeline.grad_norm, reference.norm)
            assert reference.norm.isinf() == (batch[0] is inputs)
    assert scalers[0].state_dict() == scalers[1].state_dict()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert same(mine, other)


def scenario(name):
    """Options, and minibatches that make trouble in the given way."""
    batches = [make_batch(13, seed=step) for step in range(6)]
    if name in ("infinite", "both"):
        batches[1] = batches[4] = infinite_batch()
    clip_norm = None if name == "infinite" else {"rarely": 0.45}.get(name, 0.05)
    options = {"optimizer": adamw, "clip_norm": clip_norm}
    return options, batches, name in ("infinite", "both")


@pytest.mark.parametrize(
    ("schedule", "name", "overlapped"),
    crossed(
        [*SHAPES, "gpipe", "zb-h2", "dualpipe-v"],
        ("clip", "rarely", "infinite", "both"),
        (False, True),
        thorough=("1f1b", "zb-v"),
    ),
)
def test_post_validation_changes_no_result(schedule, name, overlapped, rollbacks):
    options, batches, scales = scenario(name)
    ours, theirs = pair()
    scalers = [scaler(), scaler()] if scales else [None, None]
    reference = OneDevice(theirs, 4, grad_scaler=scalers[1], **options)
    expected = [(reference.step(*batch), reference.norm) for batch in batches]
    with pipeline_of(
        ours, schedule, grad_scaler=scalers[0], post_validate=True, **options
    ) as pipeline:
        if overlapped:
            losses = list(pipeline.steps(batches))
        else:
            losses = []
            for batch, (_, norm) in zip(batches, expected, strict=True):
                losses.append(pipeline.step(*batch))
                assert same(pipeline.grad_norm, norm)
        assert same(pipeline.grad_norm, expected[-1][1])
    assert all(torch.equal(a, b) for a, (b, _) in zip(losses, expected, strict=True))
    assert_same(ours, theirs)
    limit = options["clip_norm"] or float("inf")
    wrong = sum(bool(norm > limit) or not norm.isfinite() for _, norm in expected)
    assert len(rollbacks) == 2 * wrong > 0  # on both ranks
    if name == "rarely":
        assert wrong < len(batches)
    if scales:
        assert scalers[0].state_dict() == scalers[1].state_dict()


@pytest.mark.parametrize("statistics", ["microbatch", "minibatch"])
def test_post_validation_undoes_dropout_metrics_and_batch_norm_too(statistics, rollbacks):
    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3),
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4),
        )  # fmt: skip

    def run(post_validate, schedule):
        model = build()
        metrics = {"right": lambda output, targets: (output.argmax(-1) == targets).float().mean()}
        found = []
        with pipeline_of(
            model,
            schedule,
            optimizer=adamw,
            clip_norm=0.05,
            metrics=metrics,
            batch_norm=statistics,
            post_validate=post_validate,
        ) as pipeline:
            for loss in pipeline.steps([make_batch(16, seed=step) for step in range(5)]):
                found += [loss, pipeline.metrics["right"]]
        return model, found

    for schedule in ("1f1b", "zb-v"):
        (ours, found), (theirs, expected) = run(True, schedule), run(False, schedule)
        assert torch.equal(torch.stack(found), torch.stack(expected))
        assert_same(ours, theirs)
    assert rollbacks


def test_a_step_on_trust_that_blows_up_is_no_error():
    # The unclipped step makes the next loss infinite; the clipped one, which counts, does not.
    def huge(parameters):
        return torch.optim.SGD(parameters, lr=1e25)

    ours, theirs = pair()
    reference = OneDevice(theirs, 4, optimizer=huge, clip_norm=1e-25)
    batches = [make_batch(13, seed=step) for step in range(4)]
    with pipeline_of(ours, optimizer=huge, clip_norm=1e-25, post_validate=True) as pipeline:
        for loss, batch in zip(pipeline.steps(batches), batches, strict=True):
            assert torch.equal(loss, reference.step(*batch))
    assert_same(ours, theirs)


@pytest.mark.parametrize("schedule", [*SHAPES, "gpipe"])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.05}, {"grad_scaler": True}])
def test_gradients_of_several_calls_make_one_update(schedule, options):
    ours, theirs = pair()
    scales = "grad_scaler" in options
    ours_options, theirs_options = (
        {**options, "grad_scaler": scaler()} if scales else options for _ in range(2)
    )
    reference = OneDevice(theirs, 4, optimizer=adamw, **theirs_options)
    with pipeline_of(ours, schedule, optimizer=adamw, **ours_options) as pipeline:
        for step in range(9):
            batch = make_batch(13, seed=step)
            how = {"update": step % 3 == 2, "share": 1 / 3}
            assert torch.equal(pipeline.step(*batch, **how), reference.step(*batch, **how))
            assert_same(ours, theirs)
            assert_same_gradients(ours, theirs)
            assert (ours[0].weight.grad is None) == how["update"]


def warmup(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=3)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)


@pytest.mark.parametrize("schedule", SHAPES)
@pytest.mark.parametrize("make", [warmup, one_cycle])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.05, "post_validate": True}])
def test_learning_rates_follow_their_schedule(schedule, make, options, rollbacks):
    ours, theirs = pair()
    clip_norm = options.get("clip_norm")
    reference = OneDevice(theirs, 4, optimizer=momentum, lr_scheduler=make, clip_norm=clip_norm)
    with pipeline_of(ours, schedule, optimizer=momentum, lr_scheduler=make, **options) as pipeline:
        batches = [make_batch(13, seed=step) for step in range(3)]
        for batch in batches:
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
        for loss, batch in zip(pipeline.steps(batches), batches, strict=True):
            assert torch.equal(loss, reference.step(*batch))
    assert_same(ours, theirs)
    assert bool(rollbacks) == bool(options)


def test_a_learning_rate_moves_with_updates_not_with_calls():
    ours, theirs = pair()
    reference = OneDevice(theirs, 4, optimizer=momentum, lr_scheduler=warmup)
    with pipeline_of(ours, optimizer=momentum, lr_scheduler=warmup) as pipeline:
        for step in range(8):
            how = {"update": step % 2 == 1, "share": 0.5}
            pipeline.step(*make_batch(13, seed=step), **how)
            reference.step(*make_batch(13, seed=step), **how)
    assert_same(ours, theirs)


def by_name(parameters):
    """No decay for biases, as everyone does it; another rate for one layer."""
    named = list(parameters.named())
    biases = [one for name, one in named if name.endswith("bias")]
    first = [one for name, one in named if name == "0.weight"]
    rest = [one for name, one in named if name.endswith("weight") and name != "0.weight"]
    return torch.optim.AdamW(
        [
            {"params": biases, "weight_decay": 0.0},
            {"params": first, "lr": 0.1},
            {"params": rest, "weight_decay": 0.5},
        ],
        lr=1e-2,
    )


@pytest.mark.parametrize("schedule", SHAPES)
def test_parameter_groups_are_made_by_the_names_of_the_whole_model(schedule):
    ours, theirs = pair()
    reference = OneDevice(theirs, 4, optimizer=by_name)
    with pipeline_of(ours, schedule, optimizer=by_name) as pipeline:
        for step in range(3):
            batch = make_batch(13, seed=step)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
    assert_same(ours, theirs)


def test_a_norm_that_nothing_asks_for_is_no_number():
    ours, _ = pair()
    with pipeline_of(ours, optimizer=momentum) as pipeline:
        pipeline.step(*make_batch(13))
        with pytest.raises(InputError, match="no norm yet: give clip_norm or a grad_scaler"):
            _ = pipeline.grad_norm


def test_a_scaler_whose_state_is_loaded_later_counts():
    ours, theirs = pair()
    scalers = [scaler(), scaler()]
    reference = OneDevice(theirs, 4, optimizer=momentum, grad_scaler=scalers[1])
    saved = scaler(init_scale=64.0).state_dict()
    with pipeline_of(ours, optimizer=momentum, grad_scaler=scalers[0]) as pipeline:
        for one in scalers:
            one.load_state_dict(saved)
        for step in range(3):
            batch = make_batch(13, seed=step)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
            assert scalers[0].state_dict() == scalers[1].state_dict()
    assert_same(ours, theirs)


def test_all_at_once_for_many_steps(rollbacks):
    ours, theirs = pair()
    scalers = [scaler(), scaler()]
    options = {"optimizer": by_name, "lr_scheduler": warmup, "clip_norm": 0.8}
    reference = OneDevice(theirs, 4, grad_scaler=scalers[1], **options)
    batches = [
        infinite_batch(seed=step) if step % 5 == 3 else make_batch(5 + step % 7, seed=step)
        for step in range(20)
    ]
    expected = [reference.step(*batch) for batch in batches]
    with pipeline_of(
        ours, "zb-v", grad_scaler=scalers[0], post_validate=True, **options
    ) as pipeline:
        losses = [*pipeline.steps(batches[:11]), *itertools.starmap(pipeline.step, batches[11:])]
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert_same(ours, theirs)
    assert 0 < len(rollbacks) < 2 * len(batches)
