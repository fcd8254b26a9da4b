"""Penstock's runtime beside torch.distributed.pipelining: same model, same cut, same two cores.

    torchrun --nproc-per-node=2 benchmarks/runtime.py

Two workers of one thread each; everybody takes turns within one run, medians over rounds. Every
contestant is first proven to give the loss and gradients of one process. Columns:

speed-up     over one process with one thread on the same microbatches
efficiency   speed-up ÷ 2m/(m+1), the most that a bubble of two stages allows
overhead     (measured − one process × (m+1)/2m) ÷ m: what one microbatch costs beyond plain work,
             as wall time; on the large model it is mostly two busy cores slowing each other down
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable

import torch
from torch import Tensor, nn

import penstock as pk
from benchmarks.peers import (
    PEERS,
    Peer,
    Step,
    Work,
    check_same_as_one_process,
    gpt_work,
    one_process,
    time_in_turns,
    tiny_work,
    two_ranks,
)
from penstock.planner import Plan, StagePlan
from penstock.spine import spine_fingerprint, spine_of


def plan_for(work: Work, model: nn.Module, schedule: str) -> Plan:
    """The same cut as the peers, whatever a planner would choose."""
    layers = spine_of(model)
    parts = layers[: work.cut], layers[work.cut :]
    return Plan(
        model=spine_fingerprint(layers),
        schedule=schedule,
        num_microbatches=work.num_microbatches,
        stages=tuple(
            StagePlan(layers=tuple(layer.name for layer in part), rank=rank)
            for rank, part in enumerate(parts)
        ),
    )


def penstock_peer(schedule: str, transport: str) -> Callable[[Work], Peer]:
    """Penstock's pipeline as a peer; with threads it runs on the calling rank alone."""

    def build(work: Work) -> Peer:
        model = work.build_model()
        pipeline = pk.Pipeline(
            model,
            plan_for(work, model, schedule),
            loss=work.loss,
            optimizer=work.build_optimizer,
            transport=transport,
            record=False,  # torch's runtime exchanges no records either
        )
        layers = [layer for stage in pipeline.stages.values() for layer in stage.layers]

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            return pipeline.step(inputs, targets)

        return Peer(nn.Sequential(*(layer.module for layer in layers)), step)

    return build


THREADS = {f"Penstock threads {name}": penstock_peer(name, "threads") for name in ("gpipe", "1f1b")}
PROCESSES = {
    f"Penstock processes {name}": penstock_peer(name, "process-group") for name in ("gpipe", "1f1b")
}


def check_updated_weights(
    work: Work, build: Callable[[Work], Peer], rank: int, alone: bool
) -> None:
    """Two steps give the weights of one process, bit for bit."""
    single, peer = one_process(work), build(work)
    for _ in range(2):
        single.step(work.inputs, work.targets)
        peer.step(work.inputs, work.targets)
    mine = slice(None) if alone else slice(0, work.cut) if rank == 0 else slice(work.cut, None)
    pairs = zip(single.part[mine].parameters(), peer.part.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "not equal to one process"


def contestants(work: Work, rank: int) -> dict[str, Step]:
    """Everybody's step, checked; those that need one process only do nothing on rank 1."""
    idle: Step = lambda inputs, targets: None  # noqa: E731
    steps: dict[str, Step] = {"one process": one_process(work).step if rank == 0 else idle}
    for name, build in THREADS.items():
        if rank == 0:
            check_updated_weights(work, build, rank, alone=True)
        steps[name] = build(work).step if rank == 0 else idle
    for name, build in PROCESSES.items():
        check_updated_weights(work, build, rank, alone=False)
        steps[name] = build(work).step
    for name, build in PEERS.items():
        check_same_as_one_process(work, build)
        steps[name] = build(work).step
    return steps


def rows(work: Work, seconds: dict[str, float]) -> list[tuple[str, ...]]:
    """The table's rows for one piece of work."""
    count, single = work.num_microbatches, seconds["one process"]
    table = []
    for name, value in seconds.items():
        ideal = 2 * count / (count + 1)
        overhead = (value - single / ideal) / count
        numbers = (
            ("1.00", "", "")
            if name == "one process"
            else (f"{single / value:.2f}", f"{single / value / ideal:.2f}", f"{overhead * 1e6:.0f}")
        )
        table.append((work.name, str(count), name, f"{value * 1e3:.2f}", *numbers))
    return table


def print_table(table: list[tuple[str, ...]]) -> None:
    """As Markdown, ready for docs/benchmarks.md."""
    header = ("model", "m", "runtime", "ms per step", "speed-up", "efficiency", "overhead µs")
    widths = [max(len(row[i]) for row in [header, *table]) for i in range(len(header))]
    for row in [header, tuple("-" * width for width in widths), *table]:
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |")


def main() -> None:
    """Check and time everybody on both models with 8 and 16 microbatches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    options = parser.parse_args()
    with two_ranks() as rank:
        table = []
        for build, steps_per_round in ((gpt_work, 3), (tiny_work, 40)):
            for count in options.microbatches:
                work = build(count)
                seconds = time_in_turns(
                    work,
                    contestants(work, rank),
                    rounds=options.rounds,
                    steps_per_round=steps_per_round,
                )
                table += rows(work, seconds)
        if rank == 0:
            print(f"{platform.machine()}, torch {torch.__version__}, medians of {options.rounds}")
            print_table(table)


if __name__ == "__main__":
    main()
