"""Training a GPT whose state is four times what a rank may hold, beside the same in memory.

    python -m benchmarks.contest.spilling [--width 1024 --blocks 12 --tokens 128 --microbatches 4]
        [--rows 1 --threads 1 --share 0.25] [--rounds 8] [--folder /scratch]
        [--ways memory,spilled,…]
    python -m benchmarks.contest.spilling --knee 1,2,4,8,16 --picture knee.svg [--width 512 …]
    python -m benchmarks.contest.spilling --budgets .3,.4,.6,.8 --picture budgets.svg
        [--ways memory,peer:deepspeed-memory,…]

Every way is a process of its own, because memory is what they differ in; they take turns, step by
step, so that all meet the same machine. Run it alone.

memory    everything in memory, microbatch by microbatch
spilled   stages come from the disk, one ahead
huge      the same as spilled, where torch asks the system for huge pages (THP_MEM_ALLOC_ENABLE=1)
waiting   the same, none ahead: what double buffering is worth
clipped   the same as spilled, with clip_norm: updates are late
hydra     microbatch by microbatch: the weights m times as often
capped    the same as spilled, where the system allows the process no more than what it had before,
          the budget and 60 MB (RLIMIT_DATA)
capped-memory  the same limit with everything in memory: has to fail
confined, confined-memory  the same two, where a control group of the system allows that much of all
          memory, also of slabs, which are shared memory; needs the right to make one
peer:NAME another library's way (``benchmarks.contest.spilling_peers``), or what it says instead

Columns: seconds of a step, ÷ those in memory of the same round; predicted ÷ measured; thousands of
page faults of a step; MB read and written in a step, and by the formula; the most that slabs and
gradients took, beside the budget and beside what the order of the ops says; the most resident
memory beyond that of an empty process, as seen twenty times a second.

The second form trains with more and more microbatches per step, in memory and out of it, and draws
the time of a step over its tokens: spilling is free behind the knee, where computing takes as long
as the longer one of the two transfers.

The third form trains within several budgets, given as ``--share`` is, and beside them in other
ways, by default none; it draws the time of a step over the memory that each has resident. The way
``memory`` is then the plan within the last budget, with everything in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

import penstock as pk
from benchmarks.common.alone import publish
from benchmarks.common.system import status_bytes
from benchmarks.contest.spilling_peers import PEERS, adamw, peer
from penstock.base.errors import PenstockError
from penstock.cli.show import print_table
from penstock.demo.gpt import GPT, loss
from penstock.drawing.chart import line_chart
from penstock.planning.plans.spilling import traffic

WAYS = ("memory", "spilled", "huge", "waiting", "clipped", "hydra", "capped", "capped-memory")
CONFINED = ("confined", "confined-memory")
_PEER = "peer:"
_MEGA = 1e6
_WARM = 2
_READY = "ready"
_SPARE_BYTES = 60 << 20
_LOOK_SECONDS = 0.05
HEADER = (
    "way", "s a step", "÷ memory", "predicted ÷ measured", "thousand faults", "read / written MB",
    "formula", "counted MB", "as ordered", "budget", "resident MB",
)  # fmt: skip


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
    tokens = torch.randint(0, 256, (options.rows, options.tokens))
    # One rank trains, so that nobody has to know how several slow each other down.
    return pk.profile(
        model,
        tokens,
        loss=loss,
        targets=tokens,
        optimizer=adamw,
        num_threads=options.threads,
        ranks=0,
    )


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
    if way == "memory" or way.endswith("-memory"):
        return replace(plan, spill=None, offload=None)
    if way == "waiting":
        return replace(plan, spill=replace(plan.spill, ahead=0))
    if way == "hydra":
        return replace(plan, options={**plan.options, "group": 1})
    return plan


def memory_of_process() -> int:
    """Bytes of memory that this process has and no file is behind; slabs are shared memory to the
    system."""
    return status_bytes("RssAnon", "RssShmem")


@contextmanager
def looking_at_memory() -> Iterator[Callable[[], int]]:
    """Gives what tells the most memory that this process has had since, and has at its end."""
    most, ended = memory_of_process(), threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(_LOOK_SECONDS):
            most = max(most, memory_of_process())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: most
    finally:
        ended.set()
        thread.join()


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
    """Train a step for each line of standard input, and say how long it took; at the end, memory
    beyond ``before``, faults of the last step and its loss."""
    torch.manual_seed(1)
    size = options.microbatches * options.rows, options.tokens
    batches = [(torch.randint(0, 256, size), torch.randint(0, 256, size)) for _ in range(2)]
    last, faults = None, 0
    with looking_at_memory() as most:
        print(_READY, flush=True)
        for number, _ in enumerate(sys.stdin):
            begun, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            last = step(*batches[number % 2])
            seconds = time.perf_counter() - start
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun
            after_step()
            print(json.dumps(seconds), flush=True)
        loss_of_last = None if last is None else last.item()
        return {"resident": most() - before, "loss": loss_of_last, "faults": faults}


def run_peer(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Train as another library does; its own words if it cannot."""
    warm_up()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    before = memory_of_process()
    try:
        model = model_of(options, device="cpu")
        return timed(peer(name, model, options.folder), options, before)
    except Exception as error:  # whatever it says is what the table shows
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def run(graph: pk.LayerGraph, options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Train as Penstock does, and say what it took; the error where it cannot."""
    budget = budget_of(graph, options)
    try:
        plan = planned(graph, options, way)
        warm_up()
        if way.startswith("capped"):
            allowed = status_bytes("VmData") + budget + _SPARE_BYTES
            resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
        if way in CONFINED:
            confine(budget + _SPARE_BYTES)
        return run_plan(plan, budget, options, way)
    except (PenstockError, RuntimeError, MemoryError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def confine(num_bytes: int) -> None:
    """Let the system allow this process no more than so much beside what it has now."""
    own = group_of(os.getpid())
    own.mkdir()
    limit = "memory.limit_in_bytes" if (own / "memory.limit_in_bytes").exists() else "memory.max"
    (own / limit).write_text(str(num_bytes))
    (own / "cgroup.procs").write_text(str(os.getpid()))


def group_of(process: int) -> Path:
    """Where the system has the control group of a confined process."""
    groups = Path("/sys/fs/cgroup")
    own = groups / "memory"
    return (own if own.is_dir() else groups) / f"penstock-{process}"


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
            "counted": residence.buffers.used_peak_bytes,
            "ordered": residence.buffers.budget_bytes,
            "budget": budget,
        }
    return report


class Process:
    """One way, in a process that has nothing else in memory; made when that is ready to train, so
    that the next one measures its tier alone.

    Attributes:
        way: which.
        seconds: of the steps so far.
        report: what it said at its end; of one that cannot train, the error.
    """

    def __init__(self, way: str, graph: Path, *more: str) -> None:
        command = [sys.executable, "-m", "benchmarks.contest.spilling", *sys.argv[1:]]
        self.way = way
        self._process = subprocess.Popen(
            [*command, "--way", way, "--graph", str(graph), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"THP_MEM_ALLOC_ENABLE": "1"} if way == "huge" else None,
            text=True,
        )
        self.seconds: list[float] = []
        self.report: dict[str, Any] = {}
        self._listen()

    def step(self) -> None:
        """Let it train one step, unless it has come to its end."""
        if self.report:
            return
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            print("step", file=self._process.stdin, flush=True)
        self._listen()

    def end(self) -> Process:
        """Let it come to its end."""
        if not self.report:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._listen()
        self._process.wait()
        with suppress(OSError):  # only who is confined has one
            group_of(self._process.pid).rmdir()
        return self

    @property
    def point(self) -> tuple[float, float]:
        """MB that it had resident, and seconds of a step in the median."""
        return self.report["resident"] / _MEGA, statistics.median(self.seconds[_WARM:])

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == _READY:
                return
            if not line.startswith(("{", *"0123456789")):
                continue  # other libraries talk, too
            told = json.loads(line)
            if isinstance(told, dict):
                self.report = told
            else:
                self.seconds.append(told)
            return
        self.report = {"error": f"the process ended with {self._process.wait()} (-9: killed)"}


def trained(way: str, graph: Path, steps: int, *more: str) -> Process:
    """A way after so many steps, and its end."""
    process = Process(way, graph, *more)
    for _ in range(steps):
        process.step()
    return process.end()


def row(way: str, process: Process, alone: Process | None) -> list[str]:
    """A way's line of the table."""
    report = process.report
    if "error" in report:
        return [way, "does not train", *[""] * 9]
    measured = process.seconds[_WARM:]
    seconds = statistics.median(measured)
    beside = [] if alone is None else alone.seconds[_WARM:]
    ratios = [a / b for a, b in zip(measured, beside, strict=False)]
    cells = [
        way,
        f"{seconds:.3f}",
        f"{statistics.median(ratios):.2f}" if ratios else "",
        f"{report['predicted'] / seconds:.2f}" if "predicted" in report else "",
        f"{report['faults'] / 1000:.0f}",
    ]
    if "moved" in report:
        cells += [
            " / ".join(f"{one / _MEGA:.1f}" for one in report["moved"]),
            " / ".join(f"{one / _MEGA:.1f}" for one in report["formula"]),
            f"{report['counted'] / _MEGA:.1f}",
            f"{report['ordered'] / _MEGA:.1f}",
            f"{report['budget'] / _MEGA:.1f}",
        ]
    else:
        cells += [""] * 5
    return [*cells, f"{report['resident'] / _MEGA:.0f}"]


def knee(options: argparse.Namespace, graph: Path) -> None:
    """Time steps of more and more tokens, and draw them."""
    lines: dict[str, list[tuple[float, float]]] = {"in memory": [], "spilled": [], "predicted": []}
    loaded, tokens_where_free, rows = pk.LayerGraph.load(graph), 0.0, []
    for count in map(int, options.knee.split(",")):
        options.microbatches, tokens = count, count * options.rows * options.tokens
        told = {
            way: trained(way, graph, _WARM + options.rounds, "--microbatches", str(count))
            for way in ("memory", "spilled")
        }
        plan = planned(loaded, options, "spilled")
        assert plan.spill is not None
        moved = traffic(plan.stages, count)
        tier = plan.spill.tier
        transfers = max(tier.read_seconds(moved[0]), tier.write_seconds(moved[1]))
        compute = replace(plan, spill=None, offload=None).step_seconds / tokens
        tokens_where_free = transfers / compute
        for name, way in (("in memory", "memory"), ("spilled", "spilled")):
            lines[name].append((tokens, statistics.median(told[way].seconds[_WARM:])))
        lines["predicted"].append((tokens, plan.step_seconds))
        rows.append([str(tokens), *(f"{line[-1][1]:.3f}" for line in lines.values())])
    print_table(("tokens a step", *(f"{name}, s" for name in lines)), rows)
    print(f"spilling is free from {tokens_where_free:.0f} tokens a step, by the formula")
    top = max(seconds for line in lines.values() for _, seconds in line)
    mark = [(tokens_where_free, 0.0), (tokens_where_free, top)]
    series = [*lines.items(), ("free from here, by the formula", mark)]
    Path(options.picture).write_text(line_chart(series, "tokens a step", "seconds a step"))


def in_turns(processes: Collection[Process], rounds: int) -> None:
    """Let ways train step by step in turns, and come to their ends."""
    for _ in range(_WARM + rounds):
        for process in processes:
            process.step()
    for process in processes:
        process.end()


def budgets(options: argparse.Namespace, graph: Path) -> None:
    """Time steps within larger and larger budgets, beside other ways, and draw them."""
    shares = options.budgets.split(",")
    spilled = {share: Process("spilled", graph, "--share", share) for share in shares}
    others = [Process(way, graph, "--share", shares[-1]) for way in options.ways.split(",") if way]
    in_turns([*spilled.values(), *others], options.rounds)
    alone = next((process for process in others if process.way == "memory"), None)
    print_table(HEADER, [
        *(row(f"spilled, {share}", process, alone) for share, process in spilled.items()),
        *(row(process.way, process, alone) for process in others),
    ])  # fmt: skip
    tell_errors([*spilled.values(), *others])
    trained_ones = [process for process in spilled.values() if "resident" in process.report]
    lines: list[tuple[str, list[tuple[float, float]]]] = [
        ("spilled", [process.point for process in trained_ones]),
        (
            "predicted",
            [(process.point[0], process.report["predicted"]) for process in trained_ones],
        ),
    ]
    lines += [(process.way, [process.point]) for process in others if "resident" in process.report]
    picture = line_chart(lines, "MB resident", "seconds a step")
    Path(options.picture).write_text(picture)


def tell_errors(processes: Iterable[Process]) -> None:
    """Print the words of those that cannot train."""
    for process in processes:
        if "error" in process.report:
            print(f"{process.way}: {process.report['error'][:200]}")


def compare(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Let the ways take turns, and print the table; or draw times over tokens or memory."""
    if options.ways is None:
        options.ways = "" if options.budgets else ",".join(WAYS)
    ways = options.ways.split(",") if options.ways else []
    known = [*WAYS, *CONFINED, *(_PEER + name for name in PEERS)]
    if unknown := set(ways) - set(known):
        parser.error(f"no such ways: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(options.graph or Path(folder) / "graph.json")
        if not graph.exists():
            report = trained("profile", graph, 0).report
            if "error" in report:
                sys.exit(f"no profile: {report['error']}")
        if options.knee:
            knee(options, graph)
            return
        if options.budgets:
            budgets(options, graph)
            return
        processes = {way: Process(way, graph) for way in ways}
        in_turns(processes.values(), options.rounds)
    alone = processes.get("memory")
    print_table(HEADER, [row(way, process, alone) for way, process in processes.items()])
    tell_errors(processes.values())
    reports = {way: process.report for way, process in processes.items()}
    own = [way for way in ways if way != "clipped" and not way.startswith(_PEER)]
    losses = {reports[way]["loss"] for way in own if "loss" in reports[way]}
    print("the same loss in memory and out of it:", len(losses) == 1)


def main() -> None:
    """Read the arguments, and do what they say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1, help="of a microbatch")
    parser.add_argument("--threads", type=int, default=1, help="of compute, also of peers")
    parser.add_argument("--share", type=float, default=0.25, help="budget over all state")
    parser.add_argument("--rounds", type=int, default=8, help="steps of each way that count")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--ways", help=f"by default {','.join(WAYS)}")
    parser.add_argument("--knee", help="numbers of microbatches, as in 1,2,4,8")
    parser.add_argument("--budgets", help="over all state, as in .3,.4,.6: times over memory")
    parser.add_argument("--picture", default="knee.svg")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--graph", help="the profile's file; written if it is not there")
    options = parser.parse_args()
    if options.way == "profile":
        profiled(options).save(options.graph)
        print('{"saved": true}')
    elif options.way and options.way.startswith(_PEER):
        print(json.dumps(run_peer(options, options.way.removeprefix(_PEER))))
    elif options.way:
        print(json.dumps(run(pk.LayerGraph.load(options.graph), options, options.way)))
    else:
        compare(options, parser)


if __name__ == "__main__":
    publish(main)
