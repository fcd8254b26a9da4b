"""``penstock explain``: why a plan was chosen, where the seconds of its step go, what it does to
the weights, and how fast it may learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

import click

from penstock.base.errors import ModelError
from penstock.base.units import format_bytes, format_seconds, format_share
from penstock.cli import options, show, sources
from penstock.cli.input import InputFile, load_workload
from penstock.drawing.plan_picture import counted

if TYPE_CHECKING:
    from penstock.planning.plans import Plan
    from penstock.planning.plans.explanation import ExplainedStage, Explanation, Stability

_EPILOG = (
    "PLAN is a .json file, as `penstock plan -o` writes it, or -, standard input. The "
    "curvature is the largest of the loss in a stage's weights: give yours, or let it be estimated "
    "on a workload's first minibatch."
)
_READING = (
    "k counts microbatches, t minibatches, both from 0; ⌊ ⌋ rounds down. Version v of a stage's "
    "weights is what v updates have made of them; nothing reads below version 0."
)
_CAVEAT = (
    "The bound 2·sin(π/(4τ+2)) (PipeMare, arXiv 1910.05124) is for plain SGD on a quadratic whose "
    "gradients are τ updates old. Momentum and Adam scale and lengthen steps and differ from it; "
    "what a policy corrects or predicts is not counted."
)
_REPLICAS = (
    "The learning rate of a stage with replicas is multiplied by their number, since its updates "
    "are means over them; that is counted."
)


_ROUNDING = 1e-9
"""A share of a step that is nothing."""


@click.command(name="explain", epilog=_EPILOG)
@click.argument("plan", type=InputFile("Plan"))
@options.amount_option(
    "--learning-rate", metavar="X",
    help="Say whether it is stable.",
)  # fmt: skip
@options.amount_option(
    "--curvature", metavar="λ",
    help="The largest of the loss, taken for every stage.",
)  # fmt: skip
@click.option(
    "--workload", metavar="MODULE:FUNCTION",
    help="Estimate each stage's curvature on this workload's first minibatch.",
)  # fmt: skip
@options.count_option(
    "--estimate-steps", default=5,
    help="Hessian-vector products per stage.",
)  # fmt: skip
@options.json_option
def explain_plan(
    plan: str,
    learning_rate: float | None,
    curvature: float | None,
    workload: str | None,
    estimate_steps: int,
    as_json: bool,
) -> None:
    """Say why a plan was chosen, where the seconds of its step go, what it does to the weights of
    each stage, and how fast it may learn."""
    if curvature is not None and workload is not None:
        raise click.UsageError("give --curvature or --workload, not both")
    from penstock.planning.plans.explanation import check_stability, explain
    from penstock.planning.plans.seconds import seconds_of_ranks

    loaded = sources.load_plan(plan)
    explanation = explain(loaded)
    curvatures = None if curvature is None else [curvature] * len(explanation.stages)
    if workload is not None:
        curvatures = _estimated(loaded, workload, estimate_steps)
    checks: Sequence[Stability] = ()
    if learning_rate is not None and curvatures is not None:
        checks = check_stability(explanation, learning_rate, curvatures)
    if as_json:
        numbers = _numbers(explanation, curvatures, checks)
        ranks = [parts._asdict() for parts in seconds_of_ranks(loaded)]
        show.print_json({**numbers, "step_seconds": loaded.step_seconds, "ranks": ranks})
        return
    show.prose(explanation.title)
    if loaded.reason:
        show.prose(f"why: {loaded.reason}")
    _print_seconds(loaded)
    _print_versions(explanation)
    _print_stability(explanation, learning_rate, curvatures, checks)


def _estimated(plan: Plan, workload: str, steps: int) -> list[float] | None:
    """Each stage's curvature; ``None``, and why on standard error, if it cannot be had."""
    from penstock.trial import stage_curvatures
    from penstock.trial.curvature import layers_of_stages

    loaded = load_workload(workload)
    layers_of_stages(loaded.build_model(), plan)  # a plan for another model is no reason to go on
    try:
        with show.counting("estimating curvature") as progress:
            return stage_curvatures(loaded, plan, steps, progress)
    except ModelError as error:
        show.say(f"{error}; give --curvature if you know it")
        return None


