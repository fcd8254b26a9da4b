"""PipeDream-2BW's transformers: GPT of 2.2 and 3.8 billion parameters over batch and depth.

A pipeline is planned by itself. Where there are copies of it, the time of their sums is 2BW's own
formula: 2(w−1)/w of a host's weights over its card.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

import penstock as pk
from benchmarks.lectures.answer import Answer, never_falls, times
from benchmarks.lectures.claims import (
    LARGE_DEPTHS,
    LARGE_OVER_GPIPE,
    LARGE_OVER_TENSOR,
    LARGE_RUNS,
    LargeRun,
)
from benchmarks.lectures.measured import figure
from penstock.demo import GPT, loss

_LENGTH, _VOCABULARY, _HOST = 512, 51200, "cluster-b"
_DEVICES, _CARD_BYTES_PER_SECOND = 8, 0.77 * 3.125e9
_MEMORY_BYTES = 16 * 10**9
"""The V100 of AWS p3.16xlarge; the catalogue's has twice as much."""

_NOT_HIDDEN = " Its copies' sums are taken to hide behind nothing, 2BW's behind all compute."
_PATIENCE_SECONDS = 5.0
MICROBATCH_ROWS = (1, 2, 4, 8, 16, 32)


class Sizes(NamedTuple):
    """Of a GPT: how wide, of how many blocks, and heads of attention."""

    width: int
    blocks: int
    heads: int


SIZES = {"GPT 2.2 B": Sizes(1920, 48, 16), "GPT 3.8 B": Sizes(2560, 48, 32)}
"""The lecture names parameters only; these sizes have so many."""


@cache
def transformer(sizes: Sizes) -> pk.LayerGraph:
    """On a V100, in half precision."""
    return estimated(sizes, partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.float16)


def estimated(sizes: Sizes, optimizer: Any, dtype: torch.dtype) -> pk.LayerGraph:
    """On a V100. Blocks are equal, so that one is estimated for all."""
    with torch.device("meta"):
        model = GPT(
            vocabulary=_VOCABULARY, width=sizes.width, heads=sizes.heads, layers=2, context=_LENGTH
        ).to(dtype)
        tokens = torch.empty(MICROBATCH_ROWS[-1], _LENGTH, dtype=torch.long)
    graph = pk.estimate(
        model, tokens, targets=tokens, loss=loss, device="v100-sxm2", attention="formula",
        sizes=MICROBATCH_ROWS[:-1], optimizer=optimizer,
    )  # fmt: skip
    return _of_blocks(graph, sizes.blocks)


def _of_blocks(graph: pk.LayerGraph, count: int) -> pk.LayerGraph:
    first, block, _, last = graph.layers
    blocks = (replace(block, name=f"blocks.{number}") for number in range(count))
    others = tuple(_of_blocks(other, count) for other in graph.other_sizes)
    return replace(graph, layers=(first, *blocks, last), other_sizes=others)


def _plan(sizes: Sizes, hosts: int, batch: int, **request: Any) -> pk.Plan:
    return pk.plan(
        transformer(sizes), pk.Cluster.of(_HOST, hosts=hosts), minibatch=batch,
        memory_bytes=_MEMORY_BYTES, patience_seconds=_PATIENCE_SECONDS, **request,
    )  # fmt: skip


def pipelined(run: LargeRun, schedule: str, batch: int, depth: int | None = None) -> float:
    """Rows per second of equal copies of a pipeline on all devices, with the best microbatch: the
    largest that fits where nothing is ever flushed."""
    depth = depth or run.depth
    own = batch * depth // run.num_devices
    flushes = schedule != "pipedream-2bw"
    # With fewer microbatches, a pass of 2BW would need a third version.
    least = 1 if flushes else depth - 1
    seconds: list[float] = []
    for rows in reversed(run.microbatch_rows):
        if own // rows < least or (seconds and not flushes):
            continue
        try:
            plan = _plan(
                SIZES[run.model], depth // _DEVICES, own, schedule=schedule,
                replicas=(1,) * depth, microbatches=own // rows,
            )  # fmt: skip
        except pk.PlanError:  # too large
            continue
        seconds.append(_with_copies(run, plan.step_seconds, depth, hides=not flushes))
    return batch / min(seconds)


def split_inside_layers(run: LargeRun, batch: int) -> float:
    """Rows per second of Megatron's model parallelism, with copies on all devices."""
    own = batch * run.depth // run.num_devices
    plans = (
        _plan(
            SIZES[run.model], run.depth // _DEVICES, own, schedule="1f1b", stages=1,
            tensor_ranks=run.depth, microbatches=own // rows,
        )
        for rows in run.microbatch_rows
    )  # fmt: skip
    seconds = min(plan.step_seconds for plan in plans)
    return batch / _with_copies(run, seconds, run.depth, hides=False)


def _with_copies(run: LargeRun, seconds: float, depth: int, hides: bool) -> float:
    """Seconds of a step of copies, of which one alone takes ``seconds``: their sums cross the card
    of each host behind the next minibatch, or after this one."""
    width = run.num_devices // depth
    num_bytes = sum(layer.parameter_bytes for layer in transformer(SIZES[run.model]).layers)
    on_a_host = num_bytes * _DEVICES / depth
    exchange = 2 * (width - 1) / width * on_a_host / _CARD_BYTES_PER_SECOND
    return max(seconds, exchange) if hides else seconds + exchange


