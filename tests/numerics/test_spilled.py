"""Stages that come and go give the bits of those that stay, whatever is asked of them."""

from __future__ import annotations

import copy
import errno
import os
import threading
import time
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import penstock as pk
from penstock.base.errors import DeadlineError, FileError, InputError, ModelError, StageError
from penstock.engine.weights.buffers import BufferPool
from penstock.engine.weights.data_paths import HostDataPath
from penstock.engine.weights.gradient_slots import GradientSlots
from penstock.engine.weights.tiers import HostStore
from penstock.planning.plans import StagePlan
from penstock.planning.plans.spilling import Spill, Tier, traffic
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import in_turns
from tests.kit.helpers import make_batch
from tests.kit.one_device import OneDevice, assert_same_values
from tests.kit.spilling import (
    HOST,
    Picky,
    make_net,
    make_tied,
    residence_of,
    spilled_pipeline,
    spilled_plan,
)
from tests.kit.training import DEADLINE_SECONDS, EachAlone, KeepingGradients, adamw, momentum, sgd

BATCHES = [make_batch(rows, seed=rows) for rows in (13, 16, 8, 13)]


def trained(model, spill, batches=BATCHES, **given):
    """(losses, what the model has become, what it says) of a pipeline."""
    with spilled_pipeline(model, spill, **given) as pipeline:
        losses = [pipeline.step(*batch) for batch in batches]
        return losses, pipeline.state_dict(), pipeline.evaluate(batches[0][0])


def assert_alike(ours, theirs):
    assert torch.equal(torch.stack(ours[0]), torch.stack(theirs[0]))
    assert_same_values(ours[1], theirs[1])
    assert torch.equal(ours[2], theirs[2])


CASES = [
    (clip, recompute, group, ahead)
    for clip in (None, 0.05)
    for recompute in ("none", "stage", "layers")
    for group in (0, 1, 2)
    for ahead in (1, 0, 2, 9)
]


@pytest.mark.parametrize(("clip", "recompute", "group", "ahead"), in_turns(CASES, 5))
def test_what_comes_and_goes_trains_as_what_stays(tmp_path, clip, recompute, group, ahead):
    how = {"options": {"clip_norm": clip}, "recompute": recompute}
    spill = Spill(tier=Tier(folder=str(tmp_path)), ahead=ahead)
    ours = trained(make_net(), spill, group=group, **how)
    assert_alike(ours, trained(make_net(), None, **how))


def test_it_is_what_one_device_trains():
    model, other = make_net(), make_net()
    single = SingleDevice(other, 4, F.cross_entropy, adamw, seed=3)
    losses = [single.step(*batch) for batch in BATCHES]
    ours = trained(model, Spill(tier=HOST))
    assert torch.equal(torch.stack(ours[0]), torch.stack(losses))
    assert_same_values(ours[1], other.state_dict())


def test_on_two_ranks_too():
    cuts = (1, 2, 3)
    ours = trained(make_net(), Spill(tier=HOST), num_ranks=2, cuts=cuts)
    assert_alike(ours, trained(make_net(), None, num_ranks=2, cuts=cuts))
    clipped = {"num_ranks": 2, "cuts": cuts, "options": {"clip_norm": 0.05}}
    assert_alike(
        trained(make_net(), Spill(tier=HOST), **clipped), trained(make_net(), None, **clipped)
    )


