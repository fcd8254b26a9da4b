"""The verbs that hand plans over to other engines, and take theirs: configs and traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.base.units import format_seconds, format_share
from penstock.cli import options, show, sources
from penstock.cli.input import InputFile, load_cluster, text_of, title_of
from penstock.cli.output import STANDARD_OUTPUT, OutputPlace, write
from penstock.core.graph import LayerGraph
from penstock.core.timing.timeline import Timeline
from penstock.planning import plans
from penstock.planning.handover.capabilities import CAPABILITIES, READ

if TYPE_CHECKING:
    from penstock.core.timing.analysis import RankShare


@click.command()
@click.argument("plan", type=InputFile("Plan"))
@click.option(
    "--to", "engine", required=True, type=click.Choice(list(CAPABILITIES)), help="Engine."
)
@click.option(
    "-o", "--output", type=OutputPlace(), help="Folder for its files; default: print the first."
)
@options.json_option
def export(plan: str, engine: str, output: str | None, as_json: bool) -> None:
    """Hand PLAN over to another engine: stages, degrees, microbatches, schedule, in its words.

    What the engine would train otherwise is refused; what only costs time or memory there is noted,
    with what it costs by the simulator.
    """
    handed = sources.load_plan(plan).to(engine)
    if output is not None:
        handed.save(output)
    if as_json:
        show.print_json({"engine": engine, "files": handed.files, "notes": handed.notes})
        return
    if output is None:
        show.echo(str(handed))
    else:
        show.say(f"wrote {', '.join(handed.files)} into {output}")
    for note in handed.notes:
        show.say(f"note: {note}")


@click.command("import")
@click.argument("config", type=InputFile("EngineConfig"))
@click.argument("graph", type=InputFile("LayerGraph"))
@click.argument("cluster", type=InputFile("Cluster"), required=False)
@click.option("--from", "engine", required=True, type=click.Choice(READ), help="Engine.")
@options.count_option("--stages", help="num_stages of DeepSpeed's PipelineModule.")
@options.output_option("Where to write the plan that CONFIG describes (.json).")
@options.json_option
def adopt(
    config: str,
    graph: str,
    cluster: str | None,
    engine: str,
    stages: int | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Predict what another engine's CONFIG does, beside a better plan for that engine.

    CONFIG is the file that has torchtitan's config function, Megatron's arguments, AutoModel's
    recipe or DeepSpeed's JSON; nothing of it is run. GRAPH is the model's profile, CLUSTER a file
    with all devices of the job, or their name in the catalogue (4xdgx-h100); by default as many
    cores as one copy of the pipeline needs.
    """
    from penstock.core.cluster import Cluster
    from penstock.planning.planner.adopting import improved

    if stages is not None and engine != "deepspeed":
        raise click.UsageError("--stages is for --from deepspeed, whose config does not say it")
    profile = LayerGraph.from_json(text_of(graph), where=title_of(graph))
    there = load_cluster(cluster) if cluster else None
    said: object = text_of(config)
    if stages is not None:
        said = {"num_stages": stages, "config": sources.json_object(config)}
    plan = plans.Plan.of(engine, said, profile, there)
    write(output, ".json", plan.save)
    better = improved(plan, engine, profile, there or Cluster.local(plan.num_seats))
    if as_json:
        show.print_json({"plan": plan, "better": better.after, "lines": better.lines})
    elif output != STANDARD_OUTPUT:
        show.echo(better.text(show.width()))
        for warning in plan.warnings:
            show.warn(warning)


@click.command()
@click.argument("traces", type=InputFile("ChromeTrace"), nargs=-1, required=True)
@click.option(
    "--plan", type=InputFile("Plan"), help="The plan that ran, to say what was predicted."
)
@click.option("--step", type=int, default=-1, show_default=True, help="Which, from 0, or the end.")
@options.output_option("Where to write the timeline (.json), for draw and compare.")
@options.json_option
def trace(
    traces: tuple[str, ...], plan: str | None, step: int, output: str | None, as_json: bool
) -> None:
    """Show what ranks did in a pipeline that anything ran: work, idle time, stragglers.

    TRACES are Chrome traces, one of each rank, as torch.profiler exports them.
    """
    from penstock.core.timing.analysis import idle_of, rank_shares

    measured = Timeline.from_traces(traces, step)
    predicted = sources.load_plan(plan).simulate() if plan else None
    shares, idle = rank_shares(measured, predicted), idle_of(measured)
    write(output, ".json", measured.save)
    if as_json:
        rows = [
            {**share._asdict(), "straggles": share.straggles, **parts._asdict()}
            for share, parts in zip(shares, idle, strict=True)
        ]
        show.print_json({"makespan": measured.makespan, "bubble": measured.bubble, "ranks": rows})
        return
    if output == STANDARD_OUTPUT:
        return
    show.echo(show.in_terminal(measured))
    if predicted is not None:
        show.echo(
            f"predicted: {format_seconds(predicted.makespan)} a step, bubble "
            f"{format_share(predicted.bubble)}; measured: {format_seconds(measured.makespan)}, "
            f"{format_share(measured.bubble)}"
        )
    rows_of_table = [
        [*_row(share), *map(format_seconds, parts)]
        for share, parts in zip(shares, idle, strict=True)
    ]
    columns = ["rank", "", "work", "predicted", "pace", "bubble", "waiting", "messages"]
    show.print_table(columns, rows_of_table, 2)


def _row(share: RankShare) -> list[str]:
    predicted = "" if share.predicted is None else format_seconds(share.predicted)
    remark = "straggles" if share.straggles else ""
    return [str(share.rank), remark, format_seconds(share.busy), predicted, f"{share.pace:.2f}×"]
