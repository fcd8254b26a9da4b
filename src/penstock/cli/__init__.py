"""The command line: one function per verb, and one place where errors become messages."""

from __future__ import annotations

import importlib
import sys
from collections import UserDict
from typing import Any

import click

from penstock import __version__
from penstock.base.errors import PenstockError, printable
from penstock.cli.examples import epilog_of

_PLACES = {
    "check": ("schedule_verbs", "check"),
    "checkpoint": ("checkpoint_verb", "checkpoint"),
    "cluster": ("cluster_verb", "cluster"),
    "compare": ("schedule_verbs", "compare"),
    "contest": ("contest_verb", "contest"),
    "demo": ("model_verbs", "demo"),
    "draw": ("schedule_verbs", "draw"),
    "explain": ("explain_verb", "explain_plan"),
    "fleet": ("fleet_verb", "fleet"),
    "measure-cluster": ("cluster_verb", "measure_cluster"),
    "plan": ("plan_verb", "plan"),
    "profile": ("profile_verb", "profile"),
    "rehearse": ("rehearse_verb", "rehearse"),
    "report": ("model_verbs", "report"),
    "run": ("run_verb", "run"),
    "schedules": ("schedule_verbs", "schedules"),
    "serve": ("serve_verb", "serve"),
    "simulate": ("schedule_verbs", "simulate"),
    "train": ("model_verbs", "train"),
    "verify": ("verify_verb", "verify"),
}
"""For each verb, the file here that has it, and its function there."""


class _Verbs(UserDict[str, Any]):
    """Commands by name, each loaded when it is asked for: only the list of all needs them all."""

    def __getitem__(self, name: str) -> click.Command:
        module, function = super().__getitem__(name)
        command: click.Command = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        _explain(command, name)
        return command


def _explain(command: click.Command, verb: str) -> None:
    """Give a verb's help its examples, and lists of verbs its whole first sentence."""
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            _explain(inner, f"{verb} {name}")
    example, epilog = epilog_of(verb), command.epilog or ""
    if example not in epilog:
        command.epilog = f"{epilog}\n\n{example}".strip("\n")
    if command.help and not command.short_help:
        paragraph = " ".join(command.help.split("\n\n")[0].split())
        command.short_help = paragraph.partition(". ")[0].rstrip(".")


@click.group(
    commands=_Verbs(_PLACES),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="penstock")
def penstock() -> None:
    """Profile, plan, check, simulate, run and draw pipeline-parallel training.

    Try `penstock demo`, or `penstock draw 1f1b -p 4 -m 8`.
    """


def main() -> None:
    """Run the command line; what Penstock refuses becomes one message, not a traceback."""
    try:
        sys.exit(penstock(standalone_mode=False))
    except PenstockError as error:
        click.echo(f"penstock: {error}", err=True)
        sys.exit(1)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "penstock"
        message = error.format_message().rstrip(".")
        click.echo(printable(f"penstock: {message}; try {path} --help"), err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        click.echo(printable(f"penstock: {error.format_message()}"), err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
