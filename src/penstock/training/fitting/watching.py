"""``Watch``: shows the numbers of a training in one place or several."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.base.errors import InputError
from penstock.base.values import number, shown, whole
from penstock.engine.device.accelerators import is_on_host
from penstock.engine.device.accelerators import peak_flops as peak_flops_of
from penstock.engine.run.history import Work
from penstock.training.fitting.callbacks import Callback, numbers_of
from penstock.training.fitting.places import (
    MEMORY,
    LoggedRun,
    LogTarget,
    TensorBoard,
    Terminal,
    WeightsAndBiases,
)

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.training.pipeline import Pipeline

_MEASURED_EVERY_SECONDS = 1.0
_NAMES = ("terminal", "tensorboard", "wandb")
_NOTHING = Work(0, 0, 0)
_TICK = 1e-9


class Watch(Callback):
    """Shows how a training goes: the ``watch=`` of ``penstock.fit``, or called from a loop of one's
    own, ``on_step`` after each step and ``on_end`` behind the last one.

    Numbers by their names, those that are known: ``loss``, ``lr`` (of the process's first group),
    ``grad_norm``, the pipeline's metrics, ``held_out_loss``; ``steps_per_second``,
    ``rows_per_second`` and ``tokens_per_second`` since the last numbers, without evaluations;
    ``flops_per_second`` of the model (``Pipeline.work``) and ``peak_share``, what that is of the
    peak of all devices; ``bubble``, measured, of the last step (``Pipeline.timeline``); and
    ``memory_bytes/rank 0`` … (``Pipeline.memory_bytes``). The last two are measured once a second
    at most. Only rank 0 shows anything.

    Args:
        where: ``"terminal"``, ``"tensorboard"``, ``"wandb"``, or an object with ``log(numbers,
            step=…)``, such as what ``wandb.init(…)`` gives; or a list of these.
        every: after how many steps numbers are written; on an accelerator each time waits for the
            loss. The terminal has a pace of its own.
        folder: of TensorBoard's events; by default torch's, ``runs/…``.
        peak_flops: floating-point operations per second of the device of one rank. By default those
            of the maker's sheet, in matrices of 16 bits, where the device is a known one; otherwise
            there is no ``peak_share``.

    Raises:
        InputError: another place, or one whose library is not installed; impossible numbers.
    """

    def __init__(
        self,
        where: Any = "terminal",
        *,
        every: int = 1,
        folder: str | os.PathLike[str] | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self._every = whole("every", every, 1)
        if peak_flops is not None:
            number("peak_flops", peak_flops, positive=True)
        self._peak_flops = peak_flops
        listed = where if isinstance(where, list | tuple) else [where]
        if not listed:
            raise InputError(f"watch is {shown(where)}; {_HOW}")
        self._outlets = [_RatedTarget(_place(place, folder), _Rates()) for place in listed]
        self._measured: dict[str, float] = {}
        self._next = float("-inf")

    @classmethod
    def of(cls, watch: Any) -> Watch:
        """A ``Watch``, or what its first argument may be, as one."""
        return watch if isinstance(watch, Watch) else cls(watch)

    @property
    def in_terminal(self) -> bool:
        """Whether it shows lines or a table of its own."""
        return any(isinstance(place, Terminal) for place, _ in self._outlets)

    def on_step(self, step: int, loss: Tensor | None, pipeline: Pipeline) -> None:
        if not pipeline.is_first:
            return
        work = pipeline.work
        common: dict[str, float] = {}
        for place, rates in self._outlets:
            rates.add(work)
            if not place.is_due() or (step % self._every and not isinstance(place, Terminal)):
                continue
            if not common:
                common = {**numbers_of(loss, pipeline), **self._measure(pipeline)}
            place.write(step, {**common, **rates.taken(self._peak(pipeline))})

    def on_evaluate(self, step: int, loss: Tensor | None, pipeline: Pipeline) -> None:
        if not pipeline.is_first:
            return
        for place, rates in self._outlets:
            rates.begin()
            if loss is not None:
                place.write(step, {"held_out_loss": float(loss)})

    def on_end(self, pipeline: Pipeline) -> None:
        with ExitStack() as stack:  # all are closed, also if one of them cannot be
            for place, _ in self._outlets:
                stack.callback(place.close)

    def _measure(self, pipeline: Pipeline) -> dict[str, float]:
        """The figures that cost more than a look, as they were within the last second."""
        now = time.monotonic()
        if now < self._next:
            return self._measured
        self._next = now + _MEASURED_EVERY_SECONDS
        numbers: dict[str, float] = {}
        with suppress(InputError):  # which says that nothing is recorded
            numbers["bubble"] = pipeline.timeline.bubble
        with suppress(InputError):
            memory = pipeline.memory_bytes
            numbers |= {f"{MEMORY}{rank}": float(held) for rank, held in enumerate(memory)}
        self._measured = numbers
        return numbers

    def _peak(self, pipeline: Pipeline) -> float | None:
        """Floating-point operations per second of all devices; those of other processes are taken
        to be like this one's."""
        devices = {*pipeline.devices.values()}
        peaks = [self._peak_flops or peak_flops_of(device) for device in devices]
        known = [peak for peak in peaks if peak is not None]
        if len(known) < len(peaks):
            return None
        alone = len(pipeline.devices) == pipeline.plan.num_ranks
        if alone and not any(map(is_on_host, devices)):
            return sum(known)
        return known[0] * pipeline.plan.num_seats


_HOW = f"give {', '.join(map(repr, _NAMES))}, a run with log(numbers, step=…), or a list of them"


def _place(where: Any, folder: str | os.PathLike[str] | None) -> LogTarget:
    if where == "terminal":
        return Terminal()
    if where == "tensorboard":
        return TensorBoard(folder)
    if where == "wandb":
        return WeightsAndBiases()
    if not callable(getattr(where, "log", None)):
        raise InputError(f"watch is {shown(where)}; {_HOW}")
    return LoggedRun(where)


class _RatedTarget(NamedTuple):
    """A place, and what has been done since it was last written to."""

    place: LogTarget
    rates: _Rates


class _Rates:
    """Steps, rows, tokens and operations a second."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._num_steps = 0
        self._done = _NOTHING

    def begin(self) -> None:
        """Count from now on."""
        self._since, self._num_steps, self._done = time.monotonic(), 0, _NOTHING

    def add(self, work: Work) -> None:
        """A step has been made. How long the first one took, nobody knows."""
        if self._since is None:
            self.begin()
            return
        self._num_steps += 1
        self._done = Work(
            self._done.rows + work.rows,
            _sum(self._done.tokens, work.tokens),
            _sum(self._done.flops, work.flops),
        )

    def taken(self, peak_flops: float | None) -> dict[str, float]:
        """Rates since this was last asked, by name; empty after no step.

        Args:
            peak_flops: of all devices; ``None`` where nobody knows.
        """
        since, num_steps, done = self._since, self._num_steps, self._done
        self.begin()
        if not num_steps or since is None:
            return {}
        seconds = max(time.monotonic() - since, _TICK)
        amounts = {"steps": num_steps, **done._asdict()}
        rates = {
            f"{name}_per_second": amount / seconds
            for name, amount in amounts.items()
            if amount is not None
        }
        if peak_flops is not None and done.flops is not None:
            rates["peak_share"] = rates["flops_per_second"] / peak_flops
        return rates


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second
