"""This machine's CPU as an entry of the catalogue, by microbenchmarks: one thread, processor time.

Calls of several sizes of each kind of kernel are timed (``microbenchmarks``). What a call of next
to nothing takes is the launch; the rest of a call's time, beside its work, is a point of the kind's
curve.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from penstock.core.catalogue import Curve, Efficiency, Figure, Hardware
from penstock.engine.device.memory import keep_freed_pages
from penstock.training.estimating.microbenchmarks import COMPUTING, Point, all_points
from penstock.training.profiler.alone import Progress

_TURNS = 5
_CHAIN = 64
_SOURCE = "measured here"


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
            empty = Point("pointwise", 0.0, torch.add, lambda: (torch.zeros(1), torch.zeros(1)))
            turn = _seconds(empty.in_turns(), seconds_per_point)
        tape, back, view = _autograd_seconds(seconds_per_point, call)
    finally:
        torch.set_num_threads(threads)
    rates = {
        kind: [(work, max(taken - turn, 0.1 * taken)) for work, taken in points]
        for kind, points in rates.items()
    }
    return _entry(name, rates, call, (tape, back, view))


Rates = dict[str, list[tuple[float, float]]]
"""By kind: (work of a call, its seconds)."""


def _rates(seconds: float, progress: Progress | None) -> Rates:
    points = list(all_points())
    rates: Rates = {}
    for done, point in enumerate(points):
        rates.setdefault(point.kind, []).append((point.work, _seconds(point.in_turns(), seconds)))
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


def _autograd_seconds(seconds: float, call: float) -> tuple[float, float, float]:
    """What autograd adds to an op forward, and to one backward; and what a view takes."""
    x = torch.zeros(1, requires_grad=True)
    # In modules, as ops of models are: what calling them takes is the op's, too.
    modules = [nn.ReLU() for _ in range(_CHAIN)]

    def forward() -> Tensor:
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
        points = [(work / unit, work / seconds / most) for work, seconds in sorted(rates[kind])]
        return Curve(points=tuple(points), source=_SOURCE)

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
            compute_by_kind={
                kind: curve(kind, peak, 1e9)
                for kind in rates
                if kind in COMPUTING and kind != "matmul"
            },
            memory=Figure(1.0, _SOURCE),
            memory_by_kind={
                kind: curve(kind, bandwidth) for kind in rates if kind not in COMPUTING
            },
            launch_seconds=Figure(call, _SOURCE),
            forward_op_seconds=tape,
            backward_op_seconds=back,
            view_seconds=view,
        ),
    )