def two_buffers() -> Iterator[Answer]:
    """2BW beside GPipe and Megatron's model parallelism."""
    for run in LARGE_RUNS:
        own = [pipelined(run, "pipedream-2bw", batch) for batch in run.batches]
        over_gpipe = [
            rate / pipelined(run, "gpipe", batch)
            for rate, batch in zip(own, run.batches, strict=True)
        ]
        over_tensor = [
            rate / split_inside_layers(run, batch)
            for rate, batch in zip(own, run.batches, strict=True)
        ]
        where = f"{run.model} on {run.num_devices} V100, {run.depth} stages"
        batches = ", ".join(map(str, run.batches))
        yield Answer(
            f"2BW, {where}: rows/s at batches of {batches}",
            "more with larger batches",
            " ".join(f"{rate:.0f}" for rate in own),
            holds=own[-1] > 1.01 * own[0],
            note="2BW has nothing to flush; one host has nothing to sum."
            if run.hosts == 1
            else "Copies' sums are behind compute: 2(w−1)/w of a host's weights over its card.",
        )
        yield Answer(
            f"2BW over GPipe, {where}",
            f"up to {LARGE_OVER_GPIPE}×",
            times(over_gpipe),
            max(over_gpipe) / LARGE_OVER_GPIPE,
            measured=figure("2BW over GPipe"),
            note="Penstock's GPipe runs forward twice only where memory asks for it."
            + (_NOT_HIDDEN if run.hosts > 1 else ""),
        )
        crosses = run.depth > _DEVICES
        yield Answer(
            f"2BW over Megatron's model parallelism, {where}",
            f"up to {LARGE_OVER_TENSOR}×" if crosses else "a curve",
            times(over_tensor),
            max(over_tensor) / LARGE_OVER_TENSOR if crosses else None,
            None if crosses else min(over_tensor) > 1,
            ("Sixteen ranks share each layer over two hosts, and sum over their cards."
             if crosses else "NVLink carries the sums inside of layers.")
            + (_NOT_HIDDEN if run.hosts > 1 else ""),
        )  # fmt: skip
    yield from depths(LARGE_RUNS[1])


def depths(run: LargeRun) -> Iterator[Answer]:
    """What depth changes, on 64 devices: less throughput, larger microbatches and models."""
    batch, where = run.batches[-1], f"{run.model} on {run.num_devices} V100"
    stages = ", ".join(map(str, LARGE_DEPTHS))
    rates = [pipelined(run, "pipedream-2bw", batch, depth) for depth in LARGE_DEPTHS]
    yield Answer(
        f"2BW, {where}, {stages} stages: rows/s at a batch of {batch}",
        "less with depth",
        " ".join(f"{rate:.0f}" for rate in rates),
        holds=never_falls(rates[::-1]),
        measured=figure("2BW over depth"),
        note=f"With {LARGE_DEPTHS[0]} stages every host has all weights, and their sums over its "
        "card take longer than compute.",
    )
    rows = [_largest_microbatch(run, batch, depth) for depth in LARGE_DEPTHS]
    yield Answer(
        f"2BW, {where}, {stages} stages: largest microbatch",
        "larger with depth",
        " ".join(map(str, rows)),
        holds=never_falls(rows) and rows[-1] > rows[0],
        note=f"Of {', '.join(map(str, MICROBATCH_ROWS))} rows, without recompute, where d "
        "microbatches of a d-th of the layers are as much at any depth.",
    )
    models = [_most_blocks(run, batch, depth) for depth in LARGE_DEPTHS]
    yield Answer(
        f"2BW on {run.num_devices} V100, {stages} stages: most blocks of that width",
        "larger models with depth",
        " ".join(map(str, models)),
        holds=never_falls(models) and models[-1] > models[0],
        note="Of 24, 48, 96, … blocks were tried, with microbatches of one row.",
    )


def _fits(sizes: Sizes, run: LargeRun, batch: int, depth: int, rows: int, recompute: str) -> bool:
    # Copies make no difference to what a device holds.
    own = max(batch * depth // run.num_devices, rows * (depth - 1))
    try:
        _plan(
            sizes, depth // _DEVICES, own // rows * rows, schedule="pipedream-2bw",
            replicas=(1,) * depth, microbatches=own // rows, recompute=recompute,
        )  # fmt: skip
    except pk.PlanError:
        return False
    return True


def _largest_microbatch(run: LargeRun, batch: int, depth: int) -> int:
    sizes = SIZES[run.model]
    fitting = (
        rows for rows in reversed(MICROBATCH_ROWS) if _fits(sizes, run, batch, depth, rows, "never")
    )
    return next(fitting, 0)


def _most_blocks(run: LargeRun, batch: int, depth: int) -> int:
    sizes, most = SIZES[run.model], 0
    for blocks in (24, 48, 96, 192, 384):
        if blocks + 2 < depth:  # fewer layers than stages
            continue
        if not _fits(sizes._replace(blocks=blocks), run, batch, depth, 1, "stage"):
            break
        most = blocks
    return most
