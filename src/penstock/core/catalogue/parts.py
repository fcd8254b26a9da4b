"""What the catalogue says of hardware and software, each number with its source: ``Figure``,
``Curve``, ``Efficiency``, ``Hardware``, ``HostSpec``, ``Software``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal, NamedTuple

from msgspec import field

from penstock.base.errors import InputError
from penstock.base.values import LEAST_AMOUNT, Value, amount, shown

UNSOURCED = "unsourced"
"""The source of what is from memory, or assumed."""


class Figure(NamedTuple):
    """A number and where it comes from; in a file ``[value, "source"]``."""

    value: float
    source: str = UNSOURCED


class Curve(Value, frozen=True, kw_only=True):
    """A share of a peak by the amount of work of one call.

    Attributes:
        points: (amount, share), amounts ascending; between them the share changes evenly with the
            logarithm of the amount, outside it stays.
        source: where they come from.

    Raises:
        InputError: no points, amounts that do not ascend, or a share that is not positive.
    """

    points: tuple[tuple[float, float], ...]
    source: str = UNSOURCED

    def __post_init__(self) -> None:
        self.check_fields("curve")
        amounts = [point[0] for point in self.points]
        if not amounts or amounts != sorted(set(amounts)) or amounts[0] < LEAST_AMOUNT:
            raise InputError("a curve needs points [amount, share] with ascending amounts above 0")
        if any(share <= 0 for _, share in self.points):
            raise InputError("a share of a curve is not above 0")

    def at(self, work: float) -> float:
        """The share that a call of so much work reaches."""
        points = self.points
        place = bisect_left(points, (work, 0.0))
        if place == 0 or place == len(points):
            return points[min(place, len(points) - 1)][1]
        (low, first), (high, second) = points[place - 1 : place + 1]
        return first + (second - first) * math.log(work / low) / math.log(high / low)


Attention = Literal["torch", "cudnn", "flash-1"]
"""Libraries of fused attention: torch's own (FlashAttention-2), cuDNN's, the first
FlashAttention."""

_ASSUMED_ATTENTION = (Figure(0.5), Figure(0.4))


class Efficiency(Value, frozen=True, kw_only=True):
    """How much of its peaks kernels of a device reach.

    Attributes:
        matmul: a matrix product: GFLOP of the call, share of the peak of its dtype.
        batched_matmul, convolution: of what a matrix product of as much work reaches.
        attention: a fused attention, by library: shares of the peak, forward and backward.
        compute_by_kind: curves of their own in place of all these, by kind of kernel; with
            ``-backward`` behind it where those of a backward differ: GFLOP of the call, share of
            the peak.
        memory: share of the memory's bandwidth that other kernels reach.
        memory_by_kind: curves in place of it, by kind of kernel as above, and by ``few-rows`` for
            products that read more than they compute: bytes of the call, share of the bandwidth.
        launch_seconds: of any kernel, beside its work.
        by_dtype: factors on shares of matrix products.
        forward_op_seconds, backward_op_seconds: on a CPU: what autograd takes for an op besides.
        view_seconds: on a CPU: an op that moves nothing.
    """

    matmul: Curve
    batched_matmul: Figure = Figure(1.0)
    convolution: Figure = Figure(1.0)
    attention: dict[Attention, tuple[Figure, Figure]] = field(default_factory=dict)
    compute_by_kind: dict[str, Curve] = field(default_factory=dict)
    memory: Figure = Figure(0.8)
    memory_by_kind: dict[str, Curve] = field(default_factory=dict)
    launch_seconds: Figure = Figure(0.0)
    by_dtype: dict[str, Figure] = field(default_factory=dict)
    forward_op_seconds: Figure = Figure(0.0)
    backward_op_seconds: Figure = Figure(0.0)
    view_seconds: Figure = Figure(0.0)

    def attention_share(self, library: Attention, *, backward: bool) -> Figure:
        """What a library's fused attention reaches; where nobody says, what torch's does."""
        shares = self.attention.get(library) or self.attention.get("torch", _ASSUMED_ATTENTION)
        return shares[backward]


class Hardware(Value, frozen=True, kw_only=True):
    """A device of the catalogue.

    Attributes:
        name: short, as ``h100-sxm``.
        title: for people.
        aliases: other names that mean it.
        kind: ``"gpu"`` (any accelerator) or ``"cpu"``.
        host: the usual host that has it.
        assumed_host: where the catalogue knows none, that of a device like it, whose links and
            cards its own are assumed to be.
        memory_bytes: as sold; 0 where memory is shared.
        memory_bytes_per_second: bandwidth of its memory.
        flops_per_second: peaks by dtype (``fp32, tf32, fp16, bf16, fp8, fp4``), dense.
        efficiency: what kernels reach of them.
        allocator_slack: what its allocator takes besides tensors, as a share of these; of a CPU
            nothing.
    """

    name: str
    title: str
    efficiency: Efficiency
    memory_bytes: Figure
    memory_bytes_per_second: Figure
    flops_per_second: dict[str, Figure]
    aliases: tuple[str, ...] = ()
    kind: Literal["cpu", "gpu"] = "gpu"
    host: str = ""
    assumed_host: str = ""
    allocator_slack: Figure | None = None

    def __post_init__(self) -> None:
        whose = f"device {shown(self.name)}"
        self.check_fields(whose)
        if not self.flops_per_second or self.memory_bytes_per_second.value <= 0:
            raise InputError(f"{whose}: give flops_per_second and memory_bytes_per_second")
        for dtype, peak in self.flops_per_second.items():
            if amount(f"{whose}: flops_per_second of {dtype}", peak.value) == 0:
                raise InputError(f"{whose}: flops_per_second of {dtype} is 0; leave it out")

    @property
    def slack(self) -> Figure:
        """``allocator_slack``; of an accelerator of which nobody says it, the most that was
        measured of another; the source says that it was not."""
        if self.allocator_slack is not None:
            return self.allocator_slack
        return Figure(0.08 if self.kind == "gpu" else 0.0)

    def has_peak(self, dtype: str) -> bool:
        """Whether a peak is known for a dtype, or for one that is as wide or wider."""
        return self._peak(dtype) is not None

    def peak(self, dtype: str) -> Figure:
        """The peak for a dtype; where the catalogue has none, that of the nearest dtype that is as
        wide or wider.

        Raises:
            InputError: there is none either.
        """
        figure = self._peak(dtype)
        if figure is None:
            raise InputError(
                f"nobody knows how fast {self.name} multiplies {dtype}; it has "
                f"{', '.join(self.flops_per_second)}: convert the model to one of these, say "
                "arithmetic=… where products are computed in a narrower one, or write the figure "
                "into a file of your own (docs/estimating.md)"
            )
        return figure

    def _peak(self, dtype: str) -> Figure | None:
        names = (dtype, *_WIDER.get(dtype, ()))
        return next(
            (self.flops_per_second[name] for name in names if name in self.flops_per_second), None
        )

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """(name, figure) of each of its own numbers, without those of its efficiency."""
        yield "memory", self.memory_bytes
        yield "allocator's slack", self.slack
        yield "memory bandwidth", self.memory_bytes_per_second
        yield from self.flops_per_second.items()


_WIDER = {
    "fp4": ("fp8", "bf16", "fp16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "tf32": ("fp32",),
}
"""Dtypes as wide or wider, nearest first: of no device do narrower ones say how fast it is."""


class LinkSpec(Value, frozen=True, kw_only=True):
    """How devices of a host are joined: bandwidth of each in each direction."""

    bytes_per_second: Figure
    kind: Literal["shared-memory", "nvlink", "pcie"] = "nvlink"
    latency_seconds: Figure = Figure(0.0)


class CardSpec(Value, frozen=True, kw_only=True):
    """A network card: how many devices share it, and its bandwidth in each direction."""

    bytes_per_second: Figure
    devices_per_card: int = 1
    latency_seconds: Figure = Figure(0.0)


class HostSpec(Value, frozen=True, kw_only=True):
    """A machine of the catalogue.

    Attributes:
        name, title: as those of a device.
        device: the short name of its devices.
        devices: how many.
        link: between those of a switch, or of the host.
        switch: devices behind one PCIe switch; 0 where there is none.
        across: between switches; ``link`` by default.
        card: its network cards.
    """

    name: str
    title: str
    device: str
    devices: int
    card: CardSpec
    link: LinkSpec | None = None
    switch: int = 0
    across: LinkSpec | None = None

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """(name, figure) of each of its own numbers."""
        for name, link in (("link", self.link), ("across", self.across), ("card", self.card)):
            if link is not None:
                yield f"{name}, bytes per second", link.bytes_per_second
                yield f"{name}, seconds of latency", link.latency_seconds

    def __post_init__(self) -> None:
        whose = f"host {shown(self.name)}"
        self.check_fields(whose)
        counts = (self.devices, self.card.devices_per_card, self.switch or self.devices)
        if min(counts) < 1 or any(self.devices % count for count in counts):
            raise InputError(
                f"{whose}: its {self.devices} devices cannot be shared out evenly over cards of "
                f"{self.card.devices_per_card} and switches of {self.switch}"
            )
        if self.devices > 1 and self.link is None:
            raise InputError(f"{whose}: say by which link its devices are joined")


class Software(Value, frozen=True, kw_only=True):
    """How a framework runs kernels.

    Attributes:
        name, title: as those of a device.
        fuses: which neighbouring kernels run as one: none, pointwise ones, or normalisations and
            reductions with them, too (``"all"``).
        forward_op_seconds, backward_op_seconds: the host's pace on an accelerator: a direction of a
            block takes at least so long per dispatched op.
        attention: library of its fused attention.
        factor: how many times as long everything takes.
        tensor_exposed: share of the collectives of tensor ranks that no computation hides.
        narrowing: where a product is computed in fp8 or fp4, how many times their bytes its
            operands are moved to be scaled and cast; 0 where kernels before do it.
    """

    name: str
    title: str
    fuses: Literal["none", "pointwise", "all"]
    forward_op_seconds: Figure
    backward_op_seconds: Figure
    attention: Attention = "torch"
    factor: Figure = Figure(1.0)
    tensor_exposed: Figure = Figure(1.0)
    narrowing: Figure = Figure(0.0)
