"""``penstock verify``: the proof, in one command, on the user's own model and plan."""

from __future__ import annotations

import click

from penstock.cli import options, show, sources
from penstock.cli.input import InputFile
from penstock.cli.workloads import DEFAULT_WORKLOAD, load_workload_of

_EPILOG = (
    "PLAN is a .json file, as `penstock plan -o` writes it, or -, standard input. WORKLOAD is "
    "module:function, where the function returns a penstock.trial.Workload; left out, the plan "
    "must be for the demo's, "
    f"{DEFAULT_WORKLOAD}. The exit status is 1 if anything is not equal."
)


@click.command(epilog=_EPILOG)
@click.argument("plan", type=InputFile())
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
@click.option(
    "--transport", type=click.Choice(["threads"]), default="threads", show_default=True,
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