OPTIMIZERS = {
    "SGD": sgd,
    "momentum": momentum,
    "AdamW": adamw,
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, foreach=True, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_that_steps_once(name):
    options = {"optimizer": OPTIMIZERS[name]}
    ours, theirs = (
        trained(make_net(), spill, BATCHES[:3], options=options)
        for spill in (Spill(tier=HOST), None)
    )
    assert_alike(ours, theirs)


class Renewing(EachAlone):
    """Keeps another tensor after each step, as nobody forbids."""

    def update(self, parameter, state):
        state["kept"] = 0.9 * state.get("kept", torch.zeros_like(parameter)) + parameter.grad
        parameter.sub_(state["kept"], alpha=0.1)


def test_state_that_is_another_object_each_time():
    options = {"optimizer": Renewing}
    ours, theirs = (
        trained(make_net(), spill, options=options) for spill in (Spill(tier=HOST), None)
    )
    assert_alike(ours, theirs)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("make", [make_net, make_tied, lambda: make_net(frozen=True)])
def test_schedulers_ties_and_frozen_weights(make, clip):
    options = {"clip_norm": clip, "lr_scheduler": scheduler}
    ours, theirs = (trained(make(), spill, options=options) for spill in (Spill(tier=HOST), None))
    assert_alike(ours, theirs)


SPREAD = [(1, None, 1, 0), (5, None, 1, 0), (2, [1], 0, 2), (2, [1, 2, 3], 2, 2), (1, [3], 2, 0)]


@pytest.mark.parametrize(
    ("clip", "optimizer", "num_ranks", "cuts", "ahead", "group"),
    in_turns(
        [(clip, by, *how) for clip in (None, 0.05) for by in (adamw, sgd) for how in SPREAD], 3
    ),
)
def test_accumulation_over_several_calls(clip, optimizer, num_ranks, cuts, ahead, group):
    """Within the budget of steps that update, with optimizers whose state has room in it or not."""

    def train(spill):
        model, options = make_net(), {"clip_norm": clip, "optimizer": optimizer}
        spread = {"num_ranks": num_ranks, "cuts": cuts, "group": group}
        with spilled_pipeline(model, spill, options=options, **spread) as pipeline:
            for _ in range(2):
                for update in (False, False, True):
                    pipeline.step(*BATCHES[0], update=update, share=1 / 3)
            return pipeline.state_dict()

    assert_same_values(train(Spill(tier=HOST, ahead=ahead)), train(None))


def test_a_loss_scale_and_updates_that_are_skipped():
    def train(spill):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
        options = {"grad_scaler": scaler, "clip_norm": 0.5}
        with spilled_pipeline(make_net(), spill, options=options) as pipeline:
            for batch in BATCHES * 2:
                pipeline.step(*batch)
            return pipeline.state_dict(), scaler.state_dict(), pipeline.grad_norm

    (ours, scale, norm), (theirs, same_scale, same_norm) = train(Spill(tier=HOST)), train(None)
    assert scale == same_scale
    assert torch.equal(norm, same_norm)
    assert_same_values(ours, theirs)


def test_parameter_groups_and_a_norm_that_is_told():
    def by_kind(parameters):
        named = list(parameters.named())
        biases = [one for name, one in named if name.endswith("bias")]
        others = [one for name, one in named if not name.endswith("bias")]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": others}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)

    options = {"optimizer": by_kind, "clip_norm": 0.05}
    ours, theirs = (
        trained(make_net(), spill, options=options) for spill in (Spill(tier=HOST), None)
    )
    assert_alike(ours, theirs)


def test_a_loop_and_evaluations_between():
    def train(spill):
        with spilled_pipeline(make_net(), spill, options={"clip_norm": 0.05}) as pipeline:
            said = []
            for _ in range(2):
                said += [
                    torch.stack(list(pipeline.steps(BATCHES))),
                    pipeline.evaluate(BATCHES[1][0]),
                ]
            return said, pipeline.state_dict()

    (ours, weights), (theirs, same_weights) = train(Spill(tier=HOST)), train(None)
    assert all(map(torch.equal, ours, theirs))
    assert_same_values(weights, same_weights)


def test_a_channels_last_convolution_keeps_its_strides():
    def train(spill):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4)
        ).to(memory_format=torch.channels_last)
        inputs = torch.randn(6, 3, 8, 8).to(memory_format=torch.channels_last)
        targets = torch.randint(0, 4, (6,))
        with spilled_pipeline(model, spill) as pipeline:
            losses = [pipeline.step(inputs, targets) for _ in range(3)]
            return torch.stack(losses), pipeline.state_dict()

    (ours, weights), (theirs, same_weights) = train(Spill(tier=HOST)), train(None)
    assert torch.equal(ours, theirs)
    assert_same_values(weights, same_weights)


