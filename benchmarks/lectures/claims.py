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
    SpeedUp(
        "VGG-16", "p3-2xlarge", 8, 1, (7, 1), 5.12, why="The preprint of 2018, on another cluster."
    ),
    SpeedUp("Inception-v3", "p3-2xlarge", 8, 1, (7, 1), 1.45),
    SpeedUp(
        "AlexNet", "p3-2xlarge", 8, 1, (7, 1), 6.76,
        why="The lecture names no cluster and no configuration.",
    ),
    SpeedUp(
        "ResNet-50", "p3-2xlarge", 8, 1, (8,), 1.21,
        why="Neither does it here; a year later data parallelism was best.",
    ),
)  # fmt: skip

HOSTS = {
    "cluster-a": ("A", "v100-pcie"),
    "cluster-b": ("B", "v100-sxm2"),
    "cluster-c": ("C", "titan-x"),
    "p3-2xlarge": ("2018, 10 Gbit/s", "v100-sxm2"),
}
"""By the catalogue's name: the lecture's, and the device."""


class GPipeSlowdown(NamedTuple):
    """How much lower GPipe's throughput is than PipeDream's, for GNMT-16.

    Attributes:
        host: of the catalogue.
        hosts, devices: how many hosts, and devices on each.
        published: a share.
        is_deepest: whether as many microbatches are under way as memory holds, and not as many as
            PipeDream has.
    """

    host: str
    hosts: int
    devices: int
    published: float
    is_deepest: bool = False

    @property
    def num_devices(self) -> int:
        """Of all hosts."""
        return self.hosts * self.devices


GPIPE = (
    GPipeSlowdown("cluster-a", 4, 4, 0.55),
    GPipeSlowdown("cluster-b", 2, 8, 0.71),
    GPipeSlowdown("cluster-a", 4, 4, 0.35, is_deepest=True),
    GPipeSlowdown("cluster-b", 2, 8, 0.42, is_deepest=True),
)

BESIDE_INTRA_BATCH = (
    SpeedUp("VGG-16", "cluster-a", 1, 4, (), 0.0),
    SpeedUp("AlexNet", "cluster-a", 1, 4, (), 0.0),
    SpeedUp("GNMT-8", "cluster-a", 1, 4, (), 0.0),
    SpeedUp("GNMT-16", "cluster-a", 1, 4, (), 0.0),
    SpeedUp("VGG-16", "cluster-a", 1, 4, (3, 1), 0.0),
    SpeedUp("AlexNet", "cluster-a", 1, 4, (3, 1), 0.0),
)
"""Bars whose heights the lecture does not print: model parallelism, and hybrid parallelism."""

OVERHEAD_MODELS = ("VGG-16", "AlexNet", "AWD-LM", "GNMT-8", "ResNet-50")
OVERHEAD_DEVICES = (1, 2, 4, 8, 16, 32)

PARTIME_LAYERS, PARTIME_FEATURES, PARTIME_KERNEL = 10, 16, 5
PARTIME_PIXELS = (64, 128, 256, 512)
PARTIME_STAGES = (2, 4, 8)


class LargeRun(NamedTuple):
    """PipeDream-2BW's figures for GPT.

    Attributes:
        model: a name of ``transformers.SIZES``.
        hosts: of eight V100 each.
        depth: stages of a pipeline, and ranks of Megatron's model parallelism beside it.
        batches: rows of a minibatch.
        microbatch_rows: which of them are tried.
    """

    model: str
    hosts: int
    depth: int
    batches: tuple[int, ...]
    microbatch_rows: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Of all hosts."""
        return 8 * self.hosts


LARGE_RUNS = (
    LargeRun("GPT 2.2 B", 1, 8, (64, 256), (1, 2, 4)),
    LargeRun("GPT 2.2 B", 8, 8, (128, 512), (2, 4)),
    LargeRun("GPT 3.8 B", 8, 16, (256, 512), (2, 4)),
)
LARGE_DEPTHS = (8, 16, 32)
LARGE_OVER_GPIPE, LARGE_OVER_TENSOR = 3.2, 20
"""At most, the second one of GPT 3.8 B; curves' values are not printed."""

GPIPE_TRANSFORMER = {1: (1, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)}
GPIPE_AMOEBANET = {1: (1, 1.13, 1.38), 4: (1.07, 1.26, 1.72), 32: (1.21, 1.84, 3.48)}
"""GPipe's Table 2: by microbatches, the throughput on 2, 4 and 8 accelerators, over 2 with one."""

AMOEBANET_WIDTHS = ((208, 82), (416, 318))
"""GPipe's Table 1: on one accelerator, filters and million parameters of the largest network of 18
layers, plain and with GPipe; the lecture says "almost 4 times bigger"."""

HYDRA_BELOW_GPIPE, HYDRA_OVER_NAIVE, HYDRA_LESS_ENERGY = 0.9, 4.0, 2
"""Fine-tuning of GPT-2: the runtime at most, over naive model parallelism, and energy at most."""
