"""``penstock fleet``: many models at once on fewer devices, predicted or trained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.base.errors import InputError
from penstock.base.units import format_seconds, format_share
from penstock.base.values import MOST_TOML_BYTES
from penstock.cli import options, show, sources
from penstock.cli.input import (
    STANDARD_INPUT,
    InputFile,
    load_workload,
    refuse_useless,
    text_of,
    title_of,
)
from penstock.cli.output import STANDARD_OUTPUT, write
from penstock.planning.turns.visits import (
    POLICIES,
    Bound,
    PolicyName,
    check_fleet_plan,
    visits_of,
)

if TYPE_CHECKING:
    from penstock.core.timing.fleet_timeline import FleetTimeline
    from penstock.planning.plans import Plan
    from penstock.planning.turns.simulator import TimedJob
    from penstock.planning.turns.stop import Stop
    from penstock.planning.turns.written import FleetFile, JobTable
    from penstock.training.fleet import FleetResults, Job


@click.command()
@click.argument("file", type=InputFile("FleetFile"))
@click.option("--simulate", "simulates", is_flag=True, help="Predict it; nothing is trained.")
@options.count_option("--devices", help="Instead of those in the file.")
@click.option(
    "--policy",
    type=click.Choice(POLICIES, case_sensitive=False),
    help="Instead of that in the file.",
)
@click.option("--folder", type=click.Path(), help="Where jobs save as they go, and go on from.")
@options.count_option(
    "--every", default=100,
    help="Minibatches of a job between two checkpoints in the folder.",
)  # fmt: skip
@options.output_option("Where to draw which job had which device when (.svg, .pdf, .png, .txt).")
@options.json_option
def fleet(
    file: str,
    simulates: bool,
    devices: int | None,
    policy: PolicyName | None,
    folder: str | None,
    every: int,
    output: str | None,
    as_json: bool,
) -> None:
    """Train many models at once on fewer devices, none idle while a model could use it.

    FILE (.toml; -: standard input) has a table for each job: its plan, or the profile of which one
    is made, and the workload that makes model and data. With --simulate, what that takes, beside
    other policies and what no order could undercut; it needs no workloads.
    """
    from penstock.planning.turns.written import FleetFile

    if simulates:
        why = "with --simulate nothing is trained, so nothing is saved"
        refuse_useless(["folder", "every"], why)
    elif folder is None:
        refuse_useless(["every"], "without --folder nothing is saved")
    # Files that it names stand beside it, or are found from here.
    folder_of = Path() if file == STANDARD_INPUT else Path(file).parent
    text, title = text_of(file, MOST_TOML_BYTES), title_of(file)
    fleet_file = FleetFile.from_toml(text, folder_of, title)
    num_devices = fleet_file.devices if devices is None else devices
    chosen = fleet_file.policy if policy is None else policy
    plans = {}
    for name, table in fleet_file.jobs.items():
        with _blaming(title, name):
            plans[name] = _planned(table)
            check_fleet_plan(plans[name])
    if simulates:
        _simulate(fleet_file, plans, num_devices, chosen, output, as_json)
        return
    _train(fleet_file, plans, num_devices, chosen, folder, every, output, as_json)


@contextmanager
def _blaming(file: str, name: str) -> Iterator[None]:
    """Within, errors begin with the file and the job of which it speaks."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{file}: job {name}: {error}") from None


def _planned(table: JobTable) -> Plan:
    """The plan of a job, made now if the file has none."""
    if table.plan is not None:
        plan = sources.load_plan(table.plan)
    else:
        from penstock.core.cluster import Cluster, Tier
        from penstock.core.cluster.local import measured_tier
        from penstock.core.graph import LayerGraph
        from penstock.planning import planner

        tiers = []
        if table.tier is not None:
            host = table.tier == "host"
            tiers = [measured_tier(Tier(kind="host") if host else Tier(folder=table.tier))]
        plan = planner.plan(
            LayerGraph.load(str(table.graph)),
            Cluster.local(1, tiers=tiers),
            microbatches=table.microbatches,
            memory_bytes=table.memory,
        )
    return plan


