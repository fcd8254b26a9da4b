"""Verbs about models: profile, plan, train, report, demo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli import options, show, sources
from penstock.cluster import Cluster
from penstock.drawing import draw as draw_timeline
from penstock.drawing import read_report, write_report
from penstock.errors import InputError
from penstock.graph import LayerGraph
from penstock.planner import Plan
from penstock.planner import plan as find_plan
from penstock.schedule.families.replicated import read_replicas
from penstock.values import write_atomically
from penstock.versions import POLICIES, Policy

if TYPE_CHECKING:
    from penstock.trial import Trial, Workload

_WORKLOAD_HELP = (
    "WORKLOAD is module:function, where the function returns a penstock.trial.Workload; by default "
    f"the demo's, {sources.DEFAULT_WORKLOAD}."
)
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def _parse_bytes(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    digits = text.rstrip("BKMGTIbkmgti ")
    try:
        return int(float(digits) * _UNITS[text[len(digits) :].strip().upper()])
    except (KeyError, ValueError):
        raise click.BadParameter(f"{text!r} is not a size; write for example 8GiB") from None


def _num_ranks(replicas: str) -> int:
    try:
        return sum(read_replicas(replicas))
    except InputError:
        raise click.BadParameter(f"{replicas!r} are no replicas; write for example 2-1-1") from None


def _parse_policy(_: click.Context, __: click.Parameter, text: str | None) -> Policy | None:
    return None if text is None else sources.read_policy(text)


_versions_option = click.option(
    "--versions",
    callback=_parse_policy,
    help=f"Train without a flush, with this weight-version policy: {', '.join(POLICIES)}; fields "
    "follow the name, as in pipemare:t1=1000,t2=0.3.",
)


@click.command(epilog=_WORKLOAD_HELP)
@click.argument("workload", default=sources.DEFAULT_WORKLOAD)
@options.microbatches_option(8)
@click.option("--repeats", type=int, default=7, show_default=True, help="Measurements per time.")
@options.output_option("Where to write the profile (.json).")
@options.json_option
def profile(
    workload: str, microbatches: int, repeats: int, output: str | None, as_json: bool
) -> None:
    """Measure a model layer by layer."""
    graph = _profile(sources.load_workload(workload), microbatches, repeats)
    if output is not None:
        graph.save(output)
        show.say(f"wrote {output}")
    if as_json:
        show.print_json(graph)
    else:
        _print_graph(graph)


def _profile(workload: Workload, microbatches: int, repeats: int = 7) -> LayerGraph:
    with show.profiling() as progress:
        return workload.profile(microbatches, repeats=repeats, progress=progress)


def _print_graph(graph: LayerGraph) -> None:
    columns = ("layer", "kind", "F ms", "I ms", "W ms", "update ms", "kept MiB", "weights MiB")
    rows = [
        (
            layer.name,
            layer.kind,
            *(
                f"{seconds * 1e3:.3f}"
                for seconds in (
                    layer.forward_seconds,
                    layer.backward_input_seconds,
                    layer.backward_weight_seconds,
                    layer.update_seconds,
                )
            ),
            f"{layer.activation_bytes / 2**20:.2f}",
            f"{layer.parameter_bytes / 2**20:.2f}",
        )
        for layer in graph.layers
    ]
    show.print_table(columns, rows)


@click.command()
@click.argument("graph", type=click.Path())
@click.option("--cluster", type=click.Path(), help="Cluster file (.json); default: this machine.")
@options.ranks_option(None)
@options.microbatches_option(8)
@click.option("--schedule", help="Schedule family; default: the best of all.")
@_versions_option
@click.option("--replicas", help="Ranks of each stage, as in 2-1-1.")
@click.option("--memory", callback=_parse_bytes, help="Limit per rank, for example 8GiB.")
@options.output_option("Where to write the plan (.json).")
@options.json_option
def plan(
    graph: str,
    cluster: str | None,
    ranks: int | None,
    microbatches: int,
    schedule: str | None,
    versions: Policy | None,
    replicas: str | None,
    memory: int | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Find the best plan for a profile (GRAPH, as `penstock profile -o` writes it)."""
    num_devices = _num_ranks(replicas) if replicas else ranks
    found = find_plan(
        LayerGraph.load(graph),
        Cluster.load(cluster) if cluster else Cluster.local(num_devices),
        microbatches=microbatches,
        schedule=schedule,
        stages=None if replicas else ranks,
        memory_bytes=memory,
        versions=versions,
        replicas=replicas,
    )
    if output is not None:
        found.save(output)
        show.say(f"wrote {output}")
    if as_json:
        show.print_json(found)
    else:
        click.echo(str(found))


