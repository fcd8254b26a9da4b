"""``penstock contest``: all methods on one workload, side by side; and ``penstock verify``: the
proof, in one command, on the user's own model and plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Literal

import click

from penstock.base.errors import InputError
from penstock.base.units import to_bytes_per_second
from penstock.cli import options, show, sources
from penstock.cli.input import DEFAULT_WORKLOAD, InputFile, load_workload, load_workload_of
from penstock.cli.output import STANDARD_OUTPUT, write
from penstock.core.cluster import Link
from penstock.drawing.contest import COLUMNS, ContestRecord, legend, summary, table_rows

if TYPE_CHECKING:
    from penstock.trial.contest import ContestStep

_DEFAULT_CONTEST = "penstock.demo:small_workload"
_QUICK_STEPS, _FULL_STEPS = 40, 200
_QUICK_SECONDS = 60.0
_LINE_SECONDS = 5.0
"""Without a terminal, a line of progress every so often."""

_EPILOG = (
    "MODEL is module:function, where the function returns a penstock.trial.Workload; by default a "
    f"small GPT, {_DEFAULT_CONTEST}; penstock.demo:workload is the demo's larger one. Example: "
    "penstock contest penstock.demo:small_workload -p 2 -m 8 -o contest.html. The exit status is "
    "1 if a method that should compute what one device computes does not, or if none ran."
)


@click.command(epilog=_EPILOG)
@click.argument("model", default=_DEFAULT_CONTEST)
@click.option(
    "-p", "--ranks", "--devices", type=click.IntRange(1, 64), default=2, show_default=True,
    help="Number of devices that a method may take.",
)  # fmt: skip
@options.microbatches_option(8)
@click.option(
    "--methods", metavar="NAMES",
    help="Only these, as in gpipe,1f1b,2bw, in upper or lower case; one device always takes part. "
    "Default: all.",
)  # fmt: skip
@click.option(
    "--quick/--full", default=True, show_default=True,
    help=f"{_QUICK_STEPS} minibatches each, and no new round after a minute; or {_FULL_STEPS}.",
)  # fmt: skip
@options.count_option("--steps", help="Minibatches that each method trains on, instead.")
@options.choice_option(
    "--on", "stage", among=["auto", "cores", "emulated"], default="auto",
    help="Ranks as threads and processes of this machine; or devices whose compute is a wait as "
    "long as the profile says, which may be more than there are cores.",
)  # fmt: skip
@click.option(
    "--link", "bandwidth", metavar="BANDWIDTH",
    help="Of the links between emulated devices, as in 100Mbit/s, which messages and sums of "
    "gradients then wait for. Default: as fast as memory.",
)  # fmt: skip
@click.option(
    "--target", type=float,
    help="A loss to be reached. Default: what one device has at the end of the turn in the middle.",
)  # fmt: skip
@options.output_option(
    "Page (.html), curves (.svg), table (.md) or all that was found (.json; so, too, with -)."
)
@options.json_option
@click.pass_context
def contest(
    context: click.Context,
    model: str,
    ranks: int,
    microbatches: int,
    methods: str | None,
    quick: bool,
    steps: int | None,
    stage: Literal["auto", "cores", "emulated"],
    bandwidth: str | None,
    target: float | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Train a model with every method, in turns, and compare them.

    Time per step, memory, bytes moved, bubble and delay, predicted and measured; the loss after
    equal updates, after equal time, and the time to a target.
    """
    from penstock.drawing.contest_page import check_output, write_contest

    if output not in (None, STANDARD_OUTPUT):
        check_output(output)
    link = None if bandwidth is None else _link(bandwidth)
    from penstock.trial.contest import run_contest

    with _contending() as progress:
        record = run_contest(
            partial(load_workload, model),
            methods=()
            if methods is None
            else [name.strip().lower() for name in methods.split(",")],
            num_devices=ranks,
            num_microbatches=microbatches,
            num_steps=steps or (_QUICK_STEPS if quick else _FULL_STEPS),
            seconds=_QUICK_SECONDS if quick and steps is None else inf,
            stage=None if stage == "auto" else stage,
            link=link,
            target=target,
            progress=progress,
        )
    if as_json:
        show.print_json(record)
    elif output != STANDARD_OUTPUT:
        _print(record)
    write(output, ".json", lambda path: write_contest(record, path))
    if record.unequal or not record.finished:
        context.exit(1)


