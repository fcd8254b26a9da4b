"""``penstock run``: a script on several ranks of this host, which start again when one dies."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from penstock.base.errors import InputError
from penstock.cli import options, show
from penstock.cli.output import OutputFile, write

if TYPE_CHECKING:
    from penstock.training.supervisor import AttemptRecord

_WORDS_HELP = (
    "Options stand before SCRIPT or directly behind it; from the first word that is none of these, "
    "everything is the script's, and everything behind -- is in any case."
)


class _Command(click.Command):
    """One whose options may also stand directly behind the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the options before everything that is the script's."""
        before, rest = self._own(ctx, args)
        if "-m" in before or not rest or rest[0] == "--":
            words = rest[1:] if rest[:1] == ["--"] else rest
            return super().parse_args(ctx, [*before, "--", *words])
        if rest[0].startswith("-"):
            return super().parse_args(ctx, args)  # which says that there is no such option
        behind, theirs = self._own(ctx, rest[1:])
        theirs = theirs[1:] if theirs[:1] == ["--"] else theirs
        for name in behind:
            # The script's own, most likely, and it would silently not get it.
            if name.startswith("-") and (name in before or name == "-m" or behind.count(name) > 1):
                raise click.UsageError(
                    f"{name} behind {rest[0]} would be an option of penstock run; put -- between "
                    "the script and what it is to get"
                )
        return super().parse_args(ctx, [*before, *behind, "--", rest[0], *theirs])

    def _own(self, ctx: click.Context, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """(the options with their values that come first, what comes behind them)."""
        takes_value = {
            name: isinstance(option, click.Option) and not option.is_flag
            for option in self.get_params(ctx)
            for name in option.opts
            if name.startswith("-")
        }
        place = 0
        while place < len(words):
            name, has_value, _ = words[place].partition("=")
            if not name.startswith("--"):  # -n4
                name, has_value = words[place][:2], words[place][2:]
            if name not in takes_value:
                break
            place += 2 if takes_value[name] and not has_value else 1
        return list(words[:place]), list(words[place:])


@click.command(cls=_Command, epilog=_WORDS_HELP, options_metavar="[OPTIONS]")
@click.option(
    "-n", "--ranks", type=click.IntRange(min=1), required=True,
    help="Number of ranks, each a process.",
)  # fmt: skip
@options.count_option(
    "--restarts", least=0, default=0,
    help="How often all ranks may be started again when one has failed.",
)  # fmt: skip
@click.option(
    "--elastic", is_flag=True,
    help="Go on with one rank fewer when the same rank is killed in two attempts running.",
)  # fmt: skip
@click.option(
    "--grace", type=click.FloatRange(min=0), default=5.0, show_default=True, metavar="SECONDS",
    help="How long ranks that are asked to end may take before they are killed.",
)  # fmt: skip
@click.option(
    "--draw", "picture", type=OutputFile(),
    help="Draw the attempts (.svg, .pdf, .png) when the job has ended.  -: standard output.",
)  # fmt: skip
@click.option("-m", "module", metavar="MODULE", help="Run a module by its name, as python -m does.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def run(
    ranks: int,
    restarts: int,
    elastic: bool,
    grace: float,
    picture: str | None,
    module: str | None,
    words: tuple[str, ...],
) -> None:
    """Run a training script on several ranks of this host, and start them again when one dies.

    The script is one for torchrun: it builds a Pipeline, loads the newest checkpoint, trains and
    saves. Torch is loaded once, and ranks are forked from the process that has it, so that they are
    back milliseconds after a death. Between hosts, use torchrun.
    """
    if picture is not None:
        options.check_figure(picture)
    if ranks > 1:  # before torch reads it
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from penstock.training.supervisor import Rank, Script, SupervisedJob, supervise

    if module is not None:
        script = Script(module, words, is_module=True)
    elif words:
        script = Script(words[0], words[1:])
    else:
        raise InputError("there is no script; try penstock run train.py -n 4")
    job = SupervisedJob(script, ranks, restarts, grace, elastic)
    outcome = supervise(job, lambda text: show.say(f"penstock: {text}"))
    if isinstance(outcome, Rank):
        script.run(outcome.number)
        return
    if len(outcome.accounts) > 1:
        show.print_table(*_table(outcome.accounts), beside=True)
    if picture is not None:
        from penstock.drawing.formats import write_figure

        drawn = _picture(outcome.accounts)
        write(picture, ".svg", lambda path: write_figure(path, drawn))
    if outcome.verdict:
        show.say(f"penstock: {outcome.verdict}")
    sys.exit(outcome.code)


def _picture(accounts: Sequence[AttemptRecord]) -> str:
    """Attempts over one axis of time."""
    from penstock.drawing.runs import AttemptBar, attempts

    start = accounts[0].moments.started
    bars = []
    for account in accounts:
        moments = account.moments
        ended = moments.ended if moments.noticed is None else moments.noticed
        bars.append(
            AttemptBar(
                moments.started - start,
                None if moments.built is None else moments.built - start,
                ended - start,
                account.first_step,
                _how_it_ended(account),
                account.cause is not None or account.interrupted is not None,
            )
        )
    return attempts(bars)


def _how_it_ended(account: AttemptRecord) -> str:
    return str(account.cause or account.interrupted or "all ranks ended well")


def _table(accounts: Sequence[AttemptRecord]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Attempts, a row each: how it began, and how it ended."""
    columns = (
        "how it ended",
        "attempt",
        "ranks",
        "went on at step",
        "ranks back after",
        "and ready after",
    )
    rows: list[tuple[str, ...]] = []
    failed = None
    for number, account in enumerate(accounts):
        moments = account.moments
        rows.append(
            (
                _how_it_ended(account),
                str(number),
                str(account.num_ranks),
                "–" if account.first_step is None else str(account.first_step),
                _seconds(failed, moments.forked),
                _seconds(failed, moments.built),
            )
        )
        failed = moments.noticed
    return columns, rows


def _seconds(start: float | None, end: float | None) -> str:
    return "–" if start is None or end is None else f"{end - start:.3f} s"
