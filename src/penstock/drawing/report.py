"""``Report``: a training run for people, as one value that is a file.

Whether it trained the same as one device, how long a step took and what was predicted, where the
time and the memory went; and in words, where a measured step parts from its prediction.
"""

from __future__ import annotations

from typing import Self

from penstock.base.errors import InputError
from penstock.base.lazily import method_loaded_when_used
from penstock.base.units import picture_seconds
from penstock.base.values import Value
from penstock.core.timing import TOLERANCE, Cause, Parting
from penstock.core.timing.spans import TimelineFile
from penstock.core.timing.timeline import Timeline


class Fact(Value, frozen=True, kw_only=True):
    """One headline number.

    Attributes:
        label: what it is, for example ``"step time, measured"``.
        value: the number with its unit, as it is to be read.
        note: what it is compared with, or how it came about.
        doubtful: whether it was measured so badly that it says little; the note tells why.
    """

    label: str
    value: str
    note: str = ""
    doubtful: bool = False


def doubt_of(others: float) -> str:
    """Why times say little; empty where they say how long something takes.

    Args:
        others: the most of the cores' time that other programs had, where that disturbed so many
            steps that too few are left; otherwise 0.
    """
    return f"other programs had up to {others:.0%} of the cores meanwhile" if others else ""


class StageRow(Value, frozen=True, kw_only=True):
    """One stage of the plan that was run.

    Attributes:
        layers: qualified names in the model's order.
        rank: the rank that runs the stage.
        forward_seconds: one microbatch.
        backward_seconds: one microbatch, both gradients.
        parameter_bytes: weights.
        gradient_bytes: their gradients.
        optimizer_bytes: optimizer state.
        activation_bytes: kept from forward to backward, per microbatch in flight.
        peak_activations: microbatches in flight at the worst moment.
    """

    layers: tuple[str, ...]
    rank: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    peak_activations: float = 0.0

    @property
    def memory(self) -> tuple[tuple[str, int], ...]:
        """Bytes of each use of the stage's memory."""
        return (
            ("weights", self.parameter_bytes),
            ("gradients", self.gradient_bytes),
            ("optimizer", self.optimizer_bytes),
            ("activations", round(self.peak_activations * self.activation_bytes)),
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes that the stage's memory is spent on in all."""
        return sum(amount for _, amount in self.memory)


class Series(Value, frozen=True, kw_only=True):
    """A named curve, for example the training loss.

    Attributes:
        name: for the legend.
        points: (step, loss); a loss that is not a finite number is kept as ``None``, because JSON
            has no way to write it.
    """

    name: str
    points: tuple[tuple[int, float | None], ...]


class TimelineRecord(TimelineFile, frozen=True, kw_only=True, omit_defaults=True):
    """A timeline inside a report's file; the same keys as a timeline's own file.

    Raises:
        FileError: the spans contradict each other.
    """

    def __post_init__(self) -> None:
        self.timeline()

    @classmethod
    def of(cls, timeline: Timeline) -> Self:
        """Record a timeline."""
        return cls.from_json(timeline.to_json())

    def timeline(self) -> Timeline:
        """The timeline that was recorded."""
        return Timeline.from_json(self.to_json(), where="timeline")


class Report(Value, frozen=True, kw_only=True):
    """The results of one training run.

    Attributes:
        title: of the page.
        headline: what came of it, in one sentence.
        numbers: the three that most people want: how fast, whether it is the same, how idle.
        subtitle: machine, date, command: what tells this run from others.
        facts: all numbers, the most important first.
        command: that gives such a run again; to copy.
        plan_json: the plan as a file has it.
        plan_text: the plan as it was printed.
        stages: the plan's stages in execution order; empty if only the text is known.
        predicted: the step as the simulator saw it.
        measured: the step as it was recorded.
        losses: curves over steps, for example training, held-out and one device.
        version: of this file format.

    Raises:
        InputError: the version is another.
    """

    title: str
    subtitle: str = ""
    headline: str = ""
    numbers: tuple[Fact, ...] = ()
    facts: tuple[Fact, ...] = ()
    command: str = ""
    plan_json: str = ""
    plan_text: str = ""
    stages: tuple[StageRow, ...] = ()
    predicted: TimelineRecord | None = None
    measured: TimelineRecord | None = None
    losses: tuple[Series, ...] = ()
    version: int = 1

    def __post_init__(self) -> None:
        if self.version != 1:
            raise InputError(
                f"the report has version {self.version}; this Penstock reads version 1"
            )

    _repr_html_ = method_loaded_when_used("penstock.drawing.cells", "report_cell")

    def timelines(self) -> dict[str, Timeline]:
        """The predicted and the measured timeline, as far as they are known, by title."""
        records = {"Predicted": self.predicted, "Measured": self.measured}
        return {title: record.timeline() for title, record in records.items() if record}


def departure(parting: Parting | None) -> str:
    """How the first op that departs does so, in one sentence."""
    if parting is None:
        share = f"{TOLERANCE:.0%}"
        return f"No op departs from the prediction by more than {share} of the step and the noise."
    op, rank = parting.measured.op, parting.measured.rank
    return f"The first op to depart from the prediction is {op} on rank {rank}: {reason(parting)}."


def reason(parting: Parting) -> str:
    """How the op differed, and because of which cause."""
    cause = parting.cause
    if cause.op == parting.measured.op and cause.kind != "pause":
        return f"it {_what(cause)}"
    start = _instead_of(parting.measured.start, parting.predicted.start)
    most = abs(cause.excess) > 0.6 * abs(parting.start_excess)
    because = "because" if most else "for several reasons, the largest that"
    return f"it started at {start}, {because} {cause.op} on rank {cause.rank} {_what(cause)}"


def _what(cause: Cause) -> str:
    lengths = (
        f"{picture_seconds(max(cause.measured, 0.0))} instead of {picture_seconds(cause.predicted)}"
    )
    if cause.kind == "op":
        return f"took {lengths}"
    if cause.after is None:
        return f"began the rank's work at {lengths}"
    where = "" if cause.after_rank == cause.rank else f" of rank {cause.after_rank}"
    return f"followed {cause.after}{where} after {lengths}"


def _instead_of(measured: float, predicted: float) -> str:
    return f"{picture_seconds(measured)} instead of {picture_seconds(predicted)}"