@pytest.mark.parametrize(
    ("count", "group", "clip"), [(1, 0, None), (8, 0, None), (4, 1, None), (4, 2, 0.1), (4, 0, 0.1)]
)
def test_traffic_is_the_formula_to_the_byte(count, group, clip):
    options = {"clip_norm": clip}
    with spilled_pipeline(
        make_net(), num_microbatches=count, group=group, options=options
    ) as pipeline:
        residence = residence_of(pipeline)
        for _ in range(3):
            residence.transfers.finish()
            before = residence.store.read_bytes, residence.store.written_bytes
            pipeline.step(*BATCHES[1])
        residence.transfers.finish()
        read, written = residence.store.read_bytes, residence.store.written_bytes
        stages = [
            StagePlan(
                layers=(str(stage),),
                rank=0,
                parameter_bytes=residence.weight_bytes(stage),
                optimizer_bytes=residence.state_bytes(stage),
            )
            for stage in residence.stages
        ]
        expected = traffic(stages, count, group, agrees=clip is not None)
        assert (read - before[0], written - before[1]) == expected
        weights = [stage.parameter_bytes for stage in stages]
        state = sum(stage.optimizer_bytes for stage in stages)
        if not group and clip is None:
            once = 2 * sum(weights) + state - weights[0] - weights[-1], sum(weights) + state
            assert expected == once


@pytest.mark.parametrize("clip", [None, 0.05])
def test_counted_memory_is_what_the_order_says(monkeypatch, clip):
    dropped = []
    monkeypatch.setattr(BufferPool, "drop", lambda _, buffer: dropped.append(buffer))
    with spilled_pipeline(make_net(), options={"clip_norm": clip}) as pipeline:
        for batch in BATCHES:
            pipeline.step(*batch)
        buffers = residence_of(pipeline).buffers
        assert buffers.used_peak_bytes == buffers.budget_bytes
        assert buffers.peak_bytes <= buffers.budget_bytes
        assert not dropped  # somebody would still see that memory, and nobody count it


class Twice(nn.Module):
    """Goes through the same weights two times."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, value):
        return self.linear(self.linear(value).tanh()) + self.linear.weight.mean()


class Descending(nn.Module):
    """Takes a gradient in its forward, and goes on with it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, value):
        if not torch.is_grad_enabled():
            return value
        there = value.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.linear(there).square().sum(), there, create_graph=True)
        return self.linear(value) - 0.01 * slope


class LookingUp(nn.Module):
    """Has an embedding, whose gradients are no products."""

    def __init__(self):
        super().__init__()
        self.rows, self.linear = nn.Embedding(2, 24), nn.Linear(24, 24)

    def forward(self, value):
        return self.linear(value) + self.rows((value[:, :1] > 0).long()).squeeze(1)


