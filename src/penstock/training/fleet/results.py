"""The results of a fleet: a value per job, as a table, which follows the run on standard error in a
terminal; elsewhere a line tells of each end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

from penstock.base.errors import InputError, printable
from penstock.base.units import format_seconds, format_share
from penstock.core.timing.fleet_timeline import FleetTimeline, label_of_visit
from penstock.planning.turns.visits import Bound

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    from penstock.training.fleet.dispatcher import Dispatcher
    from penstock.training.fleet.trainee import Trainee


Status = Literal["training", "done", "stopped", "failed", "not a number"]
"""How a job stands: it has trained as long as it was to; it was among the worse half; its model,
data or tier raised an error; or its loss is no number."""


@dataclass(frozen=True)
class JobResult:
    """The result of one job.

    Attributes:
        name: of the job.
        status: how it ended.
        losses: of each minibatch.
        metrics: of each minibatch, by name.
        value: the mean of what halving compares, at the last decision; ``None`` without one.
        seconds: how long it had a device, in this run.
        error: what ended it, if something did.
    """

    name: str
    status: Status
    losses: Sequence[float]
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    value: float | None = None
    seconds: float = 0.0
    error: BaseException | None = None

    @property
    def steps(self) -> int:
        """Minibatches that it was trained on."""
        return len(self.losses)

    @property
    def loss(self) -> float:
        """The last one; NaN where there is none."""
        return self.losses[-1] if self.losses else math.nan


class FleetResults(Mapping[str, JobResult]):
    """The results of all jobs, by name; as text, a table.

    Attributes:
        timeline: which job had which device when.
        bound: what no order of these visits could undercut, at the pace at which they ran.
        metric, largest: what ``best`` compares.
    """

    def __init__(
        self,
        jobs: Sequence[JobResult],
        timeline: FleetTimeline,
        bound: Bound,
        metric: str = "loss",
        largest: bool = False,
    ) -> None:
        self._jobs = {job.name: job for job in jobs}
        self.timeline, self.bound = timeline, bound
        self.metric, self.largest = metric, largest

    def __getitem__(self, name: str) -> JobResult:
        return self._jobs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def best(self) -> JobResult:
        """The best of the jobs that are done: by what halving compared last, else by the last loss.

        Raises:
            InputError: none is done.
        """
        done = [job for job in self._jobs.values() if job.status == "done"]
        if not done:
            raise InputError("no job came to its end; its result says why: results[name].error")

        def rank(job: JobResult) -> float:
            value = job.loss if job.value is None else job.value
            if math.isnan(value):
                return math.inf
            return -value if self.largest and job.value is not None else value

        return min(done, key=rank)

    def rows(self) -> list[tuple[str, ...]]:
        """Name, status, minibatches, last loss, device time and how it ended, as text."""
        return [row_of(job) for job in self._jobs.values()]

    def __str__(self) -> str:
        rows = [COLUMNS, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join(
                cell.ljust(width) if column in _TEXTS else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return printable("\n".join([*table, self.summary()]))

    def summary(self) -> str:
        """One line: how long it took, beside the bound."""
        took, least = self.timeline.makespan, self.bound.seconds
        over = f", {took / least:.3f} × the bound ({self.bound.reason})" if least else ""
        return (
            f"{format_seconds(took)} on {self.timeline.num_devices} devices{over}; idle "
            f"{format_share(self.timeline.idle)}"
        )


COLUMNS = ("job", "status", "steps", "loss", "device time", "")
_TEXTS = (0, 1, 5)


def row_of(job: JobResult) -> tuple[str, ...]:
    """A job as a row of a table."""
    why = "" if job.error is None else " ".join(str(job.error).split())
    loss = f"{job.loss:.4g}" if job.losses else "–"
    return job.name, job.status, str(job.steps), loss, format_seconds(job.seconds), why


_EVERY_SECONDS = 0.25
_HEADER = ("job", "now", "steps", "of", "loss", "device time", "")
_LEFT = ("job", "now", "")


class FleetDisplay:
    """Shows trainees while its ``with`` block lasts, whenever it is asked to ``update``.

    Args:
        trainees: the jobs.
        dispatcher: knows which of them has which device.
        show: whether anything is shown; ``None``: only in a terminal.
    """

    def __init__(
        self, trainees: Sequence[Trainee], dispatcher: Dispatcher, show: bool | None
    ) -> None:
        self._trainees, self._dispatcher, self._show = trainees, dispatcher, show
        self._console: Console | None = None
        self._live: Live | None = None
        self._told: set[str] = set()
        self._drawn = 0.0

    def update(self) -> None:
        """Show how things are, if it is time."""
        now = time.monotonic()
        if self._live is not None and now - self._drawn >= _EVERY_SECONDS:
            self._live.update(self._table(), refresh=True)
            self._drawn = now
        elif self._live is None and self._console is not None:
            self._tell_ends(self._console)

    def _tell_ends(self, console: Console) -> None:
        for trainee in self._trainees:
            if trainee.status != "training" and trainee.name not in self._told:
                self._told.add(trainee.name)
                name, status, steps, loss, seconds, why = row_of(trainee.result())
                line = f"{name}: {status} at step {steps}, loss {loss}, {seconds} on devices"
                text = f"{line}: {why}" if why else line
                console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in _HEADER:
            table.add_column(column, justify="left" if column in _LEFT else "right")
        states = self._dispatcher.states()
        for trainee in self._trainees:
            name, status, steps, loss, seconds, why = row_of(trainee.result())
            state, device = states[name]
            now = status if status != "training" else state
            if device is not None and status == "training":
                now = f"device {device}: {label_of_visit(*trainee.place.label())}"
            end = "" if trainee.place.target is None else str(trainee.place.target)
            table.add_row(*map(printable, (name, now, steps, end, loss, seconds, why)))
        return table

    def __enter__(self) -> Self:
        if self._show is False:
            return self
        from rich.console import Console

        console = Console(stderr=True, markup=False, emoji=False)
        if console.is_terminal:
            from rich.live import Live

            self._live = Live(self._table(), console=console, auto_refresh=False)
            self._live.__enter__()
        if self._show or console.is_terminal:
            self._console = console
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.__exit__(None, None, None)
        elif self._console is not None:
            self._tell_ends(self._console)
