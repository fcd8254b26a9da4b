"""How long people wait before anything happens: `import penstock`, verbs of the command line that
need no torch, and a pipeline up to the end of its first step.

Run with ``python -m benchmarks.planning.startup``; ``--beside PATH`` (the ``src`` of another
checkout) takes turns with another version. Bytecode is compiled before anything counts, as where
Penstock is installed. Processor time depends less than wall time on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

import penstock as pk
from benchmarks.common.alone import publish
from benchmarks.common.system import free_port
from benchmarks.planning.startup_job import Phase
from penstock.drawing import Fact, Report, write_report

JOB = "benchmarks.planning.startup_job"
VERBS = {
    "--help": "--help",
    "an unknown verb": "nonsense",
    "schedules": "schedules",
    "schedules 1f1b": "schedules 1f1b",
    "simulate": "simulate 1f1b",
    "simulate, a plan": "simulate plan.json",
    "simulate --json": "simulate 1f1b --json",
    "check": "check 1f1b",
    "draw": "draw 1f1b",
    "draw -o .svg": "draw 1f1b -o drawn.svg",
    "draw -o .html": "draw 1f1b -o drawn.html",
    "draw, a plan": "draw plan.json",
    "draw, a plan, -o .html": "draw plan.json -o drawn.html",
    "compare": "compare 1f1b gpipe",
    "cluster": "cluster -p 2",
    "plan": "plan graph.json -p 2 -m 4 --schedule 1f1b --stages 2",
    "explain": "explain plan.json",
    "report": "report run",
}


class Cost(NamedTuple):
    """Seconds of one process and those that it has waited for."""

    cpu: float
    wall: float


def main() -> None:
    """Measure all tasks in turns and print their medians."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--job-rounds", type=int, default=5, help="of those with torch")
    arguments.add_argument("--beside", help="the src of another checkout")
    asked = arguments.parse_args()
    sources = {"": os.environ.get("PYTHONPATH", "")}
    if asked.beside:
        sources = {" (before)": f"{asked.beside}:{os.getcwd()}", "": sources[""]}
    costs: dict[str, list[Cost]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        _write_files(Path(folder))
        for _ in range(1 + asked.rounds):
            for task, command in _commands().items():
                for version, path in sources.items():
                    cost = _measured(command, folder, path)
                    costs[f"{task}{version}"].append(cost)
        for _ in range(1 + asked.job_rounds if asked.job_rounds else 0):
            for ranks in ("threads", "processes"):
                for version, path in sources.items():
                    for phase in _phases(ranks, path):
                        cost = Cost(phase.cpu_seconds, phase.wall_seconds)
                        costs[f"{ranks}: {phase.name}{version}"].append(cost)
    # The first round has compiled what it loaded.
    _print({task: measured[1:] for task, measured in costs.items()})


def _write_files(folder: Path) -> None:
    """What verbs read: a profile, a plan and a run."""
    seconds = {"forward_seconds": 1, "backward_input_seconds": 1, "backward_weight_seconds": 1}
    graph = pk.LayerGraph(layers=tuple(pk.Layer(name=name, **seconds) for name in "abcd"))
    graph.save(folder / "graph.json")
    plan = pk.plan(graph, pk.Cluster.local(2), microbatches=4, schedule="1f1b", stages=2)
    plan.save(folder / "plan.json")
    write_report(Report(title="run", facts=(Fact(label="steps", value="1"),)), folder / "run")


def _commands() -> dict[str, list[str]]:
    """What is started, by what it is called."""
    commands = {
        "python alone": [sys.executable, "-c", "pass"],
        "import penstock": [sys.executable, "-c", "import penstock"],
    }
    for task, words in VERBS.items():
        commands[f"penstock {task}"] = [sys.executable, "-m", "penstock", *words.split()]
    return commands


def _environment(path: str) -> dict[str, str]:
    """Where modules are found, and bytecode is kept beside them."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": path}


def _measured(command: list[str], folder: str, path: str) -> Cost:
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=_environment(path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == (2 if "nonsense" in command else 0), command
    return Cost(used.ru_utime + used.ru_stime, wall)


def _phases(ranks: str, path: str) -> Iterator[Phase]:
    """What the first rank of a pipeline of two says of itself."""
    places: list[Mapping[str, str]] = [{}]
    if ranks == "processes":
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        places = [
            {**meeting, "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")
        ]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", JOB],
            env={**_environment(path), "OMP_NUM_THREADS": "1", **place},
            stdout=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]
    told = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes)
    for phase in json.loads(told[0]):
        yield Phase(*phase)


def _print(costs: Mapping[str, list[Cost]]) -> None:
    table = Table(title="medians, ms")
    for column in ("", "processor time", "wall"):
        table.add_column(column, justify="right" if column else "left")
    for task, measured in costs.items():
        cpu, wall = (statistics.median(values) * 1e3 for values in zip(*measured, strict=True))
        table.add_row(task, f"{cpu:.0f}", f"{wall:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    publish(main)
