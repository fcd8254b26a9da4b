"""Groups on accelerators train what one device trains. The devices are emulated ones, which raise
where a wait, a copy or a keep-alive is missing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import InputError, StageError
from tests.kit.examples import more
from tests.kit.groups import make_net, net_loss
from tests.kit.helpers import make_plan
from tests.kit.one_device import assert_same, same
from tests.kit.training import DEADLINE_SECONDS, sgd
from tests.numerics.test_meshes import (
    CLIP,
    TOLERANCE,
    batches,
    mesh,
    momentum,
    of_sizes,
    on_one_device,
    train,
)

pytestmark = pytest.mark.usefixtures("accelerator")


def spread(plan, num_devices=4):
    return [f"emu:{seat % num_devices}" for seat in range(plan.num_seats)]


def assert_trained(model, losses, expected):
    wanted, theirs = expected
    assert same(losses.cpu(), wanted, TOLERANCE)
    assert_same(model, theirs, TOLERANCE)


@pytest.mark.parametrize(
    ("schedule", "sizes", "num_devices"),
    [
        more("1f1b", (1, 1, 2), 2),
        more("1f1b", (2, 2, 2), 4),
        ("zb-h1", (2, 1, 2), 4),
        more("interleaved-1f1b", (2, 1, 2), 3),
        # Autograd has one thread for a device, through which four backwards cannot wait for each
        # other.
        ("1f1b", (2, 1, 2), 1),
    ],
)
def test_a_mesh_on_accelerators_trains_as_one_device(schedule, sizes, num_devices):
    model = make_net()
    plan = mesh(model, schedule, *sizes)
    losses = train(model, plan, devices=spread(plan, num_devices))
    assert_trained(model, losses, on_one_device())


@pytest.mark.parametrize("sizes", [(2, 3), more((1, 2))])
def test_groups_of_different_sizes_hand_over_slices_between_devices(sizes):
    model = make_net()
    plan = of_sizes(model, "1f1b", (1, 1), sizes)
    assert_trained(model, train(model, plan, devices=spread(plan)), on_one_device())


def test_a_backward_that_fails_ends_the_step_and_the_next_one_works():
    model, calls = make_net(), []

    def fail(*_):
        raise ValueError("the third backward fails")

    def lay_in_wait(module, inputs, output):
        calls.append(output)
        if len(calls) == 3:
            output.register_hook(fail)

    hook = model.blocks[0].mlp[1].register_forward_hook(lay_in_wait)
    plan = mesh(model, "1f1b", 2, 1, 2)
    with pk.Pipeline(
        model, plan, loss=net_loss, optimizer=momentum, clip_norm=CLIP, seed=3,
        deadline_seconds=DEADLINE_SECONDS, devices=spread(plan, 2),
    ) as pipeline:  # fmt: skip
        with pytest.raises(StageError, match="the third backward fails"):
            pipeline.step(*batches()[0])
        hook.remove()
        calls.clear()
        losses = [pipeline.step(*batch) for batch in batches()]
    assert_trained(model, torch.stack(losses), on_one_device())


def test_a_layer_that_no_device_has_room_for_trains_in_parts(accelerator):
    width = 256
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width))
    size = sum(parameter.nbytes for parameter in model.parameters())
    plan = make_plan(model, 1, 2).with_tensor_split(2, {"0": "column", "1": "row"})
    for device in range(2):
        accelerator.empty_cache()
        room = 3 * size // 2  # for half of the weights and gradients, not for all of them
        accelerator.set_memory_limit(accelerator.memory_allocated(device) + room, device)
    inputs = torch.randn(4, width)
    with pk.Pipeline(
        model, plan, loss=F.mse_loss, optimizer=sgd, devices=["emu:0", "emu:1"],
        deadline_seconds=DEADLINE_SECONDS,
    ) as pipeline:  # fmt: skip
        assert pipeline.step(inputs, inputs).isfinite()


def test_members_on_different_kinds_of_device_are_refused():
    model = make_net()
    with pytest.raises(InputError, match="tensor ranks of rank 1 compute on emu and cpu"):
        train(model, mesh(model, "1f1b", 2, 1, 2), devices=["cpu", "cpu", "emu:0", "cpu"])
