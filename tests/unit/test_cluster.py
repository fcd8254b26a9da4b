import os

import pytest

from penstock import Cluster, Device, Link
from penstock.errors import InputError


def test_local_has_a_device_for_each_core_and_one_memory():
    cluster = Cluster.local()
    if hasattr(os, "sched_getaffinity"):
        assert len(cluster.devices) == len(os.sched_getaffinity(0))
    assert cluster.memory_bytes >= 0
    assert len(Cluster.local(3).devices) == 3
    assert Cluster.local(2).devices[1].name == "cpu1"


def test_a_link_takes_its_latency_and_then_its_bytes():
    assert Link().seconds(10**9) == 0
    assert Link(latency_seconds=0.5, bytes_per_second=100).seconds(200) == 2.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(devices=()), "at least one device"),
        (lambda: Cluster.local(0), "num_devices is 0"),
        (lambda: Cluster(devices=(Device(name="a"),), memory_bytes=-1), "memory_bytes is -1"),
        (lambda: Device(name="a", memory_bytes=-1), "device 'a': memory_bytes is -1"),
        (lambda: Device(name="a", speed=0), "device 'a': speed is 0"),
        (lambda: Link(latency_seconds=-1), "latency and bandwidth"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
