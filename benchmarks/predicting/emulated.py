"""Emulated devices beside the simulator: makespan and bubble of every fixed schedule.

    python -m benchmarks.predicting.emulated [-p 4 8 16] [--microbatches-per-rank 2] [--op-ms 10]
        [--steps 5]
    python -m benchmarks.predicting.emulated --schedules zb-h1 -p 8 --op-ms 5 10 20

Every rank is a real process that performs its real, lowered schedule over shared memory; F, I and
W of a rank's layers are waits of ``--op-ms`` each. The prediction is the simulator's with the hop
that was measured in the same run. Of a step, the median after a warm-up is shown.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import NamedTuple

from benchmarks.common.alone import publish
from penstock import schedules
from penstock.base.errors import InputError
from penstock.training.rehearsal import Rehearsal, rehearse
from penstock.training.rehearsal.conduct import OP_SECONDS, default_costs

_COLUMNS = (
    "schedule", "p", "m", "op ms", "predicted ms", "measured ms", "difference",
    "bubble predicted", "bubble measured", "points", "hop µs",
)  # fmt: skip


class Case(NamedTuple):
    """One row."""

    name: str
    num_ranks: int
    num_microbatches: int
    op_ms: float

    def run(self, steps: int) -> Rehearsal:
        """Perform it."""
        schedule = schedules.build(
            self.name, num_ranks=self.num_ranks, num_microbatches=self.num_microbatches
        )
        costs = default_costs(schedule).scaled(self.op_ms / 1e3 / OP_SECONDS)
        return rehearse(schedule, costs, steps=steps)

    def row(self, found: Rehearsal) -> str:
        """The row as Markdown."""
        makespan, bubble, _ = found.comparisons
        cells = (
            *map(str, self[:3]),
            f"{self.op_ms:g}",
            f"{makespan.predicted * 1e3:.1f}",
            f"{makespan.measured * 1e3:.1f}",
            f"{makespan.difference:+.1%}",
            f"{bubble.predicted:.1%}",
            f"{bubble.measured:.1%}",
            f"{bubble.difference * 100:+.1f}",
            f"{found.hop_seconds * 1e6:.0f}",
        )
        return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    fixed = [name for name in schedules.names() if name not in schedules.SEARCHED]
    parser.add_argument("--schedules", nargs="+", default=fixed)
    parser.add_argument("-p", "--ranks", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--microbatches-per-rank", type=int, default=2)
    parser.add_argument("--op-ms", nargs="+", type=float, default=[10.0])
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    started, worst = time.perf_counter(), 0.0
    print(f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
    for op_ms, ranks, name in itertools.product(options.op_ms, options.ranks, options.schedules):
        case = Case(name, ranks, options.microbatches_per_rank * ranks, op_ms)
        try:
            found = case.run(options.steps)
        except InputError as error:
            print(f"| {name} | {ranks} | refused: {error} |")
            continue
        worst = max(worst, abs(found.comparisons[0].difference))
        print(case.row(found), flush=True)
    print(f"\n{time.perf_counter() - started:.0f} s; largest difference of a makespan {worst:.1%}")


if __name__ == "__main__":
    publish(main)
