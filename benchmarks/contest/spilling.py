"""Training a GPT whose state is four times what a rank may hold, beside the same in memory.

    python -m benchmarks.contest.spilling [--width 1024 --blocks 12 --tokens 128 --microbatches 4]
        [--share 0.25] [--rounds 5] [--folder /scratch] [--ways memory,spilled,…]
    python -m benchmarks.contest.spilling --knee 1,2,4,8,16 --picture knee.svg [--width 512 …]

Every way is a process of its own, because memory is what they differ in; they take turns, round by
round, each with a few steps whose median counts, so that all meet the same machine. Run it alone.

memory    everything in memory, microbatch by microbatch
spilled   stages come from the disk, one ahead
waiting   the same, none ahead: what double buffering is worth
clipped   the same as spilled, with clip_norm: updates are late
hydra     microbatch by microbatch: the weights m times as often
capped    the same as spilled, where the system allows the process no more than what it had before,
          the budget and 60 MB (RLIMIT_DATA)
capped-memory  the same limit with everything in memory: has to fail
peer:NAME another library's way (``benchmarks.contest.spilling_peers``), or what it says instead

Columns: seconds of a step, ÷ those in memory of the same round; predicted ÷ measured; MB read and
written in a step, and by the formula; the most that slabs and gradients took, beside the budget and
beside what the order of the ops says; resident memory beyond that of an empty process.

The second form trains with more and more microbatches per step, in memory and out of it, and draws
the time of a step over its tokens: spilling is free behind the knee, where computing takes as long
as the longer one of the two transfers.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

import penstock as pk
from benchmarks.contest.spilling_peers import PEERS, adamw, peer
from penstock.cli.show import print_table
from penstock.demo.gpt import GPT, loss
from penstock.drawing.chart import line_chart
from penstock.errors import PenstockError
from penstock.plans.spilling import traffic

WAYS = ("memory", "spilled", "waiting", "clipped", "hydra", "capped", "capped-memory")
_PEER = "peer:"
_MEGA = 1e6
_WARM = 2
_SPARE_BYTES = 60 << 20


def model_of(options: argparse.Namespace, device: str = "meta") -> GPT:
    """By default on meta: then no more than a stage is ever drawn at once."""
    with torch.device(device):
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
    model = model_of(options, "cpu")
    tokens = torch.randint(0, 256, (1, options.tokens))
    return pk.profile(model, tokens, loss=loss, targets=tokens, optimizer=adamw)


def budget_of(graph: pk.LayerGraph, options: argparse.Namespace) -> int:
    """Bytes that a plan may take: a share of weights, gradients and optimizer state."""
    held = sum(2 * layer.parameter_bytes + layer.optimizer_bytes for layer in graph.layers)
    return round(held * options.share)


def planned(graph: pk.LayerGraph, options: argparse.Namespace, way: str) -> pk.Plan:
    """The plan of one way."""
    tier = pk.Tier(folder=options.folder)
    cluster = pk.Cluster.local(1, tiers=[tier])
    plan = pk.plan(
        graph,
        cluster,
        microbatches=options.microbatches,
        memory_bytes=budget_of(graph, options),
        spill="always",
    )
    assert plan.spill is not None
    if way in ("memory", "capped-memory"):
        return replace(plan, spill=None, offload=None)
    if way == "waiting":
        return replace(plan, spill=replace(plan.spill, ahead=0))
    if way == "hydra":
        return replace(plan, options={**plan.options, "group": 1})
    return plan


def memory_of_process(key: str = "RssAnon") -> int:
    """Bytes of memory that this process has, by default of which no file is behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def warm_up() -> None:
    """Load what is no model: torch's compiler comes with the first optimizer."""
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2)).sum().backward()
    optimizer.step()


