"""Results of the lectures: what was published, and on what.

Figures of PipeDream's tables for VGG-16, ResNet-50 and AlexNet are the papers' (SOSP'19, and the
preprint of 2018), which the lectures quote in part. Configurations are replicas of each stage.
"""

from __future__ import annotations

from typing import NamedTuple


class SpeedUp(NamedTuple):
    """Epoch time of data parallelism over PipeDream's.

    Attributes:
        model: a name of ``works.WORKS``.
        host: of the catalogue.
        hosts, devices: how many hosts, and devices on each.
        replicas: of each stage; empty is a stage on every device.
        published: the ratio.
        why: why the prediction differs, seen after it was made.
    """

    model: str
    host: str
    hosts: int
    devices: int
    replicas: tuple[int, ...]
    published: float
    why: str = ""

    @property
    def num_devices(self) -> int:
        """Of all hosts."""
        return self.hosts * self.devices

    @property
    def given(self) -> tuple[int, ...]:
        """The replicas of every stage."""
        return self.replicas or (1,) * self.num_devices


SPEED_UPS = (
    SpeedUp("GNMT-16", "cluster-a", 1, 4, (), 1.46),
    SpeedUp("GNMT-16", "cluster-a", 4, 4, (), 2.34),
    SpeedUp(
        "GNMT-16", "cluster-b", 2, 8, (), 3.14,
        why="With hosts first, a sum crosses a card once, not eight times.",
    ),
    SpeedUp("GNMT-8", "cluster-a", 1, 4, (), 1.5),
    SpeedUp("GNMT-8", "cluster-a", 3, 4, (), 2.95),
    SpeedUp("GNMT-8", "cluster-b", 2, 8, (16,), 1.0),
    SpeedUp(
        "AWD-LM", "cluster-a", 1, 4, (), 4.25,
        why="This one has 112 MB of weights and three layers, the second of which takes 42 %.",
    ),
    SpeedUp(
        "S2VT", "cluster-c", 4, 1, (2, 1, 1), 3.01,
        why="Convolutions are trained here, and their outputs are larger than the weights.",
    ),
    SpeedUp(
        "VGG-16", "cluster-a", 4, 4, (15, 1), 5.28,
        why="Sums inside hosts first, and while the backward runs, are what data parallelism "
        "lacked.",
    ),
    SpeedUp("AlexNet", "cluster-a", 4, 4, (15, 1), 4.92),
    SpeedUp("ResNet-50", "cluster-a", 4, 4, (16,), 1.0),
)  # fmt: skip

HOSTS = {
    "cluster-a": ("A", "v100-pcie"),
    "cluster-b": ("B", "v100-sxm2"),
    "cluster-c": ("C", "titan-x"),
}
"""By the catalogue's name: the lecture's, and the device."""


class GPipeSlowdown(NamedTuple):
    """How much lower GPipe's throughput is than PipeDream's, for GNMT-16."""

    host: str
    hosts: int
    devices: int
    published: float


GPIPE = (GPipeSlowdown("cluster-a", 4, 4, 0.55), GPipeSlowdown("cluster-b", 2, 8, 0.71))

OVERHEAD_MODELS = ("VGG-16", "AlexNet", "AWD-LM", "GNMT-8", "ResNet-50")
OVERHEAD_DEVICES = (1, 2, 4, 8, 16, 32)

PARTIME_LAYERS, PARTIME_FEATURES, PARTIME_KERNEL = 10, 16, 5
PARTIME_PIXELS = (64, 128, 256, 512)
PARTIME_STAGES = (2, 4, 8)