@click.command(epilog=_WORKLOAD_HELP)
@click.argument("workload", default=sources.DEFAULT_WORKLOAD)
@click.option("--plan", "plan_file", type=click.Path(), help="Plan file; default: make a plan.")
@options.ranks_option(None)
@options.microbatches_option(8)
@click.option("--schedule", help="Schedule family; default: the best of all.")
@_versions_option
@options.steps_option
@click.option("--compare/--no-compare", default=False, help="Train on one device beside it.")
@click.option("-o", "--output", default="penstock-report", show_default=True, help="Report folder.")
@click.option(
    "--timeline",
    type=click.Path(),
    help="Also write the measured step (.json), for draw, compare and simulate.",
)
@options.json_option
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
) -> None:
    """Train a workload through a pipeline and write a report."""
    loaded = sources.load_workload(workload)
    if plan_file is not None:
        chosen = Plan.load(plan_file)
    else:
        graph = _profile(loaded, microbatches)
        chosen = find_plan(
            graph,
            Cluster.local(ranks),
            microbatches=microbatches,
            schedule=schedule,
            stages=ranks,
            versions=versions,
        )
    trial = _train(loaded, chosen, steps, compare, output, as_json)
    if timeline is not None:
        write_atomically(timeline, trial.measured.to_json() + "\n")
        show.say(f"wrote {timeline}")


@click.command()
@options.steps_option
@click.option("-o", "--output", default="penstock-report", show_default=True, help="Report folder.")
@options.json_option
def demo(steps: int, output: str, as_json: bool) -> None:
    """Train a GPT on real text through a 2-stage pipeline, beside one device.

    Needs nothing but this machine: the text is the source code of Python's standard library.
    """
    from penstock.demo.workload import MICROBATCHES, workload

    loaded = workload()
    show.say(f"text: {loaded.notes}")
    graph = _profile(loaded, MICROBATCHES)
    if not as_json:
        _print_graph(graph)
        click.echo()
    chosen = find_plan(
        graph, Cluster.local(2), microbatches=MICROBATCHES, schedule="1f1b", stages=2
    )
    _train(loaded, chosen, steps, True, output, as_json)


def _train(
    workload: Workload, plan: Plan, steps: int, compare: bool, output: str, as_json: bool
) -> Trial:
    from penstock.trial import run_trial

    if not as_json:
        click.echo(f"{plan}\n")
    with show.training(steps, workload.unit, workload.num_units()) as progress:
        trial = run_trial(workload, plan, steps, compare=compare, progress=progress)
    page = write_report(trial.report(), output)
    if as_json:
        show.print_json(trial.numbers())
    else:
        click.echo(f"\n{draw_timeline(trial.measured)}\n")
        show.print_facts(trial.facts())
    show.say(f"report: {page}")
    return trial


@click.command()
@click.argument("folder", type=click.Path(), default="penstock-report")
@options.json_option
def report(folder: str, as_json: bool) -> None:
    """Write a run's report page again from its run.json."""
    found = read_report(folder)
    page = write_report(found, folder)
    if as_json:
        show.print_json({"page": str(page), "facts": found.facts})
    else:
        show.print_facts(found.facts)
        show.say(f"report: {page}")


MODEL_VERBS = (demo, profile, plan, train, report)
