"""One stage's state out of the engine and into another layout: learning rates, rows of optimizers.

What a stage holds is written as one piece or as several, and given to a stage with another rate, or
to one that updates other rows.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.core.versions import PipeMare, Place
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.reduce.sharding import Shard
from penstock.engine.stage.stage import Stage
from penstock.engine.weights.store import WeightStore
from penstock.training.checkpoint.contents import Contents
from penstock.training.checkpoint.folder import Checkpoint, digest, folder_name
from penstock.training.checkpoint.giving import check_fits, give
from penstock.training.checkpoint.header import FORMAT, Header, Identity, extent_of
from penstock.training.checkpoint.piece import write_piece
from penstock.training.checkpoint.taking import TrainedStage, state_of
from tests.kit.helpers import make_plan

STEP = 3
ROWS = 5


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, ROWS))


def trained_of(seed, rate=1.0, rows=None, scheduled=False, part=0, num_parts=1):
    """A stage and its optimizer, as a layout has them that multiplies its rates by ``rate``.

    Args:
        rows: from where to where it updates, of every parameter; by default all.
    """
    model = model_of(seed)
    stage = Stage(0, spine_of(model), 0, LayerStreams(0))
    named = dict(model.named_parameters())
    shards = {}
    if rows is not None:
        start, stop = rows
        shards = {
            one: Shard(start, nn.Parameter(one.detach()[start:stop])) for one in [*named.values()]
        }
    groups = [list(named.values())]
    own = [shards[one].part if one in shards else one for one in groups[0]]
    optimizer = torch.optim.AdamW(own, lr=0.5 * rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if scheduled else None
    return TrainedStage(
        stage, named, optimizer, scheduler, rate, None,
        shards=shards, groups=groups, part=part, num_parts=num_parts,
    )  # fmt: skip


def step(trained):
    """One step with gradients of which every row has its own."""
    for parameter in trained.optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn(parameter.shape)
    trained.optimizer.step()
    if trained.scheduler is not None:
        trained.scheduler.step()


def contents_of(run, *stages):
    """What a checkpoint holds to which each of some copies of a stage has given its part."""
    folder = run / folder_name(STEP)
    folder.mkdir(parents=True)
    plan = make_plan(model_of(0), 1, 1)
    plan.save(folder / "plan.json")
    identity = Identity(
        format=FORMAT, run="r", attempt="a", generation=0, step=STEP, num_stages=1,
        plan=digest(plan), seed=0,
    )  # fmt: skip
    for trained in stages:
        state = state_of(trained, ())
        extents = {
            name: state.extents.get(name) or extent_of(one) for name, one in state.tensors.items()
        }
        header = Header(
            identity=identity, stage=0, part=trained.part, num_parts=trained.num_parts,
            tensors=extents, extra=state.extra, optimizing=state.optimizing,
        )  # fmt: skip
        write_piece(folder, header, {name: one.clone() for name, one in state.tensors.items()})
    return Contents(Checkpoint.opened(folder))


def moments(trained, key="exp_avg"):
    """What an optimizer keeps of each parameter, by name."""
    return {name: trained.optimizer.state[part][key] for name, part in trained.optimized.items()}


@pytest.mark.parametrize(
    ("saved", "loaded"), [(1.0, 1.0), (1.0, 0.25), (4.0, 1.0), (2.0, 3.0), (0.5, 0.125)]
)
@pytest.mark.parametrize("scheduled", [False, True])
def test_learning_rates_are_those_of_the_layout(saved, loaded, scheduled, tmp_path):
    before = trained_of(0, saved, scheduled=scheduled)
    step(before)
    after = trained_of(1, loaded, scheduled=scheduled)
    after.optimizer.param_groups[0]["lr"] = 77.0
    check_fits(contents := contents_of(tmp_path, before), after, weights_only=False)
    give(contents, after, weights_only=False)
    (group,) = after.optimizer.param_groups
    now = 0.25 if scheduled else 0.5
    assert group["lr"] == pytest.approx(now * loaded)
    assert group["betas"] == before.optimizer.param_groups[0]["betas"]  # nothing else changes
    if scheduled:
        assert group["initial_lr"] == pytest.approx(0.5 * loaded)
        assert after.scheduler.base_lrs == pytest.approx([0.5 * loaded])
        assert after.scheduler.get_last_lr() == pytest.approx([0.25 * loaded])
        step(after)
        assert group["lr"] == pytest.approx(0.125 * loaded)


LAYOUTS = {
    "whole": [None],
    "in two": [(0, 2), (2, ROWS)],
    "in three": [(0, 1), (1, 4), (4, ROWS)],
    "one without rows": [(0, ROWS), (ROWS, ROWS)],
}
"""The rows that each copy of a stage updates."""


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("loaded", LAYOUTS)
def test_what_optimizers_keep_goes_to_whom_its_rows_go(saved, loaded, tmp_path):
    whole = trained_of(0)
    step(whole)
    contents = contents_of(tmp_path, *copies_of(whole, LAYOUTS[saved]))
    for rows in LAYOUTS[loaded]:
        after = trained_of(1, rows=rows)
        check_fits(contents, after, weights_only=False)
        give(contents, after, weights_only=False)
        start, stop = rows or (0, ROWS)
        for key in ("exp_avg", "exp_avg_sq"):
            for name, value in moments(after, key).items():
                assert torch.equal(value, moments(whole, key)[name][start:stop]), name
        for name, value in after.stage.state_dict().items():
            assert torch.equal(value, whole.stage.state_dict()[name]), name


def copies_of(whole, layout):
    """Copies of a stage that has been trained, each with the rows that it updates."""
    for part, rows in enumerate(layout):
        own = trained_of(0, rows=rows, part=part, num_parts=len(layout))
        with torch.no_grad():
            for name, value in own.stage.state_dict().items():
                value.copy_(whole.stage.state_dict()[name])
        start, stop = rows or (0, ROWS)
        for name, parameter in own.optimized.items():
            own.optimizer.state[parameter] = {
                key: value[start:stop] if value.dim() else value
                for key, value in whole.optimizer.state[whole.named[name]].items()
            }
        yield own


CORRECTED = PipeMare(t1=100, t2=0.5)


def corrected(trained, num_lowered=0, drift=None, policy=CORRECTED):
    """A stage whose backwards are corrected as PipeMare's are, three stages from the end."""
    place = Place(stage=0, num_stages=3, warm_up=3)
    store = WeightStore(
        [trained.stage.layers[0].module], policy, place, (1, 1, 1),
        trained.optimizer,
    )  # fmt: skip
    store.num_lowered = num_lowered
    for name, parameter in trained.named.items():
        if policy.t2 is None:
            continue
        store.drift_of(parameter).fill_(7.0)
        if drift is not None:
            store.drift_of(parameter).copy_(drift[name])
    return trained._replace(store=store)


