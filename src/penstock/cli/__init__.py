"""The command line: one function per verb, and one place where errors become messages."""

from __future__ import annotations

import sys

import click

from penstock import __version__
from penstock.cli.cluster_verb import CLUSTER_VERBS
from penstock.cli.explain_verb import explain_plan
from penstock.cli.model_verbs import MODEL_VERBS
from penstock.cli.rehearse_verb import rehearse
from penstock.cli.schedule_verbs import SCHEDULE_VERBS
from penstock.cli.verify_verb import verify
from penstock.errors import PenstockError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="penstock")
def penstock() -> None:
    """Profile, plan, check, simulate, run and draw pipeline-parallel training.

    Try `penstock demo`, or `penstock draw 1f1b -p 4 -m 8`.
    """


for verb in (*MODEL_VERBS, *SCHEDULE_VERBS, *CLUSTER_VERBS, rehearse, explain_plan, verify):
    penstock.add_command(verb)


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
    except click.ClickException as error:
        click.echo(f"penstock: {error.format_message()}", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
