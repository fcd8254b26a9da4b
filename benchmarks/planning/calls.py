"""How often schedules are built, checked and simulated for one plan: while it is searched, as text,
as a picture, and in words.

Run with ``python -m benchmarks.planning.calls``. Counts, not seconds, so that any machine gives the
same table.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from rich.console import Console
from rich.table import Table

import penstock as pk
from benchmarks.common.alone import publish
from benchmarks.planning.planner import DATA
from penstock.core.schedule import families
from penstock.core.schedule.check import check
from penstock.core.timing.simulator import rows_of, simulate
from penstock.drawing import draw_plan
from penstock.interop.pipedream_profiles import read_pipedream_graph
from penstock.planning.plans.explanation import explain
from penstock.planning.plans.picture import picture_of

VGG_16 = DATA / "vgg16" / "graph.txt"
COUNTED: dict[str, tuple[Callable[..., Any], ...]] = {
    "build": (families.build,),
    "check": (check,),
    "simulate": (simulate, rows_of),
}


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Within, calls of ``COUNTED`` are counted, whichever module makes them."""
    calls: Counter[str] = Counter()
    replaced = []
    for name, function in ((name, own) for name, every in COUNTED.items() for own in every):
        counted = _counted(name, function, calls)
        modules = [own for key, own in sys.modules.items() if key.partition(".")[0] == "penstock"]
        for module in modules:
            for attribute in [key for key, held in vars(module).items() if held is function]:
                setattr(module, attribute, counted)
                replaced.append((module, attribute, function))
    try:
        yield calls
    finally:
        for module, attribute, function in replaced:
            setattr(module, attribute, function)


def _counted(name: str, function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return counted


def picture(plan: pk.Plan) -> str:
    """A plan drawn with its timeline, as ``penstock draw plan.json`` does."""
    return draw_plan(picture_of(plan), plan.simulate())


def main() -> None:
    """Print a row for each thing that is done with a plan, for a pipeline that drains and for one
    that never does."""
    table = Table(title="VGG-16 (PipeDream's profile), 4 devices, 16 microbatches: calls of")
    table.add_column("")
    for name in COUNTED:
        table.add_column(name, justify="right")
    graph = read_pipedream_graph(VGG_16)
    cluster = pk.Cluster(devices=tuple(pk.Device(name=f"d{index}") for index in range(4)))
    for schedule in ("1f1b", "pipedream"):
        with counting() as calls:
            plan = pk.plan(graph, cluster, microbatches=16, schedule=schedule, stages=4)
        _add_row(table, f"pk.plan(schedule={schedule!r})", calls)
        text = plan.to_json()
        tasks: dict[str, Callable[[pk.Plan], object]] = {
            "str(plan)": str,
            "a picture": picture,
            "explain(plan)": explain,
            "all three": lambda own: (str(own), picture(own), explain(own)),
        }
        for name, task in tasks.items():
            # Each begins with a plan that nobody has asked anything yet.
            with counting() as calls:
                task(pk.Plan.from_json(text))
            _add_row(table, f"read, {name}", calls)
        table.add_section()
    Console(width=100).print(table)


def _add_row(table: Table, name: str, calls: Counter[str]) -> None:
    table.add_row(name, *(str(calls[counted]) for counted in COUNTED))


if __name__ == "__main__":
    publish(main)
