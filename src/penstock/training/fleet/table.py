"""A fleet while it runs, on standard error: a table in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from penstock.base.errors import printable
from penstock.core.timing.fleet_timeline import label_of_visit
from penstock.training.fleet.dispatcher import Dispatcher
from penstock.training.fleet.results import row_of
from penstock.training.fleet.trainee import Trainee

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

_EVERY_SECONDS = 0.25
_HEADER = ("job", "now", "steps", "of", "loss", "device time", "")
_TEXTS = ("job", "now", "")


class Shown:
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
                told = f"{line}: {why}" if why else line
                console.print(printable(told), markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in _HEADER:
            table.add_column(column, justify="left" if column in _TEXTS else "right")
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
