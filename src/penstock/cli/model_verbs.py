"""Verbs that measure and train a model, and the report of what was trained."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from penstock import drawing
from penstock.base.values import write_atomically
from penstock.cli import options, show
from penstock.cli.input import DEFAULT_WORKLOAD, InputFile, load_workload, load_workload_of
from penstock.cli.options import ScheduleName
from penstock.cli.output import STANDARD_OUTPUT, OutputFile, write
from penstock.core.cluster import Cluster
from penstock.planning import planner

if TYPE_CHECKING:
    from penstock.core.graph import Layer, LayerGraph
    from penstock.core.versions import Policy
    from penstock.planning.plans import Plan
    from penstock.trial import Trial, Workload


WORKLOAD_HELP = (
    "WORKLOAD is module:function, where the function returns a penstock.trial.Workload; by default "
    f"the demo's, {DEFAULT_WORKLOAD}."
)
_COLUMNS = (
    "layer", "kind", "F ms", "I ms", "W ms", "split ms", "R ms", "±", "update ms", "kept MiB",
    "weights MiB", "flags",
)  # fmt: skip
_DETAILS = frozenset({"split ms", "R ms", "±", "update ms"})
"""Columns that are shown on request."""

_LEGEND = (
    "F forward, I and W the halves of a backward (gradients of inputs, of weights); kept: for the "
    "backward."
)
_LEGEND_OF_DETAILS = (
    "split: what halving a backward adds; R: a second forward; ±: half the distance between the "
    "quartiles of F + I + W."
)


def parse_sizes(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Numbers of rows, as an option gives them."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise click.BadParameter(f"{text!r} are no sizes; write for example 2,4,8") from None


@click.command(epilog=WORKLOAD_HELP)
@click.argument("workload", default=DEFAULT_WORKLOAD)
@options.microbatches_option(8)
@options.count_option(
    "--repeats",
    default=7,
    help="Measurements per time.",
)
@click.option("--sizes", callback=parse_sizes, help="Other microbatch sizes, in rows, as 2,4,8.")
@options.count_option(
    "--ranks", least=0,
    help="Of the pipelines that are run to see what sharing a machine costs; 0 for none. Default: "
    "as many as there are cores, at most 8.",
)  # fmt: skip
@options.amount_option(
    "--patience", metavar="SECONDS",
    help="How long to go on measuring what sharing a machine costs, until it is steady. Default: "
    "six times as long as the layers alone took, 2 to 20 s.",
)  # fmt: skip
@options.output_option("Where to write the profile (.json).")
@options.json_option
@options.verbose_option(
    "what splitting, recomputing and updating take, how steady it is, and on what."
)
def profile(
    workload: str,
    microbatches: int,
    repeats: int,
    sizes: tuple[int, ...],
    ranks: int | None,
    patience: float | None,
    output: str | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Measure a model layer by layer."""
    loaded = load_workload(workload)
    with show.profiling() as progress:
        graph = loaded.profile(
            microbatches,
            repeats=repeats,
            sizes=sizes,
            ranks=ranks,
            patience_seconds=patience,
            progress=progress,
        )
    write(output, ".json", graph.save)
    doubts = _doubts(graph, microbatches)
    if as_json:
        for doubt in (*graph.warnings, *doubts):
            show.warn(doubt, err=True)
        show.print_json(graph)
    elif output != STANDARD_OUTPUT:
        print_graph(graph, doubts, verbose=verbose)


def _doubts(graph: LayerGraph, microbatches: int) -> list[str]:
    """The questions for which the figures are not sure enough: whether ranks of this machine pay,
    and where to cut."""
    num_ranks = graph.contention.num_ranks
    if num_ranks < 2:
        return []
    plan = planner.plan(graph, Cluster.local(num_ranks), microbatches=microbatches)
    return [
        f"of the best plan for {num_ranks} ranks here, {doubt}"
        for doubt in plan.warnings
        if doubt not in graph.warnings
    ]


def profiled(workload: Workload, microbatches: int) -> LayerGraph:
    """The profile of a workload, with a bar meanwhile."""
    with show.profiling() as progress:
        graph = workload.profile(microbatches, progress=progress)
    for warning in graph.warnings:
        show.warn(warning, err=True)
    return graph


def print_graph(graph: LayerGraph, doubts: Sequence[str] = (), *, verbose: bool = False) -> None:
    """A profile as a table: a line per layer, their sum, what is odd, and where it was measured.

    Args:
        doubts: what the figures are not sure enough for.
        verbose: whether to show all that was measured, and how.
    """
    chosen = [index for index, column in enumerate(_COLUMNS) if verbose or column not in _DETAILS]
    rows = [*map(_row, graph.layers), _sums(graph.layers)]
    names = [_COLUMNS[index] for index in chosen]
    show.print_table(names, [[row[index] for index in chosen] for row in rows], 2)
    show.prose(f"\n{_LEGEND}")
    if verbose:
        show.prose(_LEGEND_OF_DETAILS)
    for warning in (*graph.warnings, *doubts):
        show.warn(warning)
    for warning, layers in _warnings(graph.layers).items():
        show.warn(f"{warning}: {', '.join(layers)}")
    where, contention, *more = _conditions(graph)
    for line in (where, contention, *(more if verbose else ())):
        show.prose(line)


