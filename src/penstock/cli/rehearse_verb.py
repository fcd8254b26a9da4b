"""``penstock rehearse``: perform a plan with real processes and messages before renting devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from penstock import drawing
from penstock.base.errors import InputError
from penstock.base.units import format_share, picture_seconds
from penstock.cli import options, show, sources
from penstock.cli.options import Source
from penstock.cli.output import STANDARD_OUTPUT, write
from penstock.core.schedule import Kind, Schedule, families
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator import simulate
from penstock.core.versions import USUAL
from penstock.planning import plans
from penstock.training import rehearsal
from penstock.training.rehearsal import RehearsalTransport, UpdateMode

if TYPE_CHECKING:
    from penstock.drawing import Fact
    from penstock.planning.plans import Plan
    from penstock.training.rehearsal import FigureComparison, Rehearsal

_SOURCE_HELP = (
    "SOURCE is a .json plan, a schedule's name, a .csv of ops, or -, standard input. A plan "
    "has its own times; for the others, --costs gives them in units of --op-ms milliseconds."
)
_QUIET_SECONDS = 2.0


@click.command(epilog=_SOURCE_HELP)
@click.argument("source", type=Source())
@options.ranks_option(4)
@options.microbatches_option(8)
@options.costs_option
@options.amount_option(
    "--op-ms", default=10.0,
    help="Milliseconds of a cost of 1.",
)  # fmt: skip
@options.amount_option(
    "--scale", default=1.0,
    help="Multiplies all times: 0.1 rehearses a slow plan in a tenth of its time.",
)  # fmt: skip
@options.count_option(
    "--steps", default=5,
    help="Minibatches; the first is warm-up.",
)  # fmt: skip
@options.count_option(
    "--message-kib", default=64,
    help="Size of a message between stages.",
)  # fmt: skip
@options.choice_option(
    "--transport", among=get_args(RehearsalTransport), default="shared-memory",
    help="Between processes, or between threads of one process.",
)  # fmt: skip
@options.choice_option(
    "--updates", among=get_args(UpdateMode), default="separate",
    help="Each stage for itself; when all ranks agree (clipping); or on trust, steps overlapping.",
)  # fmt: skip
@options.output_option(
    "Picture to write (.svg, .pdf, .png, .html, .txt), or all that was found (.json)."
)
@options.json_option
def rehearse(
    source: str,
    ranks: int,
    microbatches: int,
    costs: Costs,
    op_ms: float,
    scale: float,
    steps: int,
    message_kib: int,
    transport: RehearsalTransport,
    updates: UpdateMode,
    output: str | None,
    as_json: bool,
) -> None:
    """Perform a plan on emulated devices: real processes and messages, compute that only waits.

    Eight or sixteen ranks run on two cores. Prints what was measured beside what was predicted.
    """
    from penstock.training.rehearsal.conduct import MOST_RANKS

    if output is not None:
        _check_suffix(output)
    if ranks > MOST_RANKS:  # before a schedule of that size is built
        many = f"{ranks} ranks are too many"
        raise InputError(f"{many}: each is a process here, {MOST_RANKS} at most")
    plan, op_costs = _plan(source, ranks, microbatches, costs, op_ms / 1e3)
    expected_seconds = steps * scale * _step_seconds(plan, op_costs)
    with show.counting("rehearsing", quietly=expected_seconds < _QUIET_SECONDS) as progress:
        performed = rehearsal.rehearse(
            plan,
            op_costs,
            steps=steps,
            scale=scale,
            message_bytes=message_kib * 1024,
            transport=transport,
            updates=updates,
            minibatch=_minibatch(source),
            progress=progress,
        )
    if as_json:
        show.print_json(_numbers(performed))
    elif output != STANDARD_OUTPUT:
        _print(performed)
    write(output, ".svg", lambda path: _write(performed, path))


def _plan(
    source: str, ranks: int, microbatches: int, costs: Costs, unit_seconds: float
) -> tuple[Plan | Schedule, Costs | None]:
    """The plan or schedule to perform, and the seconds of its ops if it does not have its own."""
    content = sources.read(source)
    schedule: Schedule | None
    if sources.is_plan(content):
        return content, None
    if isinstance(content, Schedule):
        schedule = content
    elif content is not None:
        raise InputError(f"{source} is a timeline, which has happened already; give a plan or ops")
    else:
        schedule = sources.load(source, ranks, microbatches, costs).schedule
    assert schedule is not None  # a name always means one
    per_rank = schedule.num_stages / schedule.num_ranks
    return schedule, costs.spread(per_rank).scaled(unit_seconds)


def _minibatch(source: str) -> int | None:
    """Microbatches per update, if the source says it, as ``pipedream-2bw:minibatch=8`` does."""
    if source.partition(":")[0] not in USUAL:
        return None
    minibatch: int | None = families.named(source)[1].get("minibatch")
    return minibatch


def _step_seconds(plan: Plan | Schedule, costs: Costs | None) -> float:
    timeline = plan.simulate() if isinstance(plan, plans.Plan) else simulate(plan, costs)
    return timeline.makespan


def _check_suffix(output: str) -> None:
    """Before the rehearsal, which may take long."""
    if output == STANDARD_OUTPUT or Path(output).suffix.lower() in (".html", ".txt", ".json"):
        return
    if Path(output).suffix.lower() not in (".svg", ".pdf", ".png"):
        raise InputError(
            f"cannot write {output!r}: end the name in .svg, .pdf, .png, .html, .txt or .json"
        )
    options.check_figure(output)


def _write(performed: Rehearsal, output: str) -> None:
    if Path(output).suffix.lower() != ".json":
        titled = [("Predicted", performed.predicted), ("Measured", performed.measured)]
        drawing.draw_stacked(titled, output)
        return
    report = drawing.Report(
        title=f"Rehearsal of {performed.measured.name or 'a schedule'}",
        facts=_facts(performed),
        predicted=drawing.TimelineRecord.of(performed.predicted),
        measured=drawing.TimelineRecord.of(performed.measured),
    )
    report.save(output)


def _print(performed: Rehearsal) -> None:
    rows = [
        (each.name, *_shown(each), f"{100 * each.difference:+.1f} {_unit(each)}")
        for each in performed.comparisons
    ]
    name = performed.measured.name or "schedule"
    show.print_table((name, "predicted", "measured", "difference"), rows)
    facts = (f"{fact.label}: {fact.value}" for fact in _circumstances(performed))
    show.echo("\n" + "\n".join(facts))


def _unit(comparison: FigureComparison) -> str:
    return "points" if comparison.is_share else "%"


def _shown(comparison: FigureComparison) -> tuple[str, str]:
    if comparison.is_share:
        return format_share(comparison.predicted), format_share(comparison.measured)
    return picture_seconds(comparison.predicted), picture_seconds(comparison.measured)


def _circumstances(performed: Rehearsal) -> list[Fact]:
    """How the figures came about."""
    shortest, longest = (picture_seconds(find(performed.step_seconds)) for find in (min, max))
    num_steps = len(performed.step_seconds)
    facts = [
        drawing.Fact(label="steps", value=f"median of {num_steps}, {shortest} to {longest}"),
        drawing.Fact(
            label="a message takes",
            value=f"{picture_seconds(performed.hop_seconds)} more than planned, "
            "which the prediction includes",
        ),
    ]
    if any(op.kind is Kind.AGREE for op in performed.measured.rows[0].ops):
        value = f"{picture_seconds(performed.pace_seconds)} a step, one after the other"
        facts.append(drawing.Fact(label="pace", value=value))
    if performed.num_held_up:
        value = f"{performed.num_held_up} took 1 ms longer than they should: this machine was busy"
        facts.append(drawing.Fact(label="ops held up", value=value))
    return facts


def _facts(performed: Rehearsal) -> tuple[Fact, ...]:
    compared = (
        drawing.Fact(label=each.name, value=_shown(each)[1], note=f"{_shown(each)[0]} predicted")
        for each in performed.comparisons
    )
    return (*compared, *_circumstances(performed))


def _numbers(performed: Rehearsal) -> dict[str, object]:
    """For ``--json``: times in seconds, bubbles as shares of 1."""
    return {
        "name": performed.measured.name,
        "num_ranks": performed.measured.num_ranks,
        **{
            comparison.name.replace(" ", "_"): {
                "predicted": comparison.predicted,
                "measured": comparison.measured,
                "difference": comparison.difference,
            }
            for comparison in performed.comparisons
        },
        "pace_seconds": performed.pace_seconds,
        "hop_seconds": performed.hop_seconds,
        "step_seconds": performed.step_seconds,
    }