def _print_seconds(plan: Plan) -> None:
    """Where the seconds of a step go, on the rank that works most and on an average of all."""
    from penstock.planning.plans.seconds import (
        MARKS,
        MEANINGS,
        bar_of,
        seconds_of_ranks,
        slowest_of,
    )

    if not plan.step_seconds:
        return
    ranks = seconds_of_ranks(plan)
    slowest, step = slowest_of(ranks), plan.step_seconds
    pace = "a minibatch in the steady state" if plan.versions.asynchronous else "a step"
    show.echo(f"\nwhere the {format_seconds(step)} of {pace} go:\n")
    rows = []
    for index, name in enumerate(MARKS):
        mean = sum(parts[index] for parts in ranks) / len(ranks)
        own = ranks[slowest][index]
        if max(own, mean) > step * _ROUNDING:
            shares = (
                format_seconds(max(own, 0.0)),
                format_share(own / step),
                format_share(mean / step),
            )
            rows.append([f"{MARKS[name]} {name}", MEANINGS[name], *shares])
    rows.append(["  step", "", format_seconds(step), "100.0%", "100.0%"])
    columns = ("", "", f"rank {slowest}", "share", "of all")
    show.print_table(columns, rows, num_texts=2)
    show.echo(f"\n{bar_of(ranks[slowest], show.width() - 1)}")
    if len(ranks) > 1:
        show.prose(f"rank {slowest} works most; of all: the mean over {len(ranks)} ranks\n")


def _print_versions(explanation: Explanation) -> None:
    show.prose(explanation.summary + "\n")
    stages = list(enumerate(explanation.stages))
    if not explanation.synchronous:
        example = f"at k={explanation.example}"
        reads = ("forward reads", example, "backward reads", example)
        columns = ("stage", "layers", "ranks", *reads, "delay")
        show.print_table(columns, [_readings(*stage) for stage in stages], num_texts=7)
        show.prose(f"\n{_READING}\n")
    columns = ("stage", "layers", "ranks", "versions", "bytes", "δ", "in flight", "bytes")
    rows = [_memory(*stage) for stage in stages]
    show.print_table(columns, rows, num_texts=3)
    show.echo("\nin flight: microbatches whose activations are kept at the worst moment")


def _readings(index: int, stage: ExplainedStage) -> list[str]:
    forward, backward = stage.forward, stage.backward
    return [
        *_named(index, stage),
        forward.formula,
        str(forward.example),
        backward.formula,
        str(backward.example),
        f"{stage.delay:.3g}",
    ]


def _memory(index: int, stage: ExplainedStage) -> list[str]:
    return [
        *_named(index, stage),
        str(stage.versions_held),
        format_bytes(stage.version_bytes),
        format_bytes(stage.extra_bytes) if stage.extra_bytes else "–",
        str(stage.activations_in_flight),
        format_bytes(stage.activation_bytes),
    ]


def _named(index: int, stage: ExplainedStage) -> tuple[str, str, str]:
    return str(index), counted(stage.layers), ", ".join(map(str, stage.ranks))


def _print_stability(
    explanation: Explanation,
    learning_rate: float | None,
    curvatures: Sequence[float] | None,
    checks: Sequence[Stability],
) -> None:
    show.echo("\nstable if learning rate × curvature is at most:\n")
    columns = ["stage", "delay", "at most"]
    rows = [
        [str(index), f"{stage.delay:.3g}", f"{stage.stability_bound / stage.rate_factor:.3g}"]
        for index, stage in enumerate(explanation.stages)
    ]
    if curvatures is not None:
        columns += ["curvature", "largest rate"]
        for index, curvature in enumerate(curvatures):
            rows[index] += [f"{curvature:.3g}", f"{explanation.largest_rate(index, curvature):.3g}"]
    elif learning_rate is not None:
        columns.append(f"largest curvature at {learning_rate:g}")
        for index, stage in enumerate(explanation.stages):
            most = stage.stability_bound / stage.rate_factor / learning_rate
            rows[index].append(f"{most:.3g}")
    show.print_table(columns, rows)
    show.echo()
    if any(stage.rate_factor > 1 for stage in explanation.stages):
        show.prose(f"{_REPLICAS}\n")
    for check in checks:
        show.echo(show.wrapped(check.words, "" if check.stable else "warning: "))
    if checks:
        show.echo()
    show.prose(_CAVEAT)


def _numbers(
    explanation: Explanation, curvatures: Sequence[float] | None, checks: Sequence[Stability]
) -> dict[str, object]:
    rates = [
        explanation.largest_rate(stage, curvature)
        for stage, curvature in enumerate(curvatures or ())
    ]
    return {
        "explanation": explanation,
        "curvatures": curvatures,
        "largest_rates": [rate if isfinite(rate) else None for rate in rates],
        "stability": [
            {"stage": check.stage, "stable": check.stable, "words": check.words} for check in checks
        ],
    }
