"""Training a GPT whose state is four times what a rank may hold, beside the same in memory.

    python -m benchmarks.contest.spilling [--width 1024 --blocks 12 --tokens 128 --microbatches 4]
        [--share 0.25] [--rounds 5] [--folder /scratch] [--ways memory,spilled,…]

Every way is a process of its own, because memory is what they differ in; they take turns, round by
round, each with a few steps whose median counts, so that all meet the same machine. Run it alone.

memory    everything in memory, microbatch by microbatch
spilled   stages come from the disk, one ahead
waiting   the same, none ahead: what double buffering is worth
clipped   the same as spilled, with clip_norm: updates are late
hydra     microbatch by microbatch: the weights m times as often

Columns: seconds of a step, ÷ those in memory of the same round; predicted ÷ measured; MB read and
written in a step, and by the formula; the most that slabs and gradients took, beside the budget and
beside what the order of the ops says; resident memory beyond that of an empty process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

import penstock as pk
from penstock.cli.show import print_table
from penstock.demo.gpt import GPT, loss
from penstock.plans.spilling import traffic

WAYS = ("memory", "spilled", "waiting", "clipped", "hydra")
_MEGA = 1e6
_WARM = 2


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """As in the prototype."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def model_of(options: argparse.Namespace) -> GPT:
    """On meta: no more than a stage is ever drawn at once."""
    with torch.device("meta"):
        return GPT(
            width=options.width,
            heads=options.width // 64,
            layers=options.blocks,
            context=options.tokens,
            dropout=0.1,
        )


def profiled(options: argparse.Namespace) -> pk.LayerGraph:
    """In a process of its own: it has the whole model in memory."""
    torch.manual_seed(0)
    model = GPT(
        width=options.width,
        heads=options.width // 64,
        layers=options.blocks,
        context=options.tokens,
        dropout=0.1,
    )
    tokens = torch.randint(0, 256, (1, options.tokens))
    return pk.profile(model, tokens, loss=loss, targets=tokens)


def planned(graph: pk.LayerGraph, options: argparse.Namespace, way: str) -> pk.Plan:
    """The plan of one way."""
    held = sum(2 * layer.parameter_bytes + layer.optimizer_bytes for layer in graph.layers)
    tier = pk.Tier(folder=options.folder)
    cluster = pk.Cluster.local(1, tiers=[tier])
    plan = pk.plan(
        graph,
        cluster,
        microbatches=options.microbatches,
        memory_bytes=round(held * options.share),
        spill="always",
    )
    assert plan.spill is not None
    if way == "memory":
        return replace(plan, spill=None)
    if way == "waiting":
        return replace(plan, spill=replace(plan.spill, ahead=0))
    if way == "hydra":
        return replace(plan, options={**plan.options, "group": 1})
    return plan


def resident() -> int:
    """Bytes of memory that this process has and no file is behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def run(plan: pk.Plan, options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Train, and say what it took."""
    torch.manual_seed(1)
    size = options.microbatches, options.tokens
    batches = [(torch.randint(0, 256, size), torch.randint(0, 256, size)) for _ in range(2)]
    warm = torch.nn.Linear(2, 2)
    torch.optim.AdamW(warm.parameters()).step()  # loads torch's compiler
    before, most = resident(), 0
    times, moved = [], (0, 0)
    clip = 1.0 if way == "clipped" else None
    with pk.Pipeline(
        model_of(options),
        plan,
        loss=loss,
        optimizer=adamw,
        clip_norm=clip,
        init="per-layer",
        seed=1,
    ) as pipeline:
        residence = pipeline._parts.workers[0].residence
        for step in range(_WARM + options.steps):
            start = time.perf_counter()
            last = pipeline.step(*batches[step % 2])
            times.append(time.perf_counter() - start)
            most = max(most, resident())
            if residence is not None:
                residence.transfers.finish()
                now = residence.store.read_bytes, residence.store.written_bytes
                step_moved = now[0] - moved[0], now[1] - moved[1]
                moved = now
    report = {
        "seconds": statistics.median(times[_WARM:]),
        "predicted": plan.step_seconds,
        "resident": most - before,
        "loss": None if last is None else last.item(),
    }
    if residence is not None:
        group = 1 if way == "hydra" else 0
        formula = traffic(plan.stages, options.microbatches, group, agrees=clip is not None)
        report |= {
            "moved": step_moved,
            "formula": formula,
            "counted": residence.slabs.used_peak_bytes,
            "ordered": residence.slabs.budget_bytes,
            "budget": plan.spill.memory_bytes if plan.spill else 0,
        }
    return report


def in_process(options: argparse.Namespace, way: str, graph: Path) -> dict[str, Any]:
    """What one way says, from a process that has nothing else in memory."""
    command = [sys.executable, "-m", "benchmarks.contest.spilling", *sys.argv[1:]]
    done = subprocess.run(
        [*command, "--way", way, "--graph", str(graph)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def row(way: str, reports: list[dict[str, Any]], alone: list[dict[str, Any]]) -> list[str]:
    """A way's line of the table."""
    seconds = statistics.median(report["seconds"] for report in reports)
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(reports, alone, strict=False)]
    last = reports[-1]
    cells = [
        way,
        f"{seconds:.3f}",
        f"{statistics.median(ratios):.2f}" if ratios else "",
        f"{last['predicted'] / seconds:.2f}",
    ]
    if "moved" in last:
        cells += [
            " / ".join(f"{one / _MEGA:.1f}" for one in last["moved"]),
            " / ".join(f"{one / _MEGA:.1f}" for one in last["formula"]),
            f"{last['counted'] / _MEGA:.1f}",
            f"{last['ordered'] / _MEGA:.1f}",
            f"{last['budget'] / _MEGA:.1f}",
        ]
    else:
        cells += [""] * 5
    return [*cells, f"{last['resident'] / _MEGA:.0f}"]


def main() -> None:
    """Take turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.25, help="budget over all state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--way", choices=[*WAYS, "profile"], help=argparse.SUPPRESS)
    parser.add_argument("--graph", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way == "profile":
        profiled(options).save(options.graph)
        print("{}")
    elif options.way:
        plan = planned(pk.LayerGraph.load(options.graph), options, options.way)
        print(json.dumps(run(plan, options, options.way)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            graph = Path(folder) / "graph.json"
            in_process(options, "profile", graph)
            ways = options.ways.split(",")
            reports: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
            for _ in range(options.rounds):
                for way in ways:
                    reports[way].append(in_process(options, way, graph))
        header = (
            "way", "s a step", "÷ memory", "predicted ÷ measured", "read / written MB", "formula",
            "counted MB", "as ordered", "budget", "resident MB",
        )  # fmt: skip
        alone = reports.get("memory", [])
        print_table(header, [row(way, reports[way], alone) for way in ways])
        losses = {way: reports[way][-1]["loss"] for way in ways if way != "clipped"}
        print("the same loss everywhere:", len(set(losses.values())) == 1)


if __name__ == "__main__":
    main()
