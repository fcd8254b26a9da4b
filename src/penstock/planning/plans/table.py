"""A plan for people: its stages as a table, what it is predicted to give, and why it was chosen."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.base.telling import wrap_to
from penstock.base.units import format_bytes, format_rate, format_seconds, format_speed_up
from penstock.drawing.plan_picture import counted
from penstock.planning.plans.prediction import Prediction

if TYPE_CHECKING:
    from rich.table import Table


WIDTH = 80
"""Columns of a plan as text, unless its reader has more."""

_BRIEF = ("rank", "layers", "F", "B", "share", "memory")
_DETAILS = ("weights", "optimizer", "activations")
_ALL_NEED = 104
"""Columns of a table that has the details, too."""


def render(
    title: str,
    prediction: Prediction,
    one_device_seconds: float,
    rate: float | None = None,
    *,
    width: int = WIDTH,
    details: bool = True,
) -> str:
    """A plan as text without colour codes: a row per stage (share: its seconds over the slowest
    stage's; memory: of its rank), the predicted step, and its drawing; of a live stream, rate and
    latency, too.

    Args:
        rate: in frames per second, that was asked for.
        width: of the longest line, in columns.
        details: whether to say what the memory of each stage is spent on.
    """
    from penstock.drawing.timeline.text import text  # a plan that runs is not drawn

    outcome = (
        f"{_outcome(prediction, one_device_seconds)}, "
        f"{format_bytes(sum(prediction.rank_bytes))} in all"
    )
    words = [outcome, *([live_words(prediction, rate)] if prediction.is_live or rate else [])]
    return "\n".join(
        [
            wrap_to(title, width),
            *(as_text(table, width) for table in _stages(prediction, width, details)),
            *(wrap_to(line, width) for line in words),
            text(prediction.shown, window=width),
        ]
    )


def _stages(prediction: Prediction, width: int, details: bool) -> Iterator[Table]:
    """A table of the stages; its details beside it where there is room, and else below."""
    rows = list(_cells(prediction))
    if details and width >= _ALL_NEED:
        yield _table((*_BRIEF[:-1], *_DETAILS, _BRIEF[-1]), rows)
        return
    yield _table(_BRIEF, rows)
    if details:
        yield _table(("rank", *_DETAILS), rows)


def _table(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> Table:
    from rich.text import Text

    table = new_table()
    for name in columns:
        # Where the table is too wide, the names of layers give way, not the numbers.
        number = name != "layers"
        table.add_column(name, justify="right" if number else "left", no_wrap=number)
    for row in rows:
        table.add_row(*(Text(row[name], no_wrap=True, overflow="ellipsis") for name in columns))
    return table


def _cells(prediction: Prediction) -> Iterator[dict[str, str]]:
    """By column, what stands in each stage's row."""
    slowest = max(stage.compute_seconds for stage in prediction.stages)
    for stage, count in zip(prediction.stages, prediction.replicas, strict=True):
        backward = stage.backward_input_seconds + stage.backward_weight_seconds
        versions = f" × {stage.weight_versions}" if stage.weight_versions > 1 else ""
        yield {
            "rank": str(stage.rank) if count == 1 else f"{stage.rank}–{stage.rank + count - 1}",
            "layers": counted(stage.layers),
            "F": format_seconds(stage.forward_seconds),
            "B": format_seconds(backward),
            "share": f"{stage.compute_seconds / slowest:.0%}" if slowest else "–",
            "weights": format_bytes(stage.parameter_bytes) + versions,
            "optimizer": format_bytes(stage.optimizer_bytes),
            "activations": f"{format_bytes(stage.activation_bytes)} × {stage.peak_activations:g}",
            "memory": format_bytes(prediction.rank_bytes[stage.rank]),
        }


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


def as_text(table: Table, width: int = WIDTH) -> str:
    """A table of rich's, in lines of at most so many columns."""
    from rich.console import Console

    file = io.StringIO()
    Console(
        file=file,
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        markup=False,
        emoji=False,
    ).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().strip("\n").splitlines())
