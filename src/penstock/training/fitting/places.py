"""Places for the numbers of a training: TensorBoard, a run of Weights & Biases or alike, the
terminal."""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from penstock.base.errors import InputError, printable
from penstock.base.telling import is_quiet
from penstock.base.units import format_bytes

if TYPE_CHECKING:
    from rich.live import Live
    from rich.panel import Panel

MEMORY = "memory_bytes/rank "
"""Begins the name of a rank's memory."""

_FRAME_SECONDS, _LINE_SECONDS = 0.5, 5.0
_MOST_RANKS = 8


class LogTarget(ABC):
    """Takes numbers by their names, step by step."""

    def is_due(self) -> bool:
        """Whether it wants those of the step that has just been made."""
        return True

    @abstractmethod
    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show or keep numbers of a step."""

    def close(self) -> None:  # noqa: B027 - a run is ended by whoever began it
        """No more will come, unless another training begins."""


class TensorBoard(LogTarget):
    """Events for TensorBoard, by ``torch.utils.tensorboard``; their file is made when the first
    numbers come.

    Args:
        folder: of the run; by default torch's, ``runs/…`` with the time and the host.

    Raises:
        InputError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(
                f"TensorBoard is not installed ({error}); pip install tensorboard"
            ) from error
        self._opened = SummaryWriter
        self._folder = None if folder is None else os.fspath(folder)
        self._writer: Any = None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._opened(self._folder)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class LoggedRun(LogTarget):
    """A run that has ``log(numbers, step=…)``, as those of ``wandb``, ``swanlab`` and ``trackio``
    have; whoever began it ends it.

    Raises:
        InputError: it cannot log.
    """

    def __init__(self, run: Any) -> None:
        if not callable(getattr(run, "log", None)):
            raise InputError(
                f"the run is a {type(run).__name__} without a method log(numbers, step=…); give "
                "what wandb.init(…) returns, or an object that has one"
            )
        self._run = run

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)


class WeightsAndBiases(LogTarget):
    """The run of ``wandb`` that is under way; without one, one is begun and ended here.

    Raises:
        InputError: ``wandb`` is not installed.
    """

    def __init__(self) -> None:
        try:
            import wandb
        except ImportError as error:
            raise InputError(f"wandb is not installed ({error}); pip install wandb") from error
        self._wandb: Any = wandb
        self._own: Any = None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._wandb.run is None:
            self._own = self._wandb.init()
        self._wandb.run.log(dict(numbers), step=step)

    def close(self) -> None:
        if self._own is not None:
            self._own.finish()
            self._own = None


class Terminal(LogTarget):
    """A table on standard error that is drawn anew twice a second; without a terminal, a line every
    five seconds. ``PENSTOCK_QUIET`` switches it off.

    Args:
        file: where to; by default standard error.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._live: Live | None = None
        self._shown: dict[str, float] = {}
        self._next: float | None = None

    def is_due(self) -> bool:
        now = time.monotonic()
        if is_quiet():
            return False
        if self._next is None:  # rates are known at the second step
            self._next = now
            return False
        if now < self._next:
            return False
        self._next = now + (_FRAME_SECONDS if self._draws else _LINE_SECONDS)
        return True

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if is_quiet():
            return
        if not self._draws:
            line = ", ".join(
                f"{name} {text}".strip() for name, text in _told(numbers, in_line=True)
            )
            print(printable(f"step {step}: {line}"), file=self._out, flush=True)
            return
        self._shown |= numbers
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(auto_refresh=False, console=Console(file=self._out))
            self._live.start()
        self._live.update(self._panel(step), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._live, self._next, self._shown = None, None, {}

    @property
    def _out(self) -> TextIO:
        return self._file or sys.stderr

    @property
    def _draws(self) -> bool:
        return bool(getattr(self._out, "isatty", bool)())

    def _panel(self, step: int) -> Panel:
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for name, text in _told(self._shown, in_line=False):
            table.add_row(printable(name), text)
        return Panel(table, title=f"step {step:,}", expand=False)


def _told(numbers: Mapping[str, float], *, in_line: bool) -> Iterator[tuple[str, str]]:
    """Numbers as people read them, with what they are; in a line, the largest memory is enough."""
    memory = {name: number for name, number in numbers.items() if name.startswith(MEMORY)}
    for name, number in numbers.items():
        if name not in memory:
            yield _KNOWN.get(name, _plainly)(name, number)
    if in_line or len(memory) > _MOST_RANKS:
        most = max(memory, key=memory.__getitem__, default="")
        memory = {most: memory[most]} if most else {}
    for name, number in memory.items():
        yield f"memory of rank {name.removeprefix(MEMORY)}", format_bytes(number)


def _plainly(name: str, number: float) -> tuple[str, str]:
    return name.replace("_", " "), f"{number:.4g}"


def _each_second(name: str, number: float) -> tuple[str, str]:
    shown = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return "", f"{shown} {name.removesuffix('_per_second')}/s"


def _flops(_: str, number: float) -> tuple[str, str]:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if number >= size:
            return "", f"{number / size:.3g} {prefix}FLOP/s"
    return "", f"{number / 1e6:.3g} MFLOP/s"


def _share(name: str, number: float) -> tuple[str, str]:
    return {"peak_share": "share of the peak"}.get(name, name), f"{number:.1%}"


_KNOWN = {
    "steps_per_second": _each_second,
    "rows_per_second": _each_second,
    "tokens_per_second": _each_second,
    "flops_per_second": _flops,
    "peak_share": _share,
    "bubble": _share,
}