@pytest.mark.parametrize("num_lowered", [0, 5])
def test_corrections_go_on_where_they_were(num_lowered, tmp_path):
    drift = {name: torch.randn(value.shape) for name, value in model_of(0).named_parameters()}
    before = corrected(trained_of(0), num_lowered, drift)
    step(before)
    after = corrected(trained_of(1), num_lowered=9)
    give(contents_of(tmp_path, before), after, weights_only=False)
    assert after.store.num_lowered == num_lowered + 1  # that of the step
    for name, parameter in after.named.items():
        assert torch.equal(after.store.drift_of(parameter), drift[name])


def test_what_nobody_has_followed_begins_at_zero(tmp_path):
    step(before := trained_of(0))
    after = corrected(trained_of(1), num_lowered=9)
    give(contents_of(tmp_path, before), after, weights_only=False)
    assert after.store.num_lowered == 0
    for parameter in after.named.values():
        assert not after.store.drift_of(parameter).any()
    assert all(torch.equal(value, before.named[name]) for name, value in after.named.items())


def test_a_policy_that_follows_no_drift_takes_none(tmp_path):
    drift = {name: torch.randn(value.shape) for name, value in model_of(0).named_parameters()}
    step(before := corrected(trained_of(0), 5, drift))
    after = corrected(trained_of(1), policy=PipeMare(t1=100))
    give(contents_of(tmp_path / "followed", before), after, weights_only=False)
    assert after.store.num_lowered == 6
    give(contents_of(tmp_path / "plain", trained_of(0)), after, weights_only=False)
    assert after.store.num_lowered == 0
