"""Seconds of kernels, from their flops and bytes.

A matrix product, a convolution or a fused attention takes its flops at the peak of its dtype times
the share that calls of that size reach, but at least its bytes at the memory's bandwidth; anything
else takes its bytes. A kernel has a launch besides. Software that fuses runs neighbouring kernels
of the last sort as one, which reads what none of them made and writes what somebody reads later.

On an accelerator the host only sends kernels: a direction of a block takes what its kernels take,
or what the host takes to dispatch them, whichever is longer (``KernelPace``). On a CPU both add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.core.catalogue import Curve, Figure, Hardware, Software

KernelKind = Literal[
    "matmul", "batched-matmul", "convolution", "attention", "pointwise", "transcendental",
    "activation", "random", "recurrence", "transposed-convolution",
    "normalisation", "batch-norm", "pooling", "reduction", "embedding", "copy", "unknown", "view",
]  # fmt: skip
_COMPUTE = frozenset({
    "matmul", "batched-matmul", "convolution", "transposed-convolution", "attention", "recurrence",
})  # fmt: skip
_SUMS = frozenset({"add", "add_"})
_ALONE = frozenset({"normalisation", "batch-norm", "reduction", "embedding", "pooling"})
"""Kinds of kernels that only a compiler runs together with others."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One dispatched operation.

    Attributes:
        kind: class of kernels by which it is priced; a view takes no kernel at all.
        name: the operation, as torch calls it.
        dtype: of its result, as the catalogue has them (``bf16``).
        flops: a multiplication and an addition are two.
        reads, writes: bytes by the number of the storage.
        backward: whether it belongs to a backward.
        padding: how many times its flops the hardware computes, which fills up few channels.
    """

    kind: KernelKind
    name: str
    dtype: str
    flops: float
    reads: dict[int, int]
    writes: dict[int, int]
    backward: bool = False
    padding: float = 1.0

    @property
    def num_bytes(self) -> int:
        """All that it moves."""
        return sum(self.reads.values()) + sum(self.writes.values())


@dataclass(frozen=True)
class KernelPace:
    """On what, and how, kernels run.

    Attributes:
        device: of the catalogue.
        software: of the catalogue.
        arithmetic: of matrix products, by their dtype, where it is another: ``{"fp32": "tf32"}``.
    """

    device: Hardware
    software: Software
    arithmetic: dict[str, str]

    @property
    def is_host(self) -> bool:
        """Whether the host itself computes."""
        return self.device.kind == "cpu"


def kernel_seconds(kernel: Kernel, pace: KernelPace) -> float:
    """The seconds of a kernel alone, with its launch."""
    efficiency = pace.device.efficiency
    if kernel.kind == "view":
        return efficiency.view_seconds.value if pace.is_host else 0.0
    moving = kernel.num_bytes / _bandwidth(pace.device, kernel)
    if kernel.kind in _COMPUTE:
        busy = max(_computing(kernel, pace), moving) + _narrowing(kernel, pace)
        return busy + efficiency.launch_seconds.value
    return moving + efficiency.launch_seconds.value


def _computing(kernel: Kernel, pace: KernelPace) -> float:
    dtype = pace.arithmetic.get(kernel.dtype, kernel.dtype)
    if kernel.kind == "attention" and dtype.startswith("fp8"):
        dtype = kernel.dtype
    if kernel.flops <= kernel.num_bytes and not pace.device.has_peak(dtype):
        return 0.0  # its bytes decide on any device, as of the angles of rotary embeddings
    share = _share(kernel, pace)
    share *= pace.device.efficiency.by_dtype.get(dtype, Figure(1.0)).value
    return kernel.flops * kernel.padding / (pace.device.peak(dtype).value * share)


def _narrowing(kernel: Kernel, pace: KernelPace) -> float:
    """What scaling and casting its operands takes, if a product is computed in less than half."""
    dtype = pace.arithmetic.get(kernel.dtype, "")
    if kernel.kind != "matmul" or not dtype.startswith(("fp8", "fp4")):
        return 0.0
    # A backward's two products share a gradient, and have the other operands of the forward.
    num_bytes = sum(kernel.reads.values()) * (0.5 if kernel.backward else 1.0)
    return num_bytes * pace.software.narrowing.value / _bandwidth(pace.device, kernel)


def _share(kernel: Kernel, pace: KernelPace) -> float:
    efficiency, software = pace.device.efficiency, pace.software
    gflop = kernel.flops * kernel.padding / 1e9
    own = _of_kind(efficiency.compute_by_kind, kernel.kind, kernel)
    if own is not None:
        return own.at(gflop)
    if kernel.kind == "attention":
        return efficiency.attention_share(software.attention, backward=kernel.backward).value
    factor = {
        "batched-matmul": efficiency.batched_matmul.value,
        "convolution": efficiency.convolution.value,
        "transposed-convolution": efficiency.convolution.value,
    }.get(kernel.kind, 1.0)
    return factor * efficiency.matmul.at(gflop)


def _bandwidth(device: Hardware, kernel: Kernel) -> float:
    efficiency = device.efficiency
    kind = "few-rows" if kernel.kind in _COMPUTE else kernel.kind
    curve = _of_kind(efficiency.memory_by_kind, kind, kernel)
    curve = curve or efficiency.memory_by_kind.get("pointwise")
    num_bytes = max(kernel.num_bytes, 1)
    share = curve.at(num_bytes) if curve is not None else efficiency.memory.value
    return device.memory_bytes_per_second.value * share


def _of_kind(curves: Mapping[str, Curve], kind: str, kernel: Kernel) -> Curve | None:
    backward = curves.get(f"{kind}-backward") if kernel.backward else None
    return backward or curves.get(kind)


def seconds_of_each(kernels: Sequence[Kernel], pace: KernelPace) -> list[float]:
    """The seconds of kernels that were dispatched in this order; of a run that runs as one, the
    first has the seconds of all."""
    if pace.software.fuses == "none" or pace.is_host:
        return [kernel_seconds(kernel, pace) for kernel in kernels]
    return _in_runs(kernels, pace)


def dispatch_seconds(kernel: Kernel, pace: KernelPace) -> float:
    """What the host takes to send a kernel; on a CPU, what autograd takes for it besides.

    An accelerator's host hands views on, too, but its pace was found by counting kernels.
    """
    if pace.is_host:
        efficiency = pace.device.efficiency
        if kernel.backward and kernel.name in _SUMS:
            return 0.0  # of two gradients of a value, which no node of autograd's graph computes
        ways = (efficiency.forward_op_seconds, efficiency.backward_op_seconds)
        return ways[kernel.backward].value
    software = pace.software
    ways = (software.forward_op_seconds, software.backward_op_seconds)
    return 0.0 if kernel.kind == "view" else ways[kernel.backward].value


def at_the_pace(
    busy: Sequence[float], dispatch: Sequence[float], blocks: Sequence[int], pace: KernelPace
) -> list[float]:
    """Seconds of each layer from those of its kernels and of its host.

    Args:
        busy: of the kernels of each layer.
        dispatch: of the host.
        blocks: for each layer, the block in which the host may run ahead.
        pace: on a CPU, both add up; otherwise the longer one decides for a block.
    """
    if pace.is_host:
        return [kernels + host for kernels, host in zip(busy, dispatch, strict=True)]
    factor = pace.software.factor.value
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for block, kernels, host in zip(blocks, busy, dispatch, strict=True):
        sums[block][0] += kernels
        sums[block][1] += host
    return [
        factor * (host if sums[block][1] > sums[block][0] else kernels)
        for block, kernels, host in zip(blocks, busy, dispatch, strict=True)
    ]


def _in_runs(kernels: Sequence[Kernel], pace: KernelPace) -> list[float]:
    last_read = {storage: place for place, kernel in enumerate(kernels) for storage in kernel.reads}
    seconds, place = [0.0] * len(kernels), 0
    while place < len(kernels):
        first, stop = place, place + 1
        if kernels[first].kind in _COMPUTE:
            seconds[first] = kernel_seconds(kernels[first], pace)
        else:
            alone = _ALONE if pace.software.fuses == "pointwise" else frozenset()
            while stop < len(kernels) and _goes_on(kernels[stop - 1], kernels[stop], alone):
                stop += 1
            run = [kernel for kernel in kernels[first:stop] if kernel.kind != "view"]
            if run:
                seconds[first] = _run_seconds(run, last_read, stop, pace)
        place = stop
    return seconds


def _goes_on(before: Kernel, kernel: Kernel, alone: frozenset[str]) -> bool:
    """Whether a kernel runs together with the one before."""
    if kernel.kind in _COMPUTE or kernel.backward != before.backward:
        return False
    return before.kind not in alone and kernel.kind not in alone


def _run_seconds(
    run: Sequence[Kernel], last_read: dict[int, int], stop: int, pace: KernelPace
) -> float:
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    for kernel in run:
        for storage, num_bytes in kernel.reads.items():
            if storage not in made:
                read[storage] = max(read.get(storage, 0), num_bytes)
        made |= kernel.writes
    written = {
        storage: num_bytes
        for storage, num_bytes in made.items()
        if last_read.get(storage, -1) >= stop
    }
    num_bytes = sum(read.values()) + sum((written or run[-1].writes).values())
    bandwidth = pace.device.memory_bytes_per_second.value * pace.device.efficiency.memory.value
    return num_bytes / bandwidth + pace.device.efficiency.launch_seconds.value
