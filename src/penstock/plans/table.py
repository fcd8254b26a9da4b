"""A plan for people: its stages as a table, what it is predicted to give, and why it was chosen."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.drawing.timeline.text import text
from penstock.plans.stage_plan import StagePlan
from penstock.timing.timeline import Timeline

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


_WIDTH = 108
_COLUMNS = (
    "rank", "layers", "F", "B", "share", "weights", "optimizer", "activations", "memory",
)  # fmt: skip


def render(
    title: str,
    stages: Sequence[StagePlan],
    timeline: Timeline,
    step_seconds: float,
    one_device_seconds: float,
    *,
    replicas: Sequence[int],
    rank_bytes: Sequence[int],
    flushes: bool,
) -> str:
    """A plan as text without colour codes, about 108 columns wide: a row per stage (share: its
    seconds over the slowest stage's; memory: of its rank), the predicted step, and its drawing."""
    return "\n".join(
        [
            title,
            as_text(_stages(stages, replicas, rank_bytes)),
            f"{_prediction(timeline, step_seconds, one_device_seconds, flushes=flushes)}, "
            f"{format_bytes(sum(rank_bytes))} in all",
            text(timeline),
        ]
    )


def count_of(number: int, noun: str, plural: str = "s") -> str:
    """A count with its noun.

    >>> count_of(1, "stage"), count_of(8, "microbatch", "es")
    ('1 stage', '8 microbatches')
    """
    return f"{number} {noun}{'' if number == 1 else plural}"


def _stages(
    stages: Sequence[StagePlan], replicas: Sequence[int], rank_bytes: Sequence[int]
) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True)
    for name in _COLUMNS:
        # Where the table is too wide, the names of layers give way, not the numbers.
        number = name != "layers"
        table.add_column(name, justify="right" if number else "left", no_wrap=number)
    slowest = max(stage.compute_seconds for stage in stages)
    for stage, count in zip(stages, replicas, strict=True):
        table.add_row(*_cells(stage, count, slowest), format_bytes(rank_bytes[stage.rank]))
    return table


def _cells(stage: StagePlan, replicas: int, slowest: float) -> tuple[str | Text, ...]:
    from rich.text import Text

    backward = stage.backward_input_seconds + stage.backward_weight_seconds
    return (
        str(stage.rank) if replicas == 1 else f"{stage.rank}–{stage.rank + replicas - 1}",
        Text(_layers(stage.layers), no_wrap=True, overflow="ellipsis"),
        format_seconds(stage.forward_seconds),
        format_seconds(backward),
        f"{stage.compute_seconds / slowest:.0%}" if slowest else "–",
        format_bytes(stage.parameter_bytes)
        + (f" × {stage.weight_versions}" if stage.weight_versions > 1 else ""),
        format_bytes(stage.optimizer_bytes),
        f"{format_bytes(stage.activation_bytes)} × {stage.peak_activations:g}",
    )


def _layers(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return f"1: {names[0]}"
    return f"{len(names)}: {names[0]} … {names[-1]}"


def _prediction(
    timeline: Timeline, step_seconds: float, one_device_seconds: float, *, flushes: bool
) -> str:
    if flushes:
        pace = f" a step, bubble {timeline.bubble:.1%}, stage bubble {timeline.stage_bubble:.1%}"
    else:
        pace = " a minibatch in the steady state"
    return (
        f"predicted: {format_seconds(step_seconds)}{pace}, "
        f"{format_speed_up(one_device_seconds, step_seconds)} one device"
    )


def as_text(table: Table) -> str:
    """A table of rich's, as wide as plans are."""
    from rich.console import Console

    file = io.StringIO()
    Console(
        file=file, width=_WIDTH, color_system=None, force_terminal=False, force_jupyter=False
    ).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().strip("\n").splitlines())


def format_seconds(seconds: float) -> str:
    """A duration with a unit that suits it.

    >>> format_seconds(0.1834), format_seconds(2.5), format_seconds(42e-6)
    ('183 ms', '2.5 s', '42 µs')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs" if seconds else "0"


def format_bytes(num_bytes: float) -> str:
    """A size in binary units.

    >>> format_bytes(0), format_bytes(1536), format_bytes(3 * 2**30)
    ('0', '1.5 KiB', '3 GiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{_three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B" if num_bytes else "0"


def format_speed_up(one_device_seconds: float, step_seconds: float) -> str:
    """How many times faster than the same work without a pipeline, as in ``1.78×``."""
    return f"{one_device_seconds / step_seconds:.2f}×" if step_seconds else "1.00×"


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
