"""The verbs that hand plans over to other engines, and take theirs."""

from __future__ import annotations

import click

from penstock.cli import options, show, sources
from penstock.cli.input import InputFile
from penstock.cli.output import OutputPlace
from penstock.planning.handover.capabilities import CAPABILITIES


@click.command()
@click.argument("plan", type=InputFile())
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
