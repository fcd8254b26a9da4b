"""When things happen on a device, in seconds of the host's clock; on emulated devices."""

from __future__ import annotations

import time

import pytest
import torch

from penstock.engine.device.queue import DeviceClock, DeviceQueue, Stamps

pytestmark = pytest.mark.usefixtures("accelerator")


def test_stamps_tell_seconds_of_the_hosts_clock():
    stream = torch.Stream("emu:2")
    clock = DeviceClock(stream)
    for _ in range(3):  # each time from where the last one left off
        stamps, before = Stamps(clock), time.perf_counter()
        stamps.add()
        time.sleep(0.02)
        stamps.add()
        stamps.add()
        stamps.add()
        after = time.perf_counter()
        starts, ends = stamps.seconds()
        assert len(starts) == len(ends) == 2
        assert ends[0] - starts[0] >= 0.0199
        assert before - 0.01 <= starts[0] <= ends[0] <= starts[1] <= ends[1] <= after + 0.01
        assert stamps.seconds() == (starts, ends)


def test_only_devices_of_their_own_are_stamped():
    assert DeviceQueue.on(torch.device("cpu")).stamps() is None
    assert isinstance(DeviceQueue.on(torch.device("emu:0")).stamps(), Stamps)
