"""Live streams on accelerators learn what they learn on the CPU, and nobody reads too early."""

from __future__ import annotations

import torch

from tests.kit.live import LEARN, Given, frames_of, live_plan, pushed, stream_of
from tests.kit.streams import layered_model

FRAMES = [Given(frame.float(), target.float()) for frame, target, _ in frames_of([LEARN] * 20)]


def learned(**how):
    """The losses of a stream, and copies of its weights in the middle and at its end."""
    model = layered_model().float().eval()  # dropout draws other numbers elsewhere
    with stream_of(model, live_plan(model, 2), **how) as stream:
        results = pushed(stream, FRAMES[:9])
        middle = stream.state_dict()
        results += pushed(stream, FRAMES[9:])
        end = stream.state_dict()
    return [result.loss.cpu() for result in results], middle, end


def test_a_stream_on_devices_is_that_on_the_cpu(accelerator):
    """The gauge of how frames change read them before they had come to the device."""
    losses, *states = learned(devices=["emu:0", "emu:1"])
    expected, *their_states = learned(devices="cpu")
    torch.testing.assert_close(losses, expected)
    for state, theirs in zip(states, their_states, strict=True):
        assert {value.device.type for value in state.values()} == {"cpu"}
        torch.testing.assert_close(state, theirs)