def timed(
    step: Callable[[torch.Tensor, torch.Tensor], Any],
    options: argparse.Namespace,
    before: int,
    after_step: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train a few steps; the median of their seconds, memory beyond ``before``, the last loss."""
    torch.manual_seed(1)
    size = options.microbatches, options.tokens
    batches = [(torch.randint(0, 256, size), torch.randint(0, 256, size)) for _ in range(2)]
    times, most, last = [], 0, None
    for number in range(_WARM + options.steps):
        start = time.perf_counter()
        last = step(*batches[number % 2])
        times.append(time.perf_counter() - start)
        most = max(most, memory_of_process())
        after_step()
    seconds = statistics.median(times[_WARM:])
    loss_of_last = None if last is None else last.item()
    return {"seconds": seconds, "resident": most - before, "loss": loss_of_last}


def run_peer(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Train as another library does; its own words if it cannot."""
    warm_up()
    torch.manual_seed(1)
    before = memory_of_process()
    try:
        model = model_of(options, device="cpu")
        return timed(peer(name, model, options.folder), options, before)
    except Exception as error:  # whatever it says is what the table shows
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def run(graph: pk.LayerGraph, options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Train as Penstock does, and say what it took; the error where it cannot."""
    plan, budget = planned(graph, options, way), budget_of(graph, options)
    warm_up()
    if way.startswith("capped"):
        allowed = memory_of_process("VmData") + budget + _SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    try:
        return run_plan(plan, budget, options, way)
    except (PenstockError, RuntimeError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def run_plan(plan: pk.Plan, budget: int, options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Train with a plan."""
    before = memory_of_process()
    moved = step_moved = (0, 0)
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

        def count() -> None:
            nonlocal moved, step_moved
            if residence is not None:
                residence.transfers.finish()
                now = residence.store.read_bytes, residence.store.written_bytes
                step_moved = now[0] - moved[0], now[1] - moved[1]
                moved = now

        report = timed(pipeline.step, options, before, count)
    report["predicted"] = plan.step_seconds
    if residence is not None:
        group = 1 if way == "hydra" else 0
        formula = traffic(plan.stages, options.microbatches, group, agrees=clip is not None)
        report |= {
            "moved": step_moved,
            "formula": formula,
            "counted": residence.slabs.used_peak_bytes,
            "ordered": residence.slabs.budget_bytes,
            "budget": budget,
        }
    return report


def in_process(options: argparse.Namespace, way: str, graph: Path, *more: str) -> dict[str, Any]:
    """What one way says, from a process that has nothing else in memory."""
    command = [sys.executable, "-m", "benchmarks.contest.spilling", *sys.argv[1:]]
    done = subprocess.run(
        [*command, "--way", way, "--graph", str(graph), *more],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def row(way: str, reports: list[dict[str, Any]], alone: list[dict[str, Any]]) -> list[str]:
    """A way's line of the table."""
    last = reports[-1]
    if "error" in last:
        return [way, "does not train", *[""] * 8]
    seconds = statistics.median(report["seconds"] for report in reports)
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(reports, alone, strict=False)]
    cells = [
        way,
        f"{seconds:.3f}",
        f"{statistics.median(ratios):.2f}" if ratios else "",
        f"{last['predicted'] / seconds:.2f}" if "predicted" in last else "",
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


def knee(options: argparse.Namespace, graph: Path) -> None:
    """Time steps of more and more tokens, and draw them."""
    lines: dict[str, list[tuple[float, float]]] = {"in memory": [], "spilled": [], "predicted": []}
    loaded, tokens_where_free, rows = pk.LayerGraph.load(graph), 0.0, []
    for count in map(int, options.knee.split(",")):
        options.microbatches, tokens = count, count * options.tokens
        told = {
            way: in_process(options, way, graph, "--microbatches", str(count))
            for way in ("memory", "spilled")
        }
        plan = planned(loaded, options, "spilled")
        assert plan.spill is not None
        moved = traffic(plan.stages, count)
        tier = plan.spill.tier
        transfers = max(tier.read_seconds(moved[0]), tier.write_seconds(moved[1]))
        compute = replace(plan, spill=None, offload=None).step_seconds / tokens
        tokens_where_free = transfers / compute
        lines["in memory"].append((tokens, told["memory"]["seconds"]))
        lines["spilled"].append((tokens, told["spilled"]["seconds"]))
        lines["predicted"].append((tokens, plan.step_seconds))
        rows.append([str(tokens), *(f"{line[-1][1]:.3f}" for line in lines.values())])
    print_table(("tokens a step", *(f"{name}, s" for name in lines)), rows)
    print(f"spilling is free from {tokens_where_free:.0f} tokens a step, by the formula")
    top = max(seconds for line in lines.values() for _, seconds in line)
    mark = [(tokens_where_free, 0.0), (tokens_where_free, top)]
    series = [*lines.items(), ("free from here, by the formula", mark)]
    Path(options.picture).write_text(line_chart(series, "tokens a step", "seconds a step"))


def compare(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Let the ways take turns, and print the table; or look for the knee."""
    ways = options.ways.split(",")
    known = [*WAYS, *(_PEER + name for name in PEERS)]
    if unknown := set(ways) - set(known):
        parser.error(f"no such ways: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(options.graph or Path(folder) / "graph.json")
        if not graph.exists():
            in_process(options, "profile", graph)
        if options.knee:
            knee(options, graph)
            return
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
    for way in ways:
        if "error" in reports[way][-1]:
            print(f"{way}: {reports[way][-1]['error'][:200]}")
    own = [way for way in ways if way != "clipped" and not way.startswith(_PEER)]
    losses = {reports[way][-1]["loss"] for way in own if "loss" in reports[way][-1]}
    print("the same loss in memory and out of it:", len(losses) == 1)


def main() -> None:
    """Read the arguments, and do what they say."""
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
    parser.add_argument("--knee", help="numbers of microbatches, as in 1,2,4,8")
    parser.add_argument("--picture", default="knee.svg")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--graph", help="the profile's file; written if it is not there")
    options = parser.parse_args()
    if options.way == "profile":
        profiled(options).save(options.graph)
        print("{}")
    elif options.way and options.way.startswith(_PEER):
        print(json.dumps(run_peer(options, options.way.removeprefix(_PEER))))
    elif options.way:
        print(json.dumps(run(pk.LayerGraph.load(options.graph), options, options.way)))
    else:
        compare(options, parser)


if __name__ == "__main__":
    main()
