"""This machine's CPU as an entry of the catalogue, by microbenchmarks: one thread, processor time.

For each kind of kernel, calls of several sizes. What a call of next to nothing takes is the launch;
the rest of a call's time, beside its work, is a point of the kind's curve.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from penstock.core.catalogue import Curve, Efficiency, Figure, Hardware
from penstock.engine.device.memory import keep_freed_pages
from penstock.training.profiler.alone import Progress

_TURNS = 5
_FLOAT = 4
_WORDS = (2**10, 2**13, 2**15, 2**17, 2**19, 2**21, 2**23)
_CHAIN = 64
_SOURCE = "measured here"


class Point(NamedTuple):
    """A call to be timed: flops or bytes, and the call."""

    kind: str
    work: float
    call: Callable[[], object]


def measure_device(
    name: str, *, seconds_per_point: float = 0.05, progress: Progress | None = None
) -> Hardware:
    """Measure this machine's CPU with one thread.

    Args:
        name: short name of the entry.
        seconds_per_point: how long each size of each kind of kernel is measured, about.
        progress: called with (done, total) points.
    """
    keep_freed_pages()  # as profile and training do; else each large result is a page fault
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.no_grad():
            rates = _rates(seconds_per_point, progress)
            call = _seconds(partial(torch.add, *torch.zeros(2, 1)), seconds_per_point)
        tape, back, view = _autograd_seconds(seconds_per_point, call)
    finally:
        torch.set_num_threads(threads)
    return _entry(name, rates, call, (tape, back, view))


Rates = dict[str, list[tuple[float, float]]]
"""By kind: (work of a call, its seconds)."""


def _rates(seconds: float, progress: Progress | None) -> Rates:
    points = [*_products(), *_convolutions(), *_moving()]
    rates: Rates = {}
    for done, point in enumerate(points):
        rates.setdefault(point.kind, []).append((point.work, _seconds(point.call, seconds)))
        if progress is not None:
            progress(done + 1, len(points))
    return rates


def _seconds(call: Callable[[], object], seconds: float) -> float:
    """Processor seconds of a call: the median of some turns, after one that does not count."""
    call()
    start = time.process_time()
    call()
    count = max(1, int(seconds / _TURNS / max(time.process_time() - start, 1e-7)))
    turns = []
    for _ in range(_TURNS):
        start = time.process_time()
        for _ in range(count):
            call()
        turns.append((time.process_time() - start) / count)
    return median(turns)


def _products() -> Iterator[Point]:
    sizes = (
        (4, 16, 16), (16, 64, 64), (32, 128, 128), (64, 128, 384), (128, 192, 576),
        (128, 256, 1024), (256, 512, 1024), (512, 1024, 1024), (1024, 1024, 2048),
    )  # fmt: skip
    for rows, inner, columns in sizes:
        a, b = torch.randn(rows, inner), torch.randn(columns, inner)
        bias = torch.randn(columns)
        flops = 2.0 * rows * inner * columns
        yield Point("matmul", flops, partial(torch.addmm, bias, a, b.t()))
    for count, tokens, width in (
        (2, 16, 16),
        (8, 32, 32),
        (16, 64, 32),
        (32, 128, 32),
        (16, 256, 64),
    ):
        q, k = torch.randn(count, tokens, width), torch.randn(count, width, tokens)
        flops = 2.0 * count * tokens * tokens * width
        yield Point("batched-matmul", flops, partial(torch.bmm, q, k))
    for count, tokens, width in ((1, 16, 16), (4, 64, 32), (8, 128, 32), (8, 256, 64)):
        q = torch.randn(1, count, tokens, width)
        flops = 4.0 * count * tokens * tokens * width
        yield Point("attention", flops, partial(F.scaled_dot_product_attention, q, q, q))


def _convolutions() -> Iterator[Point]:
    for rows, given, made, side in (
        (1, 3, 16, 16), (4, 3, 32, 32), (8, 32, 64, 16), (8, 48, 48, 32), (8, 64, 128, 32),
    ):  # fmt: skip
        x, w = torch.randn(rows, given, side, side), torch.randn(made, given, 3, 3)
        channels = math.prod(-(-count // 16) * 16 for count in (given, made))  # as they are priced
        flops = 2.0 * rows * channels * side * side * 9
        yield Point("convolution", flops, partial(F.conv2d, x, w, padding=1))
        gradient = torch.randn(rows, made, side, side)

        back = partial(
            torch.ops.aten.convolution_backward, gradient, x, w, None, [1, 1], [1, 1], [1, 1],
            False, [0, 0], 1, [True, True, False],
        )  # fmt: skip
        yield Point("convolution-backward", 2 * flops, back)


def _moving() -> Iterator[Point]:
    for words in _WORDS:
        x, y = torch.randn(words), torch.randn(words)
        square = x[: words // 64 * 64].view(-1, 64)
        num_bytes = float(_FLOAT * words)
        yield Point("pointwise", 3 * num_bytes, partial(torch.add, x, y))
        yield Point("transcendental", 2 * num_bytes, x.sigmoid)
        yield Point("activation", 2 * num_bytes, partial(F.gelu, x))
        yield Point("random", 2 * num_bytes, partial(y.bernoulli_, 0.9))
        yield Point("normalisation", 2 * num_bytes, partial(F.softmax, square, -1))
        yield Point("reduction", num_bytes, partial(square.sum, 0))
        yield Point("copy", 2 * num_bytes, square.t().contiguous)
        rows = torch.randint(0, len(square), (len(square),))
        yield Point("embedding", 2 * num_bytes, partial(F.embedding, rows, square))
        picture = x[: words // 256 * 256].view(-1, 4, 8, 8)
        yield Point("pooling", 1.75 * num_bytes, partial(F.max_pool2d, picture, 2))
        weight = torch.ones(4)
        yield Point(
            "batch-norm", 2 * num_bytes,
            partial(F.batch_norm, picture, None, None, weight, weight, training=True),
        )  # fmt: skip


def _autograd_seconds(seconds: float, call: float) -> tuple[float, float, float]:
    """What autograd adds to an op forward, and to one backward; and what a view takes."""
    x = torch.zeros(1, requires_grad=True)
    # In modules, as ops of models are: what calling them takes is the op's, too.
    modules = [nn.ReLU() for _ in range(_CHAIN)]

    def forward() -> torch.Tensor:
        value = x
        for module in modules:
            value = module(value)
        return value

    def backward() -> None:
        torch.autograd.backward(forward())

    ahead = _seconds(forward, seconds)
    both = _seconds(backward, seconds)
    wide = torch.zeros(4, 4)
    view = _seconds(partial(wide.view, 16), seconds)
    tape = max(0.0, ahead / _CHAIN - call)
    return tape, max(0.0, (both - ahead) / _CHAIN - call), view


def _entry(name: str, rates: Rates, call: float, autograd: tuple[float, float, float]) -> Hardware:
    peak = max(work / seconds for work, seconds in rates["matmul"])
    bandwidth = max(work / seconds for work, seconds in rates["pointwise"][-2:])

    def curve(kind: str, most: float, unit: float = 1.0) -> Curve:
        points = [
            (work / unit, work / max(seconds - call, 0.1 * seconds) / most)
            for work, seconds in sorted(rates[kind])
        ]
        return Curve(points=tuple(points), source=_SOURCE)

    attention = max(work / seconds for work, seconds in rates["attention"]) / peak
    moving = (
        "pointwise", "transcendental", "activation", "random", "normalisation", "reduction",
        "copy", "embedding", "pooling", "batch-norm",
    )  # fmt: skip
    shares = (Figure(attention, _SOURCE), Figure(attention, _SOURCE))
    tape, back, view = (Figure(seconds, _SOURCE) for seconds in autograd)
    return Hardware(
        name=name,
        title=f"{platform.machine()} CPU, one thread",
        kind="cpu",
        memory_bytes=Figure(0, _SOURCE),
        memory_bytes_per_second=Figure(bandwidth, _SOURCE),
        flops_per_second={"fp32": Figure(peak, _SOURCE)},
        efficiency=Efficiency(
            matmul=curve("matmul", peak, 1e9),
            batched_matmul=curve("batched-matmul", peak, 1e9),
            convolution=curve("convolution", peak, 1e9),
            convolution_backward=curve("convolution-backward", peak, 1e9),
            attention={"torch": shares},
            memory=Figure(1.0, _SOURCE),
            memory_by_kind={kind: curve(kind, bandwidth) for kind in moving},
            launch_seconds=Figure(call, _SOURCE),
            forward_op_seconds=tape,
            backward_op_seconds=back,
            view_seconds=view,
        ),
    )
