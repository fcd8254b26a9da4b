"""Callbacks that write what a training says of itself where people look: CSV files, TensorBoard,
and whatever has a method ``log``, such as a run of Weights & Biases. Only rank 0 writes."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from penstock.base.errors import FileError
from penstock.base.values import whole
from penstock.training.fitting.callbacks import Callback, numbers_of
from penstock.training.fitting.places import LoggedRun, TensorBoard

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.training.pipeline import Pipeline


class Logger(Callback):
    """Writes ``loss``, ``lr`` (of the process's first group), ``grad_norm`` where the pipeline
    clips, and the pipeline's metrics after every few steps, and ``held_out_loss`` at evaluations.

    Args:
        every: after how many steps; on an accelerator each of them waits for the loss.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = whole("every", every, 1)

    def on_step(self, step: int, loss: Tensor | None, pipeline: Pipeline) -> None:
        if pipeline.is_first and step % self._every == 0:
            self.write(step, numbers_of(loss, pipeline))

    def on_evaluate(self, step: int, loss: Tensor | None, pipeline: Pipeline) -> None:
        if pipeline.is_first and loss is not None:
            self.write(step, {"held_out_loss": float(loss)})

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write numbers by their names; only called in the first process."""
        raise NotImplementedError


class CSVLogger(Logger):
    """Writes a line per step or evaluation into a CSV file; what a line does not tell is empty.

    A file that is there is gone on with, so that a run that was resumed stays in one piece.

    Args:
        path: of the file; its folder is made.
        every: after how many steps.

    Raises:
        FileError: when it writes first, a file with other columns.
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 1) -> None:
        super().__init__(every)
        self._path = Path(path)
        self._file: TextIO | None = None
        self._columns: list[str] = []
        self._started = time.monotonic()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._file is None:
            self._file = self._opened(numbers)
        row = {"step": step, "seconds": round(time.monotonic() - self._started, 3), **numbers}
        writer = csv.DictWriter(self._file, self._columns, extrasaction="ignore")
        writer.writerow(row)
        self._file.flush()

    def on_end(self, pipeline: Pipeline) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self, numbers: Mapping[str, float]) -> TextIO:
        usual = ("step", "seconds", "loss", "held_out_loss", "lr")
        self._columns = [*usual, *(name for name in numbers if name not in usual)]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = self._path.open("a+", newline="")
            file.seek(0)
            header = next(csv.reader(file), [])
            file.seek(0, os.SEEK_END)
        except OSError as error:
            raise FileError(f"{self._path}: {error.strerror}; name another file") from error
        if not header:
            csv.writer(file).writerow(self._columns)
        elif header != self._columns:
            file.close()
            raise FileError(
                f"{self._path} has the columns {', '.join(header)}, and this run writes "
                f"{', '.join(self._columns)}; name another file"
            )
        return file


class TensorBoardLogger(Logger):
    """Writes events for TensorBoard, by ``torch.utils.tensorboard``.

    Args:
        folder: of the run, as ``tensorboard --logdir`` takes it.
        every: after how many steps.

    Raises:
        InputError: when it writes first, TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 1) -> None:
        super().__init__(every)
        self._folder = folder
        self._board: TensorBoard | None = None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._board is None:
            self._board = TensorBoard(self._folder)
        self._board.write(step, numbers)

    def on_end(self, pipeline: Pipeline) -> None:
        if self._board is not None:
            self._board.close()


class RunLogger(Logger):
    """Hands numbers to a run that has ``log(numbers, step=…)``, as those of ``wandb``, ``swanlab``
    and ``trackio`` have.

    Args:
        run: what ``wandb.init(…)`` gave, say; under ``torchrun`` it is used on rank 0 only, and may
            be ``None`` elsewhere.
        every: after how many steps.

    Raises:
        InputError: it cannot log.
    """

    def __init__(self, run: Any, every: int = 1) -> None:
        super().__init__(every)
        self._run = None if run is None else LoggedRun(run)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._run is not None:
            self._run.write(step, numbers)
