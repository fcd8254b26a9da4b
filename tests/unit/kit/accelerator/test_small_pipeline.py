"""A pipeline of two devices by hand, right and with each of its waits and keep-alives left out.

Every device has a stream that computes, one that sends and one that receives. A tensor goes over
in four steps, and each is needed:

1. the stream that sends waits for the one that computed the tensor;
2. the tensor is recorded on it, as it may die before it was sent;
3. the stream that computes at the other end waits for the one that receives;
4. what was received is recorded on it, as its memory belongs to the one that receives.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

pytestmark = pytest.mark.usefixtures("accelerator")

MICROBATCHES = 4
FORWARD, BACKWARD = "forward", "backward"


class End:
    """A device and its streams."""

    def __init__(self, device):
        self.device = torch.device(device)
        self.compute, self.sends, self.receives = (torch.Stream(self.device) for _ in range(3))


class Hops:
    """Sends tensors, in four steps of which one may be left out of one direction."""

    def __init__(self, missing):
        self.missing = missing

    def send(self, tensor, source, destination, direction):
        def does(step):
            return (direction, step) != self.missing

        if does(1):
            source.sends.wait_stream(source.compute)
        with source.sends, destination.receives:
            received = tensor.detach().to(destination.device, non_blocking=True)
        if does(2):
            tensor.record_stream(source.sends)
        if does(3):
            destination.compute.wait_stream(destination.receives)
        if does(4):
            received.record_stream(destination.compute)
        return received


def stages(*devices):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device) for device in devices]


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, MICROBATCHES, 3, 4, generator=generator).unbind()


def on_ends(ends):
    """The stages and the microbatches, where the streams that compute may use them."""
    models = stages(*(end.device for end in ends))
    inputs, targets = (values.to(end.device) for values, end in zip(batch(), ends, strict=True))
    for end in ends:
        torch.accelerator.synchronize(end.device)
    return models, inputs, targets


def trained(missing=None):
    """The gradients of both stages, all forwards first."""
    ends, hops = [End("emu:1"), End("emu:2")], Hops(missing)
    models, inputs, targets = on_ends(ends)
    hiddens, received = [], []
    for microbatch in range(MICROBATCHES):
        with ends[0].compute:
            hiddens.append(models[0](inputs[microbatch]))
        received.append(hops.send(hiddens[-1], *ends, FORWARD))
    for microbatch in range(MICROBATCHES):
        value = received.pop(0).requires_grad_()
        with ends[1].compute:
            mse_loss(models[1](value), targets[microbatch]).backward()
        gradient = hops.send(value.grad, *reversed(ends), BACKWARD)
        del value
        with ends[0].compute:
            hiddens.pop(0).backward(gradient)
        del gradient
    for end in ends:
        end.compute.synchronize()
    return [weight.grad.cpu() for model in models for weight in model.parameters()]


def evaluated(missing=None):
    """The outputs of all microbatches, without anything that a backward would keep."""
    ends, hops = [End("emu:1"), End("emu:2")], Hops(missing)
    models, inputs, _ = on_ends(ends)
    outputs = []
    with torch.no_grad():
        for microbatch in range(MICROBATCHES):
            with ends[0].compute:
                hidden = models[0](inputs[microbatch])
            received = hops.send(hidden, *ends, FORWARD)
            del hidden
            with ends[1].compute:
                outputs.append(models[1](received))
            del received
    for end in ends:
        end.compute.synchronize()
    return [output.cpu() for output in outputs]


def test_with_all_waits_it_computes_what_one_device_does():
    first, second = stages("cpu", "cpu")
    inputs, targets = batch()
    outputs = []
    for value, target in zip(inputs, targets, strict=True):
        outputs.append(second(first(value)))
        mse_loss(outputs[-1], target).backward()
    expected = [weight.grad for model in (first, second) for weight in model.parameters()]
    assert all(map(torch.equal, trained(), expected))
    assert all(map(torch.equal, evaluated(), outputs))


@pytest.mark.parametrize("again", range(3))
@pytest.mark.parametrize(
    ("run", "direction", "step", "complaint"),
    [
        (trained, FORWARD, 1, "copy on .* of emu:1 reads what was used by aten::tanh"),
        (evaluated, FORWARD, 2, "emu:1 writes memory .* of a tensor which died under copy"),
        (trained, FORWARD, 3, "on .* of emu:2 reads what was used by copy on .* of emu:1"),
        (evaluated, FORWARD, 4, "copy .* writes memory .* died under aten::addmm.* of emu:2"),
        (trained, BACKWARD, 1, "copy on .* of emu:2 reads what was used by aten::mm"),
        (trained, BACKWARD, 2, "emu:2 writes memory .* of a tensor which died under copy"),
        (trained, BACKWARD, 3, "on .* of emu:1 reads what was used by copy on .* of emu:2"),
        (trained, BACKWARD, 4, "copy .* writes memory .* died under .* of emu:1"),
    ],
)
def test_without_one_of_them_it_raises_every_time(run, direction, step, complaint, again):
    with pytest.raises(RuntimeError, match=complaint):
        run((direction, step))
