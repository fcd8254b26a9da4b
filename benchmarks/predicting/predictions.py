"""Predicted against measured step times on this machine: seven models, four schedules, three cuts.

    python -m benchmarks.predicting.predictions [--quick] [--profiles 5] [--rounds 3] [--steps 10]
        [--models GPT,LSTM] [--patience 30] [--json out.json]

Each model is profiled several times, every plan is predicted from every profile, and every pipeline
(two ranks as threads of one process) trains for real. Profiles and rounds of training take turns,
and so do contestants; a plan's time is the median of its steps. For each model and schedule, the
table also says whether the predicted order of the cuts is the measured one, where predictions
differ by more than their usual error; the last table says what each profile found.

``--quick`` is for a window of half an hour. Goals: a median error of at most 5 % per model, and
none of a profile above 10 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

import penstock as pk
from benchmarks.common.alone import publish
from benchmarks.common.goals import Goal
from benchmarks.predicting.foretold import Foretold, orders
from benchmarks.predicting.works import MICROBATCHES, WORKS, Work

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "pipedream")
MOST_MEDIAN, MOST_OF_A_PROFILE = 0.05, 0.10
_QUICK = {"steps": 5, "rounds": 2, "repeats": 7, "patience": 18.0}
_THOROUGH = {"steps": 10, "rounds": 3, "repeats": 15, "patience": 30.0}


@dataclass(kw_only=True)
class Contestant(Foretold):
    """One plan of a model, as one profile foretells it.

    Attributes:
        schedule, cut: of the plan.
    """

    schedule: str
    cut: int


@dataclass
class Contest:
    """A model's profiles, what they foretell, and what was measured.

    Attributes:
        work: the model.
        graphs: a profile each.
        foretold: of each profile, every plan; the seconds of a plan are the same list in all.
        profile_seconds: what each profile took.
    """

    work: Work
    graphs: list[pk.LayerGraph] = field(default_factory=list)
    foretold: list[list[Contestant]] = field(default_factory=list)
    profile_seconds: list[float] = field(default_factory=list)

    def add_profile(self, repeats: int, patience_seconds: float) -> None:
        """Profile once more."""
        inputs, targets = self.work.batch
        rows = len(inputs) // MICROBATCHES
        start = time.perf_counter()
        graph = pk.profile(
            self.work.model,
            inputs[:rows],
            loss=self.work.loss,
            targets=targets[:rows],
            optimizer=self.work.optimizer,
            repeats=repeats,
            patience_seconds=patience_seconds,
        )
        self.profile_seconds.append(time.perf_counter() - start)
        self.graphs.append(graph)
        # All profiles foretell the same plans, whatever they think of where to cut.
        cuts = cuts_of(self.graphs[0])
        plans = list(contestants(graph, cuts))
        for known, new in zip(self.foretold[0] if self.foretold else plans, plans, strict=True):
            new.seconds = known.seconds
        self.foretold.append(plans)

    def train(self, steps: int) -> None:
        """One round of all plans."""
        for contestant in self.foretold[0]:
            train(self.work, contestant, steps)

    def errors(self) -> list[list[float]]:
        """Of each profile, how far each plan is off."""
        return [[abs(one.error) for one in plans] for plans in self.foretold]


def cuts_of(graph: pk.LayerGraph) -> tuple[int, int, int]:
    """The even cut, and those nearest to one third and two thirds of the compute."""
    total = sum(layer.compute_seconds for layer in graph.layers)
    sums = list(itertools.accumulate(layer.compute_seconds for layer in graph.layers))

    def nearest(share: float) -> int:
        return min(range(1, len(sums)), key=lambda cut: abs(sums[cut - 1] - share * total))

    even, early, late = nearest(0.5), nearest(0.3), nearest(0.7)
    return even, early, late


def contestants(graph: pk.LayerGraph, cuts: Sequence[int]) -> Iterator[Contestant]:
    """Every schedule with every cut."""
    cluster = pk.Cluster.local(2, kind="cpu")
    for schedule, cut in itertools.product(SCHEDULES, cuts):
        plan = pk.plan(
            graph,
            cluster,
            microbatches=MICROBATCHES,
            schedule=schedule,
            cuts=[cut],
            recompute="never",
        )
        yield Contestant(plan=plan, schedule=schedule, cut=cut)


def train(work: Work, one: Contestant, steps: int) -> None:
    """Some steps of one contestant; the first two are warm-up."""
    with pk.Pipeline(work.model, one.plan, loss=work.loss, optimizer=work.optimizer) as pipeline:
        if one.plan.versions.asynchronous:
            one.seconds += stream_seconds(pipeline, work, steps)
            return
        for step in range(steps):
            start = time.perf_counter()
            pipeline.step(*work.batch)
            if step >= 2:
                one.seconds.append(time.perf_counter() - start)


def stream_seconds(pipeline: pk.Pipeline, work: Work, steps: int) -> list[float]:
    """Between the losses of a stream in its steady state."""
    times = []
    for _ in pipeline.steps(work.batch for _ in range(steps + 3)):
        times.append(time.perf_counter())
    gaps = [second - first for first, second in itertools.pairwise(times)]
    return gaps[2:-1]  # without filling and draining


def show(contest: Contest, console: Console) -> None:
    """Every plan as the first profile foretold it, and the range over all profiles."""
    table = Table(title=f"{contest.work.name}: seconds of a step, 2 ranks in threads")
    for name in ("schedule", "cut", "measured ms", "predicted ms", "error", "of all", "order"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    first = contest.foretold[0]
    num_layers = len(contest.graphs[0].layers)
    all_errors = list(zip(*([one.error for one in row] for row in contest.foretold), strict=True))
    for index, one in enumerate(first):
        those = [other for other in first if other.schedule == one.schedule]
        order = ("right" if all(orders(those)) else "WRONG") if those[0] is one else ""
        table.add_row(
            one.schedule,
            f"{one.cut} of {num_layers}",
            f"{one.measured * 1e3:.1f}",
            f"{one.plan.step_seconds * 1e3:.1f}",
            f"{one.error:+.1%}",
            f"{min(all_errors[index]):+.1%} … {max(all_errors[index]):+.1%}",
            order,
        )
    console.print(table)


def show_profiles(contest: Contest, console: Console) -> None:
    """What each profile found of contention, and how good its predictions are."""
    table = Table(title=f"{contest.work.name}: profiles")
    for name in ("whole", "split", "stream", "rounds", "others", "took s", "median", "largest"):
        table.add_column(name, justify="right")
    rows = zip(contest.graphs, contest.errors(), contest.profile_seconds, strict=True)
    for graph, errors, seconds in rows:
        found = graph.contention
        table.add_row(
            f"{found.whole:.2f} ± {found.whole_spread:.1%}",
            f"{found.split:.2f} ± {found.split_spread:.1%}",
            f"{found.stream:.2f} ± {found.stream_spread:.1%}",
            f"{found.num_rounds} (- {found.num_rejected})",
            f"{found.others_share:.0%}",
            f"{seconds:.0f}",
            f"{statistics.median(errors):.1%}",
            f"{max(errors):.1%}",
        )
    console.print(table)
    for warning in dict.fromkeys(one for graph in contest.graphs for one in graph.warnings):
        console.print(f"! {warning}")


def goals(contest: Contest) -> Iterator[Goal]:
    """What the predictions of a model are to reach."""
    errors = contest.errors()
    name = contest.work.name
    median = statistics.median(itertools.chain.from_iterable(errors))
    worst = max(map(statistics.median, errors))
    yield Goal.of(f"{name}: median error ≤ 5 %", f"{median:.1%}", median <= MOST_MEDIAN)
    yield Goal.of(
        f"{name}: median of the worst profile ≤ 10 %", f"{worst:.1%}", worst <= MOST_OF_A_PROFILE
    )
    rights = [
        all(orders(list(those)))
        for plans in contest.foretold
        for _, those in itertools.groupby(plans, key=lambda one: one.schedule)
    ]
    yield Goal.of(
        f"{name}: order of the cuts right", f"{sum(rights)} of {len(rights)}", all(rights)
    )


def numbers(contest: Contest) -> Mapping[str, object]:
    """All that was found, for programs."""
    return {
        "model": contest.work.name,
        "contention": [json.loads(graph.contention.to_json()) for graph in contest.graphs],
        "plans": [
            {
                "schedule": one.schedule,
                "cut": one.cut,
                "measured_seconds": one.measured,
                "predicted_seconds": [row[index].plan.step_seconds for row in contest.foretold],
            }
            for index, one in enumerate(contest.foretold[0])
        ],
    }


def run(work: Work, arguments: argparse.Namespace) -> Contest:
    """Profiles and rounds in turns."""
    contest = Contest(work)
    for number in range(max(arguments.profiles, arguments.rounds)):
        if number < arguments.profiles:
            contest.add_profile(arguments.repeats, arguments.patience)
        if number < arguments.rounds:
            contest.train(arguments.steps)
    return contest


def arguments_of(given: Sequence[str] | None) -> argparse.Namespace:
    """From the command line, with defaults of a quick or a thorough run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--profiles", type=int, default=5)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--patience", type=float)
    parser.add_argument("--models", default=",".join(WORKS))
    parser.add_argument("--json")
    arguments = parser.parse_args(given)
    for name, value in (_QUICK if arguments.quick else _THOROUGH).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    arguments = arguments_of(given)
    console = Console(width=120)
    contests = []
    for name in arguments.models.split(","):
        start = time.perf_counter()
        contest = run(WORKS[name](), arguments)
        contests.append(contest)
        show(contest, console)
        show_profiles(contest, console)
        console.print(f"{name} took {time.perf_counter() - start:.0f} s\n")
        if arguments.json:
            Path(arguments.json).write_text(json.dumps([*map(numbers, contests)], indent=2))
    table = Table("goal", "found", "", title="goals")
    for contest in contests:
        for goal in goals(contest):
            table.add_row(*goal)
    console.print(table)


if __name__ == "__main__":
    publish(main)
