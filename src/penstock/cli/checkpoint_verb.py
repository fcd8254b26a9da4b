"""``penstock checkpoint``: what a run has saved, and that for other programs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.base.errors import FileError, InputError
from penstock.base.units import count_of, format_bytes
from penstock.cli import options, show, sources
from penstock.cli.input import InputFile
from penstock.cli.output import OutputFile, OutputPlace, write

if TYPE_CHECKING:
    from penstock.drawing.runs import CheckpointReader
    from penstock.planning.plans import Plan
    from penstock.training.checkpoint.folder import Checkpoint


@click.group()
def checkpoint() -> None:
    """Show what a run has saved, or export it."""


@checkpoint.command("show")
@click.argument("folder", type=click.Path())
@options.json_option
def show_checkpoints(folder: str, as_json: bool) -> None:
    """Show the checkpoints in FOLDER: a run's, or one of them (runs/a/step-00000100)."""
    from penstock.training.checkpoint.folder import Checkpoint, is_folder_name, seen_in

    path = Path(folder)
    is_one = is_folder_name(path.name)
    folders = [path] if is_one else [seen.folder for seen in seen_in(path)]
    if not folders or not path.is_dir():
        raise FileError(f"{folder} has no checkpoints; give the folder that save() was given")
    opened: list[tuple[Path, Checkpoint | FileError]] = []
    for place in folders:
        try:
            opened.append((place, Checkpoint.opened(place)))
        except FileError as error:
            opened.append((place, error))
    if as_json:
        show.print_json([_as_json(*pair) for pair in opened])
        return
    rows = [_row(*pair) for pair in opened]
    show.print_table(("checkpoint", "state", "saved", "plan", "step", "size"), rows, num_texts=4)
    if len(opened) == 1 and not isinstance(opened[0][1], FileError):
        show.echo()
        show.print_table(
            ("file", "layers", "optimizer", "tensors", "size"), _pieces(opened[0][1]), 3
        )


def _row(path: Path, saved: Checkpoint | FileError) -> Sequence[str]:
    if isinstance(saved, FileError):
        reason = str(saved).removeprefix(f"{path} is not complete: ")
        return (path.name, "not complete", _when(path), reason, "", "")
    plan = saved.plan
    return (
        path.name,
        "complete",
        _when(path),
        f"{plan.schedule}, {count_of(len(plan.stages), 'stage')} on "
        f"{count_of(plan.num_ranks, 'rank')}",
        str(saved.step),
        format_bytes(saved.num_bytes),
    )


def _when(path: Path) -> str:
    moment = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).astimezone()
    return f"{moment:%Y-%m-%d %H:%M}"


def _pieces(saved: Checkpoint) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for piece in saved.pieces:
        head = piece.header
        layers = saved.plan.stages[head.stage].layers
        names = layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]}"
        kind = "none" if head.optimizing is None else head.optimizing.kind
        rows.append(
            (piece.path.name, names, kind, str(len(head.tensors)), format_bytes(piece.num_bytes))
        )
    return rows


def _as_json(path: Path, saved: Checkpoint | FileError) -> dict[str, object]:
    if isinstance(saved, FileError):
        return {"folder": str(path), "complete": False, "problem": str(saved)}
    identity = saved.identity
    return {
        "folder": str(path),
        "complete": True,
        "step": saved.step,
        "position": identity.position,
        "run": identity.run,
        "schedule": saved.plan.schedule,
        "stages": len(saved.plan.stages),
        "ranks": saved.plan.num_ranks,
        "bytes": saved.num_bytes,
        "files": [piece.path.name for piece in saved.pieces],
    }


@checkpoint.command("draw")
@click.argument("folder", type=click.Path())
@click.argument("plans", type=InputFile("Plan"), nargs=-1, required=True)
@click.option(
    "-o", "--output", required=True, type=OutputFile(),
    help="Figure to write (.svg, .pdf, .png).  -: standard output.",
)  # fmt: skip
def draw(folder: str, plans: tuple[str, ...], output: str) -> None:
    """Draw which files of the latest complete checkpoint in FOLDER the stages of PLANS read."""
    from penstock.drawing.formats import write_figure
    from penstock.drawing.runs import CheckpointBlock, readings
    from penstock.training.checkpoint.piece import piece_name

    options.check_figure(output)
    latest = _latest(folder)
    writer = _reader(latest.plan, "written by")
    files = [
        CheckpointBlock(piece_name(number), block.first, block.stop)
        for number, block in enumerate(writer.stages)
    ]
    others = [_fitting(latest.plan, path, sources.load_plan(path)) for path in plans]
    picture = readings(writer, files, [_reader(plan, "read by") for plan in others])
    write(output, ".svg", lambda path: write_figure(path, picture))


def _reader(plan: Plan, role: str) -> CheckpointReader:
    from penstock.drawing.runs import CheckpointBlock, CheckpointReader

    borders = accumulate((len(stage.layers) for stage in plan.stages), initial=0)
    stages = [
        CheckpointBlock(f"stage {number}", first, stop)
        for number, (first, stop) in enumerate(pairwise(borders))
    ]
    return CheckpointReader(f"{role} {plan.schedule}, {count_of(plan.num_ranks, 'rank')}", stages)


def _fitting(plan: Plan, path: str, other: Plan) -> Plan:
    if plan.layers != other.layers:
        raise InputError(f"{path} is for another model: its layers are not the checkpoint's")
    return other


def _latest(folder: str) -> Checkpoint:
    from penstock.training.checkpoint.folder import checkpoint_in

    latest = checkpoint_in(Path(folder))
    if latest is None:
        raise InputError(f"{folder} has no complete checkpoint; see penstock checkpoint show")
    return latest


@checkpoint.command("export")
@click.argument("folder", type=click.Path())
@options.choice_option(
    "--to", "form", among=("safetensors", "dcp"), default="safetensors",
    help="One file with the weights, or a folder of torch.distributed.checkpoint with all.",
)  # fmt: skip
@click.option("-o", "--output", required=True, type=OutputPlace(), help="What to write.")
def export(folder: str, form: str, output: str) -> None:
    """Write the latest complete checkpoint in FOLDER for other programs.

    The weights alone, as one safetensors file for `model.load_state_dict(load_file(…))`; or, with
    `--to dcp`, weights and optimizer state for `torch.distributed.checkpoint`, as torchtitan and
    others read it.
    """
    from penstock.training.checkpoint.export import export_dcp, export_weights

    latest = _latest(folder)
    if Path(output).exists():
        raise InputError(f"{output} is there already; give another name")
    (export_dcp if form == "dcp" else export_weights)(latest, Path(output))
    show.say(f"wrote {output}: step {latest.step}")
