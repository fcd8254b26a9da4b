"""Verbs that train, and the report of what was trained."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, NamedTuple

import click

from penstock import drawing
from penstock.base.values import write_atomically
from penstock.cli import options, show
from penstock.cli.input import InputFile
from penstock.cli.names import ScheduleName
from penstock.cli.output import OutputFile, written
from penstock.cli.profile_verb import WORKLOAD_HELP, print_graph, profiled
from penstock.cli.workloads import DEFAULT_WORKLOAD, load_workload, load_workload_of
from penstock.core.cluster import Cluster
from penstock.planning import planner

if TYPE_CHECKING:
    from penstock.core.versions import Policy
    from penstock.planning.plans import Plan
    from penstock.trial import Trial, Workload


@click.command(epilog=WORKLOAD_HELP)
@click.argument("workload", default=DEFAULT_WORKLOAD)
@click.option(
    "--plan", "plan_file", type=InputFile(),
    help="Plan file, or - for standard input; default: make a plan.",
)  # fmt: skip
@options.ranks_option(None)
@options.microbatches_option(8)
@click.option("--schedule", type=ScheduleName(), help="Schedule family; default: the best of all.")
@options.policy_option
@options.steps_option
@click.option("--compare/--no-compare", default=False, help="Train on one device beside it.")
@options.folder_option
@click.option(
    "--timeline",
    type=OutputFile(),
    help="Also write the measured step (.json), for draw, compare and simulate.",
)
@options.json_option
@options.verbose_option("all that was measured and planned.")
def train(
    workload: str,
    plan_file: str | None,
    ranks: int | None,
    microbatches: int,
    schedule: str | None,
    versions: Policy | None,
    steps: int,
    compare: bool,
    output: str,
    timeline: str | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Train a workload through a pipeline and write a report."""
    if plan_file is not None:
        from penstock.cli import sources  # not for a report

        chosen = sources.load_plan(plan_file)
        loaded = load_workload_of(chosen, plan_file, workload)
    else:
        loaded = load_workload(workload)
        graph = profiled(loaded, microbatches)
        chosen = planner.plan(
            graph,
            Cluster.local(ranks),
            microbatches=microbatches,
            schedule=schedule,
            stages=ranks,
            versions=versions,
        )
    trial = _train(loaded, chosen, steps, compare, output, _Shown(as_json, verbose))
    if timeline is not None:
        with written(timeline, ".json") as path:
            write_atomically(str(path), trial.measured.to_json() + "\n")


@click.command()
@options.steps_option
@options.folder_option
@options.json_option
@options.verbose_option("all that was measured and planned.")
def demo(steps: int, output: str, as_json: bool, verbose: bool) -> None:
    """Train a GPT on real text through a 2-stage pipeline, beside one device.

    Needs nothing but this machine: the text is the source code of Python's standard library.
    """
    from penstock.demo.workload import MICROBATCHES, workload

    loaded = workload()
    show.say(f"text: {loaded.notes}")
    graph = profiled(loaded, MICROBATCHES)
    if not as_json:
        print_graph(graph, verbose=verbose)
        show.echo()
    chosen = planner.plan(
        graph, Cluster.local(2), microbatches=MICROBATCHES, schedule="1f1b", stages=2
    )
    _train(loaded, chosen, steps, True, output, _Shown(as_json, verbose))


class _Shown(NamedTuple):
    """How results are printed: for programs, or with all details."""

    as_json: bool
    verbose: bool


def _train(
    workload: Workload, plan: Plan, steps: int, compare: bool, output: str, shown: _Shown
) -> Trial:
    from penstock.trial import run_trial

    if not shown.as_json:
        show.echo(plan.text(show.width(), details=shown.verbose) + "\n")
    with show.training(steps, workload.unit, workload.num_units()) as progress:
        trial = run_trial(workload, plan, steps, compare=compare, progress=progress)
    page = drawing.write_report(trial.report(_command()), output)
    if shown.as_json:
        show.print_json(trial.numbers())
    else:
        show.echo(f"\n{show.in_terminal(trial.measured)}\n")
        show.print_facts(trial.facts())
    show.say(f"report: {page}")
    return trial


def _command() -> str:
    """What was typed."""
    return shlex.join(["penstock", *sys.argv[1:]])


@click.command()
@click.argument("folder", type=click.Path(), default="penstock-report")
@options.json_option
def report(folder: str, as_json: bool) -> None:
    """Write a run's report page again from its run.json."""
    recorded = drawing.read_report(folder)
    page = drawing.write_report(recorded, folder)
    if as_json:
        show.print_json({"page": str(page), "facts": recorded.facts})
    else:
        show.print_facts(recorded.facts)
        show.say(f"report: {page}")