def _simulate(
    file: FleetFile,
    plans: dict[str, Plan],
    num_devices: int,
    policy: PolicyName,
    output: str | None,
    as_json: bool,
) -> None:
    from penstock.planning.turns.simulator import bound_of, simulate_fleet

    stop = file.stop()
    tasks = [_task(name, plan, file.jobs[name], stop, len(plans)) for name, plan in plans.items()]
    timelines = {
        name: simulate_fleet(tasks, num_devices, name, stop)
        for name in (policy, *(other for other in POLICIES if other != policy))
    }
    timeline, least = timelines[policy], bound_of(tasks, num_devices)
    if output is not None:
        _draw(timeline, output)
        if output == STANDARD_OUTPUT:
            return
    if as_json:
        show.print_json(_as_numbers(timeline, least, timelines))
        return
    _print_jobs(tasks, timeline)
    show.echo()
    show.print_table(
        ("policy", "takes", "÷ bound", "idle"),
        [
            (
                name,
                format_seconds(other.makespan),
                f"{other.makespan / other.bound_seconds:.3f}" if other.bound_seconds else "–",
                format_share(other.idle),
            )
            for name, other in timelines.items()
        ],
    )
    show.prose(f"\nbound: {format_seconds(timeline.bound_seconds)}, {least.reason}")
    if file.halving is not None:
        show.echo("of a halving, those are taken to go on that take longest")
    from penstock.drawing.fleets import fleet_text

    show.echo("\n" + fleet_text(timeline, show.width()))


def _task(name: str, plan: Plan, table: JobTable, stop: Stop, num_jobs: int) -> TimedJob:
    from penstock.planning.turns.simulator import TimedJob

    targets = stop.targets(num_jobs, table.steps)
    if not targets:
        raise InputError(
            f"job {name}: nobody knows how many minibatches an epoch has before it is trained; "
            "give steps to simulate it"
        )
    tier = "" if plan.spill is None else str(plan.spill.tier)
    return TimedJob(name, visits_of(plan), targets[-1], tier)


def _print_jobs(tasks: list[TimedJob], timeline: FleetTimeline) -> None:
    show.print_table(
        ("job", "steps", "visits per step", "step", "on devices", "ends after"),
        [
            (
                task.name,
                str(task.steps),
                str(len(task.visits)),
                format_seconds(task.step_seconds),
                format_seconds(timeline.job_seconds[task.name]),
                format_seconds(timeline.job_ends[task.name]),
            )
            for task in tasks
        ],
    )


def _as_numbers(
    timeline: FleetTimeline, least: Bound, timelines: dict[PolicyName, FleetTimeline]
) -> dict[str, Any]:
    return {
        "makespan": timeline.makespan,
        "bound": timeline.bound_seconds,
        "bound_by": least.reason,
        "idle": timeline.idle,
        "policies": {name: other.makespan for name, other in timelines.items()},
        "jobs": {
            name: {"device_seconds": timeline.job_seconds[name], "ends": timeline.job_ends[name]}
            for name in timeline.jobs
        },
    }


def _train(
    file: FleetFile,
    plans: dict[str, Plan],
    num_devices: int,
    policy: PolicyName,
    folder: str | None,
    every: int,
    output: str | None,
    as_json: bool,
) -> None:
    from penstock.training.fleet import Fleet

    jobs = {name: _job(name, plan, file.jobs[name]) for name, plan in plans.items()}
    with Fleet(jobs, num_devices, policy=policy) as running:
        try:
            results = running.run(file.stop(), folder=folder, every=every, show=True)
        except KeyboardInterrupt:
            kept = "nothing was saved; with --folder DIR, jobs save as they go"
            if folder is not None:
                kept = f"the same command goes on from what jobs have saved in {folder}"
            show.say(f"interrupted; {kept} (every {every} minibatches, see --every)")
            raise
    if output is not None:
        _draw(results.timeline, output)
    if as_json:
        show.print_json(_outcomes(results))
    elif output != STANDARD_OUTPUT:
        _print_results(results)
    if all(result.error is not None for result in results.values()):
        sys.exit(1)


def _print_results(results: FleetResults) -> None:
    from penstock.training.fleet.results import COLUMNS

    rows = results.rows()
    show.print_table(COLUMNS[:-1], [row[:-1] for row in rows], 2)
    for row in rows:
        if row[-1]:
            show.warn(f"{row[0]}: {row[-1]}")
    show.prose(results.summary())


def _job(name: str, plan: Plan, table: JobTable) -> Job:
    from penstock.training.fleet import Job

    if table.workload is None:
        raise InputError(
            f"job {name} has no workload; give module:function, or predict the fleet with "
            "--simulate"
        )
    workload = load_workload(table.workload)
    return Job(
        workload.build_model,
        plan,
        lambda epoch: workload.batches(),
        loss=workload.loss,
        optimizer=workload.optimizer,
        steps=table.steps,
        seed=table.seed,
    )


def _outcomes(results: FleetResults) -> dict[str, Any]:
    numbers = _as_numbers(results.timeline, results.bound, {})
    del numbers["policies"]
    for name, result in results.items():
        numbers["jobs"][name] |= {
            "status": result.status,
            "steps": result.steps,
            "losses": list(result.losses),
            "error": None if result.error is None else str(result.error),
        }
    return numbers


def _draw(timeline: FleetTimeline, output: str) -> None:
    from penstock.drawing import draw

    write(output, ".svg", lambda path: draw(timeline, path))
