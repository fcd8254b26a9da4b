"""The zero-bubble paper's Tables 5 and 6 (Qi et al., arXiv 2401.10241), published and ours.

    python -m benchmarks.planning.zero_bubble_table [--effort 10]

The rate is the stage bubble: 1 − m(F+I+W) / (the longest time a stage needs from its first op to
its last). The fixed families are simulated from the paper's measured costs. ZB-1p and ZB-2p are
orders that the authors searched under a limit of p·M_F and 2p·M_F; ours are zb-auto's under the
same limit, where the part M_W of a microbatch's M_F stays from I until W.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from penstock import Costs, Sizes, schedules, simulate


class Setting(NamedTuple):
    """One row of the paper: milliseconds, and the rates it prints."""

    model: str
    p: int
    m: int
    costs: tuple[float, float, float, float]
    published: dict[str, float]


_NAMES = ("1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p")
_ROWS = (
    ("1.5B", 8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083, 0.1585, 0.0433)),
    ("1.5B", 8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837, 0.1242, 0.0039)),
    ("1.5B", 8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444, 0.0674, 0.0026)),
    ("14.6B", 16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672, 0.1397, 0.0066)),
    ("14.6B", 16, 64, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516, 0.1088, 0.0054)),
    ("14.6B", 16, 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266, 0.0576, 0.0028)),
)
SETTINGS = tuple(Setting(*row, dict(zip(_NAMES, rates, strict=True))) for *row, rates in _ROWS)
SHAPES = {"1.5B": (2304, 24), "14.6B": (5120, 40)}
SEQUENCE = 1024


def sizes(row: Setting) -> Sizes:
    """What a microbatch keeps, in units of M_F: all of it until I, M_W of it until W."""
    hidden, heads = SHAPES[row.model]
    kept = 32 * hidden / (34 * hidden + 5 * heads * SEQUENCE)
    return Sizes([1.0] * row.p, [kept] * row.p)


def searched(row: Setting, limit: int, effort: float = 1.0):
    """zb-auto's order for a row, under a limit of ``limit`` times p microbatches."""
    return schedules.build(
        "zb-auto",
        num_ranks=row.p,
        num_microbatches=row.m,
        costs=Costs(*row.costs),
        sizes=sizes(row),
        activation_limit=limit * row.p,
        objective="stage",
        effort=effort,
    )


def rate(row: Setting, name: str, effort: float = 1.0) -> float:
    """The stage bubble of one cell of the table."""
    if name.startswith("zb-") and name.endswith("p"):
        schedule = searched(row, int(name[3]), effort)
    else:
        schedule = schedules.build(name, num_ranks=row.p, num_microbatches=row.m)
    return simulate(schedule, Costs(*row.costs)).stage_bubble


def least_rate(row: Setting) -> float:
    """No order is below this rate, whatever its memory: the last stage runs m forwards and input
    gradients between the first one's first forward and its last weight gradient."""
    forward, gradient, weight, hop = row.costs
    way = (row.p - 1) * (forward + gradient + 2 * hop)
    longest = way + row.m * (forward + gradient) + weight
    return max(0.0, 1 - row.m * (forward + gradient + weight) / longest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--effort", type=float, default=10.0, help="how long zb-auto searches")
    effort = parser.parse_args().effort
    table = Table(title="Stage bubble: published / ours", box=None, pad_edge=False)
    table.add_column("model, p, m")
    for name in SETTINGS[0].published:
        table.add_column(name, justify="right")
    table.add_column("no order below", justify="right")
    started = time.perf_counter()
    for row in SETTINGS:
        cells = []
        for name, published in row.published.items():
            ours = rate(row, name, effort)
            worse = round(ours, 4) > published
            cells.append(f"{published:.4f} / {ours:.4f}" + (" (!)" if worse else ""))
        table.add_row(f"{row.model}, {row.p}, {row.m}", *cells, f"{least_rate(row):.4f}")
    console = Console(width=140)
    console.print(table)
    console.print(f"{time.perf_counter() - started:.0f} s; (!) marks a cell worse than published")


if __name__ == "__main__":
    main()