def _row(layer: Layer) -> tuple[str, ...]:
    return (
        layer.name,
        layer.kind,
        *_cells([layer]),
        f"{layer.spread:.0%}",
        *_amounts([layer]),
        "!" * len(layer.warnings),
    )


def _sums(layers: Sequence[Layer]) -> tuple[str, ...]:
    return ("all", "", *_cells(layers), "", *_amounts(layers), "")


def _cells(layers: Sequence[Layer]) -> list[str]:
    columns = zip(
        *(
            (
                layer.forward_seconds,
                layer.backward_input_seconds,
                layer.backward_weight_seconds,
                layer.split_forward_seconds + layer.split_seconds,
                layer.forward_seconds
                if layer.recompute_seconds is None
                else layer.recompute_seconds,
            )
            for layer in layers
        ),
        strict=True,
    )
    return [f"{sum(column) * 1e3:.3f}" for column in columns]


def _amounts(layers: Sequence[Layer]) -> list[str]:
    return [
        f"{sum(layer.update_seconds for layer in layers) * 1e3:.3f}",
        f"{sum(layer.activation_bytes for layer in layers) / 2**20:.2f}",
        f"{sum(layer.parameter_bytes for layer in layers) / 2**20:.2f}",
    ]


def _warnings(layers: Sequence[Layer]) -> dict[str, list[str]]:
    layers_by_warning: dict[str, list[str]] = {}
    for layer in layers:
        for warning in layer.warnings:
            layers_by_warning.setdefault(warning, []).append(layer.name)
    return layers_by_warning


def _conditions(graph: LayerGraph) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in graph.software.items())
    lines = [
        f"{graph.microbatch_size} rows, {graph.dtype or 'no parameters'}, {graph.device}, "
        f"{graph.num_threads} thread{'' if graph.num_threads == 1 else 's'}; {versions}",
        str(graph.contention if graph.estimate is None else graph.estimate),
        f"an op takes {graph.op_seconds * 1e6:.0f} µs beside its layers, a message "
        f"{graph.hop_seconds * 1e6:.0f} µs",
    ]
    for other in graph.other_sizes:
        seconds = sum(layer.compute_seconds for layer in other.layers)
        lines.append(
            f"with {other.microbatch_size} rows: F + B {seconds * 1e3:.3f} ms, "
            f"{seconds / other.microbatch_size * 1e3:.3f} ms per row"
        )
    return lines


@click.command(epilog=WORKLOAD_HELP)
@click.argument("workload", default=DEFAULT_WORKLOAD)
@click.option(
    "--plan", "plan_file", type=InputFile("Plan"),
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
    trial = _train(loaded, chosen, steps, compare, output, _Printing(as_json, verbose))
    if timeline is not None:
        text = trial.measured.to_json() + "\n"
        write(timeline, ".json", lambda path: write_atomically(path, text))


@click.command()
@options.steps_option
@options.folder_option
@options.json_option
@options.verbose_option("all that was measured and planned.")
def demo(steps: int, output: str, as_json: bool, verbose: bool) -> None:
    """Train a GPT on real text through a 2-stage pipeline, beside one device.

    Needs nothing but this machine: the text is the source code of Python's standard library.
    """
    from penstock.demo.corpus import MICROBATCHES, workload

    loaded = workload()
    show.say(f"text: {loaded.notes}")
    graph = profiled(loaded, MICROBATCHES)
    if not as_json:
        print_graph(graph, verbose=verbose)
        show.echo()
    chosen = planner.plan(
        graph, Cluster.local(2), microbatches=MICROBATCHES, schedule="1f1b", stages=2
    )
    _train(loaded, chosen, steps, True, output, _Printing(as_json, verbose))


class _Printing(NamedTuple):
    """How results are printed: for programs, or with all details."""

    as_json: bool
    verbose: bool


def _train(
    workload: Workload, plan: Plan, steps: int, compare: bool, output: str, shown: _Printing
) -> Trial:
    from penstock.trial import run_trial

    if not shown.as_json:
        show.echo(plan.text(show.width(), details=shown.verbose) + "\n")
    with show.training(steps, workload.unit, workload.num_units()) as progress:
        trial = run_trial(workload, plan, steps, compare=compare, progress=progress)
    page = drawing.write_report(trial.report(shlex.join(["penstock", *sys.argv[1:]])), output)
    if shown.as_json:
        show.print_json(trial.numbers())
    else:
        show.echo(f"\n{show.in_terminal(trial.measured)}\n")
        show.print_facts(trial.facts())
    show.say(f"report: {page}")
    return trial


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
