"""The report of a stream, live in the terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from penstock.planning.plans import Plan
from penstock.training.live.report import StreamReport

if TYPE_CHECKING:
    from rich.live import Live
    from rich.panel import Panel


class Dashboard:
    """Draws a report anew every now and then, while its ``with`` block lasts.

    Args:
        report: gives the report as of now.
        plan: of the stream, for the title.
        every_seconds: how often it is drawn.
    """

    def __init__(
        self, report: Callable[[], StreamReport], plan: Plan, every_seconds: float
    ) -> None:
        self._report = report
        self._plan = plan
        self._every_seconds = every_seconds
        self._ends = threading.Event()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None

    def _panel(self) -> Panel:
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for name, value in self._report().rows():
            table.add_row(name, value)
        stages = f"{self._plan.schedule}, {len(self._plan.stages)} stages"
        return Panel(table, title=f"live stream: {stages}", expand=False)

    def _draw(self) -> None:
        while not self._ends.wait(self._every_seconds):
            if self._live is not None:
                self._live.update(self._panel(), refresh=True)

    def __enter__(self) -> Self:
        from rich.live import Live

        self._live = Live(self._panel(), auto_refresh=False)
        self._live.__enter__()
        self._ends.clear()
        self._thread = threading.Thread(target=self._draw, name="penstock dashboard", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
            self._live.__exit__(None, None, None)
