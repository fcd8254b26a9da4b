"""A plan for people: its stages as a table, what it is predicted to give, and why it was chosen."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from penstock.base.units import format_bytes, format_rate, format_seconds, format_speed_up
from penstock.drawing.layer_names import counted
from penstock.planning.plans.prediction import Prediction
from penstock.planning.plans.stage_plan import StagePlan

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


_WIDTH = 108
_COLUMNS = (
    "rank", "layers", "F", "B", "share", "weights", "optimizer", "activations", "memory",
)  # fmt: skip


def render(
    title: str, prediction: Prediction, one_device_seconds: float, rate: float | None = None
) -> str:
    """A plan as text without colour codes, about 108 columns wide: a row per stage (share: its
    seconds over the slowest stage's; memory: of its rank), the predicted step, and its drawing; of
    a live stream, rate and latency, too.

    Args:
        rate: in frames per second, that was asked for.
    """
    from penstock.drawing.timeline.text import text  # a plan that runs is not drawn

    return "\n".join(
        [
            title,
            as_text(_stages(prediction)),
            f"{_outcome(prediction, one_device_seconds)}, "
            f"{format_bytes(sum(prediction.rank_bytes))} in all",
            *([live_words(prediction, rate)] if prediction.is_live or rate else []),
            text(prediction.shown),
        ]
    )


def _stages(prediction: Prediction) -> Table:
    table = new_table()
    for name in _COLUMNS:
        # Where the table is too wide, the names of layers give way, not the numbers.
        number = name != "layers"
        table.add_column(name, justify="right" if number else "left", no_wrap=number)
    slowest = max(stage.compute_seconds for stage in prediction.stages)
    for stage, count in zip(prediction.stages, prediction.replicas, strict=True):
        memory = format_bytes(prediction.rank_bytes[stage.rank])
        table.add_row(*_cells(stage, count, slowest), memory)
    return table


def _cells(stage: StagePlan, replicas: int, slowest: float) -> tuple[str | Text, ...]:
    from rich.text import Text

    backward = stage.backward_input_seconds + stage.backward_weight_seconds
    return (
        str(stage.rank) if replicas == 1 else f"{stage.rank}–{stage.rank + replicas - 1}",
        Text(counted(stage.layers), no_wrap=True, overflow="ellipsis"),
        format_seconds(stage.forward_seconds),
        format_seconds(backward),
        f"{stage.compute_seconds / slowest:.0%}" if slowest else "–",
        format_bytes(stage.parameter_bytes)
        + (f" × {stage.weight_versions}" if stage.weight_versions > 1 else ""),
        format_bytes(stage.optimizer_bytes),
        f"{format_bytes(stage.activation_bytes)} × {stage.peak_activations:g}",
    )


def _outcome(prediction: Prediction, one_device_seconds: float) -> str:
    pace = f" a {'frame' if _by_frame(prediction) else 'minibatch'} in the steady state"
    if prediction.flushes:
        timeline = prediction.timeline
        pace = f" a step, bubble {timeline.bubble:.1%}, stage bubble {timeline.stage_bubble:.1%}"
    return (
        f"predicted: {format_seconds(prediction.step_seconds)}{pace}, "
        f"{format_speed_up(one_device_seconds, prediction.step_seconds)} one device"
    )


def _by_frame(prediction: Prediction) -> bool:
    return prediction.is_live and prediction.num_microbatches == 1


def live_words(prediction: Prediction, rate: float | None) -> str:
    """Rate and latency of a stream, never one without the other.

    Args:
        rate: that was asked for.
    """
    asked = "" if rate is None else f" ({format_rate(rate)} asked for)"
    light, saturated = map(format_seconds, prediction.latency)
    return (
        f"rate: up to {format_rate(prediction.frames_per_second)}{asked}; latency of an output: "
        f"{light} at light load, {saturated} saturated, and any wait in front"
    )


def new_table() -> Table:
    """A table of rich's in the style of plans, without columns yet."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True)


def as_text(table: Table) -> str:
    """A table of rich's, as wide as plans are."""
    from rich.console import Console

    file = io.StringIO()
    Console(
        file=file,
        width=_WIDTH,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        markup=False,
        emoji=False,
    ).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().strip("\n").splitlines())