def _link(bandwidth: str) -> Link:
    rate = to_bytes_per_second(bandwidth)
    if not rate:
        raise InputError(
            f"over links of {bandwidth} nothing would arrive; give --link a bandwidth > 0, or "
            "leave it out for links that do not count"
        )
    return Link(bytes_per_second=rate)


_SPEED_COLUMNS = 6
"""So many columns are about speed and memory, the others about learning: a table of each."""


def _print(record: ContestRecord) -> None:
    rows = list(zip(table_rows(record), record.entries, strict=True))
    ran = [row for row, entry in rows if entry.ran]
    show.print_table(COLUMNS[:_SPEED_COLUMNS], [row[:_SPEED_COLUMNS] for row in ran])
    show.echo()
    learning = (COLUMNS[0], *COLUMNS[_SPEED_COLUMNS:])
    show.print_table(learning, [(row[0], *row[_SPEED_COLUMNS:]) for row in ran])
    show.echo()
    for (title, reason, *_), entry in rows:
        if not entry.ran:
            show.prose(f"{title} {reason}")
    show.prose(f"{summary(record)}\n\n{legend(record)}")
    for note in record.notes:
        show.prose(note)


@contextmanager
def _contending() -> Iterator[Callable[[ContestStep], None]]:
    """A bar on a terminal; a line every few seconds elsewhere."""
    from rich.console import Console

    if Console(stderr=True).is_terminal:
        with show.counting("contest") as advance:
            yield lambda step: advance(step.done, step.total)
        return
    last = time.monotonic()

    def line(step: ContestStep) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_SECONDS:
            last = time.monotonic()
            show.say(f"contest: {step.done} of {step.total}, {step.doing}")

    yield line


_VERIFY_EPILOG = (
    "PLAN is a .json file, as `penstock plan -o` writes it, or -, standard input. WORKLOAD is "
    "module:function, where the function returns a penstock.trial.Workload; left out, the plan "
    "must be for the demo's, "
    f"{DEFAULT_WORKLOAD}. The exit status is 1 if anything is not equal."
)


@click.command(epilog=_VERIFY_EPILOG)
@click.argument("plan", type=InputFile("Plan"))
@click.argument("workload", default=DEFAULT_WORKLOAD)
@click.option(
    "--steps", type=click.IntRange(min=1), show_default="5, or what the steady state takes",
    help="Minibatches to train.",
)  # fmt: skip
@click.option(
    "--float64", is_flag=True,
    help="Train in float64 on both sides, so that where sums have another order, only the last "
    "digits may differ.",
)  # fmt: skip
@click.option(
    "--resume", is_flag=True,
    help="Train two minibatches first, save, and go on in a new pipeline that loads them.",
)  # fmt: skip
@options.choice_option(
    "--transport", among=["threads"], default="threads",
    help="All ranks run in this process.",
)  # fmt: skip
@options.json_option
@click.pass_context
def verify(
    context: click.Context,
    plan: str,
    workload: str,
    steps: int | None,
    float64: bool,
    resume: bool,
    transport: str,
    as_json: bool,
) -> None:
    """Prove that a plan trains a model as it should.

    A synchronous plan is trained beside one device; an asynchronous one beside a replay of its
    delays, one microbatch at a time, and what was recorded beside the formulas of its policy.
    """
    from penstock.trial import prove

    chosen = sources.load_plan(plan)
    loaded = load_workload_of(chosen, plan, workload)
    with show.counting("verifying") as progress:
        proof = prove(loaded, chosen, steps, progress, float64=float64, resume=resume)
    if as_json:
        show.print_json(proof.numbers())
    else:
        show.echo(proof.text())
    if not proof.equal:
        context.exit(1)