def make_linear(inner=None):
    """A linear layer with more around it, between linear layers."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(24, 24), nn.GELU()) if inner is None else inner
    block = nn.Sequential(nn.LayerNorm(24), inner, nn.Dropout(0.2), nn.Linear(24, 24))
    return nn.Sequential(nn.Linear(16, 24), block, nn.Linear(24, 4))


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_gradients_are_written_where_they_are_added_up(monkeypatch, recompute, clip):
    places, memory_for = [], GradientSlots.memory_for

    def noted(self, weight):
        place = memory_for(self, weight)
        places.append((weight.grad is None, place is not None))
        return place

    how = {"options": {"clip_norm": clip}, "recompute": recompute}
    stays = trained(make_linear(), None, **how)
    monkeypatch.setattr(GradientSlots, "memory_for", noted)
    assert_alike(trained(make_linear(), Spill(tier=HOST), **how), stays)
    # Autograd makes those that go through a stage's first forward: there are four linear layers,
    # one of which is in the last stage, whose forward never runs again.
    made = 1 if recompute == "stage" else 4
    assert len(places) == 16 * len(BATCHES) - made
    assert places.count((True, True)) == 4 * len(BATCHES) - made
    assert all(has_place for _, has_place in places)


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("inner", [Twice, Descending, LookingUp])
def test_gradients_that_wait_for_others_or_are_taken_in_a_forward(inner, update):
    def train(spill):
        with spilled_pipeline(make_linear(inner()), spill) as pipeline:
            for last in (False, True) * 2:
                pipeline.step(*BATCHES[0], update=update or last)
            return pipeline.state_dict()

    torch.manual_seed(1)
    ours = train(Spill(tier=HOST))
    torch.manual_seed(1)
    assert_same_values(ours, train(None))


def test_a_hook_of_a_linear_layers_weight_is_called_as_ever():
    def train(spill):
        model, norms = make_linear(), []
        model[1][3].weight.register_hook(lambda gradient: gradient * 0.5)
        model[2].weight.register_post_accumulate_grad_hook(
            lambda weight: norms.append(weight.grad.norm())
        )
        return trained(model, spill), norms

    (ours, norms), (theirs, same_norms) = train(Spill(tier=HOST)), train(None)
    assert_alike(ours, theirs)
    assert len(norms) == 4 * len(BATCHES) and all(map(torch.equal, norms, same_norms))


def test_a_plan_that_allows_too_little_is_refused_before_the_first_step():
    spill = Spill(tier=HOST, memory_bytes=50_000)
    with pytest.raises(InputError, match=r"rank 0 would hold .* and the plan allows 48.8 KiB"):
        spilled_pipeline(make_net(), spill)


def test_the_least_memory_that_plans_is_enough(tmp_path):
    """Of stages that fill no page, and of an optimizer that takes gradients away."""
    model, batch = nn.Sequential(*(nn.Linear(20, 20) for _ in range(6))), torch.randn(8, 20)
    cluster = pk.Cluster.local(1, tiers=[Tier(folder=str(tmp_path))])
    profiled = {"loss": F.mse_loss, "optimizer": KeepingGradients}
    graph = pk.profile(model, batch[:4], targets=batch[:4], repeats=1, ranks=0, **profiled)
    for memory_bytes in range(10_000, 100_000, 1000):
        with suppress(pk.PlanError):
            plan = pk.plan(
                graph, cluster, microbatches=2, spill="always", memory_bytes=memory_bytes
            )
            break
    single = SingleDevice(copy.deepcopy(model), 2, F.mse_loss, KeepingGradients)
    with pk.Pipeline(model, plan, deadline_seconds=DEADLINE_SECONDS, **profiled) as pipeline:
        for _ in range(3):
            assert torch.equal(pipeline.step(batch, batch), single.step(batch, batch))


def test_what_has_left_cannot_be_read():
    model = make_net()
    with spilled_pipeline(model) as pipeline:
        pipeline.step(*BATCHES[0])
        for layer in model:
            for parameter in layer.parameters():
                assert parameter.isnan().all()
        model.eval()
        assert model(torch.zeros(2, 16)).isnan().all()
        assert not any(value.isnan().any() for value in pipeline.state_dict().values())
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_weights_that_a_hook_changes_in_a_backward_are_kept():
    def train(spill):
        model = make_net()

        def shrink(parameter):
            with torch.no_grad():
                parameter.mul_(0.9)

        model[1][0].weight.register_post_accumulate_grad_hook(shrink)
        with spilled_pipeline(model, spill, num_microbatches=1) as pipeline:
            for batch in BATCHES:
                pipeline.step(*batch, update=False)
            return pipeline.state_dict()

    assert_same_values(train(Spill(tier=HOST)), train(None))


def test_weights_that_are_thawed_later_are_trained():
    def train(spill):
        model = make_net(frozen=True)
        with spilled_pipeline(model, spill) as pipeline:
            pipeline.step(*BATCHES[0])
            model[3].bias.requires_grad_(True)
            for batch in BATCHES:
                pipeline.step(*batch)
            return pipeline.state_dict()

    assert_same_values(train(Spill(tier=HOST)), train(None))


def test_a_loop_that_saves_goes_on_where_it_was(tmp_path):
    def train(spill, folder):
        wanted = pk.Checkpoints(folder, every=2)
        with spilled_pipeline(make_net(), spill, options={"clip_norm": 0.05}) as pipeline:
            first = pipeline.load(folder) or 0
            return list(pipeline.steps(BATCHES[first:], checkpoints=wanted))

    whole = train(None, tmp_path / "whole")
    spill = Spill(tier=HOST)
    with spilled_pipeline(make_net(), spill, options={"clip_norm": 0.05}) as pipeline:
        loop = pipeline.steps(BATCHES, checkpoints=pk.Checkpoints(tmp_path / "ours", every=2))
        assert [next(loop), next(loop)] == whole[:2]
        loop.close()
    assert train(spill, tmp_path / "ours") == whole[2:]


class Leaky(nn.Module):
    """Hands on its weight itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, value):
        return value, self.weight


