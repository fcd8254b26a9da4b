"""What post-validation earns, on emulated devices: the stage bubble instead of the makespan's.

    python -m benchmarks.learning.post_validation [-p 4 8] [--op-ms 10] [--steps 8]

Every rank is a real process that performs its real schedule and exchanges real norms; F, I and W
are waits. "Agreed" lets all ranks wait for the global norm before they update, "post-validated"
updates at once, and reads the verdict in the next step. Both do the same updates.
"""

from __future__ import annotations

import argparse
import itertools

from benchmarks.common.alone import publish
from penstock import Costs, rehearse, schedules, simulate
from penstock.training.rehearsal.conduct import default_costs

_COLUMNS = (
    "schedule", "p", "m", "agreed ms", "post-validated ms", "gain", "predicted gain",
)  # fmt: skip


def row(name: str, num_ranks: int, op_ms: float, steps: int) -> str:
    """One line of the table."""
    count = 2 * num_ranks
    schedule = schedules.build(name, num_ranks=num_ranks, num_microbatches=count)
    costs: Costs = default_costs(schedule).scaled(op_ms / 10)
    agreed = rehearse(schedule, costs, steps=steps, updates="agreed")
    trusting = rehearse(schedule, costs, steps=steps, updates="post-validated")
    timeline = simulate(schedule, costs)
    makespan = agreed.comparisons[0].measured
    mean_busy = sum(timeline.busy) / num_ranks
    longest = mean_busy / (1 - timeline.stage_bubble)
    predicted = timeline.makespan / longest - 1
    cells = (
        name,
        str(num_ranks),
        str(count),
        f"{makespan * 1e3:.1f}",
        f"{trusting.pace_seconds * 1e3:.1f}",
        f"{makespan / trusting.pace_seconds - 1:+.1%}",
        f"{predicted:+.1%}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-h1", "zb-h2", "zb-v"])
    parser.add_argument("-p", "--ranks", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--op-ms", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    print(f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
    for ranks, name in itertools.product(options.ranks, options.schedules):
        print(row(name, ranks, options.op_ms, options.steps), flush=True)


if __name__ == "__main__":
    publish(main)