class Reader(nn.Module):
    def forward(self, values):
        value, weight = values
        return value @ weight


def test_a_view_of_a_weight_that_is_handed_on_is_an_error():
    model = nn.Sequential(Leaky(), Reader(), nn.Linear(16, 4))
    with spilled_pipeline(model) as pipeline, pytest.raises(StageError, match=r"clone\(\)"):
        pipeline.step(*BATCHES[0])


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("where", [1, 5])
def test_a_step_that_failed_can_be_tried_again(clip, where):
    def train(spill, fails):
        model = make_net()
        picky = Picky()
        model.insert(where, picky)
        with spilled_pipeline(model, spill, options={"clip_norm": clip}) as pipeline:
            for batch in BATCHES:
                if fails:
                    picky.fails = True
                    with pytest.raises(StageError, match="RuntimeError: no"):
                        pipeline.step(*batch)
                    picky.fails = False
                pipeline.step(*batch)
            return {
                key: value for key, value in pipeline.state_dict().items() if "num_b" not in key
            }

    def without_statistics(state):  # which keep what a failed step did to them
        return {key: value for key, value in state.items() if "running" not in key}

    ours, theirs = train(Spill(tier=HOST), fails=True), train(None, fails=True)
    assert_same_values(without_statistics(ours), without_statistics(theirs))


@pytest.mark.parametrize("clip", [None, 0.05])
def test_checkpoints_go_both_ways(tmp_path, clip):
    options = {"clip_norm": clip, "lr_scheduler": scheduler}
    reference = trained(make_net(), None, options=options)
    for first, second in ((Spill(tier=HOST), None), (None, Spill(tier=HOST))):
        folder = tmp_path / ("ours" if first else "theirs")
        with spilled_pipeline(make_net(), first, options=options) as pipeline:
            for batch in BATCHES[:2]:
                pipeline.step(*batch)
            pipeline.save(folder)
        with spilled_pipeline(make_net(seed=9), second, options=options) as pipeline:
            pipeline.step(*BATCHES[3])
            assert pipeline.load(folder) == 2
            losses = [pipeline.step(*batch) for batch in BATCHES[2:]]
            assert torch.equal(torch.stack(losses), torch.stack(reference[0][2:]))
            assert_same_values(pipeline.state_dict(), reference[1])


def test_a_model_on_meta_is_drawn_stage_by_stage():
    def meta():
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 4))

    assert_alike(trained(meta(), Spill(tier=HOST)), trained(meta(), None))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("spill", [Spill(tier=HOST), None])
def test_weights_come_from_files(tmp_path, spill, parts):
    whole = make_net(seed=7)
    items = sorted(whole.state_dict().items())
    for part in range(parts):
        save_file(dict(items[part::parts]), tmp_path / f"part-{part}.safetensors")
    with torch.device("meta"):
        meta = make_net()
    path = tmp_path if parts > 1 else tmp_path / "part-0.safetensors"
    ours = trained(meta, spill, options={"initial_weights": path})
    assert_alike(ours, trained(make_net(seed=7), None))


def test_weights_of_another_model_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    state = make_net().state_dict()
    for wrong, match in (
        ({key: value for key, value in state.items() if key != "3.bias"}, r"lacks '3.bias'"),
        ({**state, "more": torch.zeros(2)}, "has, beside the model's, 'more'"),
        ({**state, "3.bias": torch.zeros(3)}, r"'3.bias' as torch.float32 of shape \(3,\)"),
    ):
        save_file(wrong, path)
        with pytest.raises(FileError, match=match):
            spilled_pipeline(make_net(), options={"initial_weights": path})
    path.write_text("nothing")
    with pytest.raises(FileError, match="cannot read the weights"):
        spilled_pipeline(make_net(), options={"initial_weights": path})


def test_a_model_that_is_never_trained_can_still_answer(tmp_path):
    model, other = make_net(), make_net()
    options = {"loss": None, "optimizer": None}
    spill = Spill(tier=Tier(folder=str(tmp_path)))
    with spilled_pipeline(model, spill, options=options) as pipeline:
        said = pipeline.evaluate(BATCHES[0][0])
        assert torch.equal(pipeline.evaluate(BATCHES[0][0]), said)
        residence = residence_of(pipeline)
        assert residence.store.read_bytes == 2 * sum(
            residence.weight_bytes(stage) for stage in residence.stages
        )
    with spilled_pipeline(other, None, options=options) as pipeline:
        assert torch.equal(pipeline.evaluate(BATCHES[0][0]), said)


REFUSED = {
    "optimizer": ({"optimizer": None}, "optimizer="),
    "post_validate": ({"post_validate": True, "clip_norm": 1.0}, "post_validate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_come_and_go_is_refused(name):
    options, match = REFUSED[name]
    with pytest.raises(InputError, match=match):
        spilled_pipeline(make_net(), options=options)


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(9, 16, sparse=True), nn.Flatten(), nn.Linear(16, 4))
    with pytest.raises(ModelError, match="sparse=False"):
        spilled_pipeline(model)


class Global(torch.optim.SGD):
    """Keeps something for all of its parameters together."""

    def step(self, closure=None):
        self.state["all"] = {"sum": torch.ones(3)}
        return super().step(closure)


def test_state_of_no_parameter_is_refused():
    options = {"optimizer": lambda parameters: Global(parameters, lr=0.1)}
    with (
        spilled_pipeline(make_net(), options=options) as pipeline,
        pytest.raises(StageError, match="belong to no parameter"),
    ):
        pipeline.step(*BATCHES[0])


def test_plans_that_cannot_come_and_go_are_refused():
    plan = spilled_plan(make_net())
    for schedule, match in (("pipedream", "never flushes"), ("zb-h1", "splits backwards")):
        with pytest.raises(InputError, match=match):
            pk.Plan(
                model="",
                schedule=schedule,
                num_microbatches=4,
                stages=plan.stages[:1],
                spill=Spill(tier=HOST),
            )


def test_a_tier_without_room_is_known_before_the_first_step(monkeypatch, tmp_path):
    real, limit = os.posix_fallocate, 60_000

    def limited(file, offset, length):
        if offset + length > limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    with pytest.raises(FileError, match=r"no room for .* of optimizer state of stage \d"):
        spilled_pipeline(make_net(), Spill(tier=Tier(folder=str(tmp_path))))
    assert not list(tmp_path.iterdir())


def test_a_flipped_bit_names_stage_op_and_offset(tmp_path):
    with spilled_pipeline(make_net(), Spill(tier=Tier(folder=str(tmp_path)))) as pipeline:
        pipeline.step(*BATCHES[0])
        residence = residence_of(pipeline)
        residence.transfers.finish()
        extent = residence._weights[3][0].extent
        file = f"/proc/self/fd/{residence.store._file}"
        with open(file, "r+b", buffering=0) as handle:
            handle.seek(extent.offset + 100)
            (byte,) = handle.read(1)
            handle.seek(extent.offset + 100)
            handle.write(bytes([byte ^ 4]))
            os.fsync(handle.fileno())
        with pytest.raises(StageError, match=rf"3F0.*stage 3.*offset {extent.offset}"):
            pipeline.step(*BATCHES[0])


def test_nothing_is_left_in_the_folder(tmp_path):
    with spilled_pipeline(make_net(), Spill(tier=Tier(folder=str(tmp_path)))) as pipeline:
        pipeline.step(*BATCHES[0])
        assert not list(tmp_path.iterdir())


def test_one_device_of_plain_torch_agrees_without_dropout():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    other = copy.deepcopy(model)
    single = OneDevice(other, 4, optimizer=adamw, clip_norm=0.1)
    losses = [single.step(*batch) for batch in BATCHES]
    ours = trained(model, Spill(tier=HOST), options={"clip_norm": 0.1})
    assert torch.equal(torch.stack(ours[0]), torch.stack(losses))
    assert_same_values(ours[1], other.state_dict())


class Stalled(HostStore):
    """Answers no more once it is told to."""

    stalls = False

    def _get(self, extent, start, memory):
        while self.stalls:
            time.sleep(0.01)
        super()._get(extent, start, memory)


def test_a_tier_that_does_not_answer_ends_at_the_deadline(monkeypatch):
    monkeypatch.setattr("penstock.engine.weights.data_paths.opened", lambda tier: Stalled())
    with spilled_pipeline(make_net(), options={"deadline_seconds": 0.5}) as pipeline:
        pipeline.step(*BATCHES[0])
        Stalled.stalls = True
        with pytest.raises(DeadlineError, match=r"weights of stage 1 have not come from main mem"):
            pipeline.step(*BATCHES[0])
        Stalled.stalls = False


class Broken(HostStore):
    """Cannot write any more once it is told to."""

    fails = False

    def _put(self, extent, memory, start=0):
        if self.fails:
            raise FileError(f"cannot write the {extent.whose}: Input/output error")
        super()._put(extent, memory, start)


def test_a_write_that_fails_behind_compute_is_told_by_the_next_op_that_needs_it(monkeypatch):
    store = Broken()
    monkeypatch.setattr("penstock.engine.weights.data_paths.opened", lambda tier: store)
    with spilled_pipeline(make_net()) as pipeline:
        pipeline.step(*BATCHES[0])
        residence_of(pipeline).transfers.finish()
        store.fails = True
        with pytest.raises(StageError, match=r"op 3LEAVE_B3: FileError: cannot write the weights"):
            pipeline.step(*BATCHES[0])
        store.fails = False


def test_what_waits_for_weights_is_idle_in_the_timeline(monkeypatch):
    """As it is predicted: an op begins when its weights are there."""
    read_piece = HostStore.read_piece

    def slowly(self, extent, start, memory):
        time.sleep(0.02)
        read_piece(self, extent, start, memory)

    monkeypatch.setattr(HostStore, "read_piece", slowly)
    with spilled_pipeline(make_net(), options={"clip_norm": 0.05}) as pipeline:
        for _ in range(2):
            pipeline.step(*BATCHES[0])
        timeline = pipeline.timeline
        assert timeline.makespan > 3 * timeline.busy[0]  # mostly, it waits
        starts = [span.start for span in timeline.spans]
        assert starts == sorted(starts)


def pictures(seed):
    """A convolution whose weights lie in another order, and layers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 32), nn.Tanh(), nn.Linear(32, 4)
    ).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_checkpoint_is_read_from_the_tier_while_training_goes_on(tmp_path, monkeypatch, kind):
    """What is saved is what was trained when it was asked for, in the memory of the budget."""
    may_read = threading.Event()
    peek = HostDataPath.peek

    def late(self, *args):
        assert may_read.wait(DEADLINE_SECONDS)
        peek(self, *args)

    monkeypatch.setattr(HostDataPath, "peek", late)
    tier = HOST if kind == "host" else Tier(folder=str(tmp_path))
    batches = [(torch.randn(8, 3, 6, 6), torch.randint(0, 4, (8,))) for _ in range(6)]
    with spilled_pipeline(pictures(0), Spill(tier=tier)) as pipeline:
        ends = []
        for start in (0, 2, 4):
            may_read.clear()
            pipeline.step(*batches[start])
            saved = pipeline.state_dict()
            pipeline.save(tmp_path / "run")
            pipeline.step(*batches[start + 1])  # the files are not there yet
            assert not list((tmp_path / "run").glob(f"step-{start + 1:08}/stage-*"))
            may_read.set()
            pipeline._keeper._saver.wait()
            ends.append(residence_of(pipeline).store._end)
        buffers = residence_of(pipeline).buffers
        assert buffers.peak_bytes <= buffers.budget_bytes
        trained = pipeline.state_dict()
    assert ends[1] == ends[2]  # what was read has become free
    with spilled_pipeline(pictures(9), None) as pipeline:
        assert pipeline.load(tmp_path / "run") == 5
        assert_same_values(pipeline.state_dict(), saved)
        pipeline.step(*batches[5])
        assert_same_values(pipeline.state_dict(), trained)
