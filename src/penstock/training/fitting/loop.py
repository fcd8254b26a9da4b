"""``fit``: train on a loader, evaluate now and then, and let callbacks look on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from typing import Any, NamedTuple

from torch import Tensor

from penstock.base.arguments import public
from penstock.base.errors import InputError
from penstock.base.telling import is_quiet
from penstock.base.values import expect, flag, whole
from penstock.engine.model.batches import is_batch
from penstock.engine.run.drive.driver import told
from penstock.training.checkpoint.saving import Checkpoints
from penstock.training.fitting.callbacks import Callback, EarlyStopping, ProgressLines
from penstock.training.fitting.watching import Watch
from penstock.training.pipeline import Pipeline


class Fitted(NamedTuple):
    """The outcome of ``fit``.

    Attributes:
        num_steps: minibatches trained on.
        held_out: (after how many steps of the pipeline, loss) of each evaluation.
        stopped: whether a callback ended it.
    """

    num_steps: int
    held_out: list[tuple[int, Tensor | None]]
    stopped: bool


@public()
def fit(  # noqa: PLR0913 - each has a default that most callers keep
    pipeline: Pipeline,
    loader: Iterable[Any],
    *,
    epochs: int = 1,
    max_steps: int | None = None,
    evaluate: Any = None,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoints: Checkpoints | None = None,
    progress: bool = True,
    watch: Any = None,
) -> Fitted:
    """Train on the batches of a loader, as a loop over ``Pipeline.steps`` does.

    Minibatches overlap between evaluations, before which the pipeline drains. Schedulers that wait
    for a metric, as ``ReduceLROnPlateau``, are given each held-out loss. Under ``torchrun`` all
    processes must call it with the same.

    Args:
        pipeline: with a loss and an optimizer.
        loader: of batches, each as for ``Pipeline.step``; it is read once per epoch.
        epochs: how often.
        max_steps: end after so many minibatches, if the epochs have not ended before.
        evaluate: held-out data, for ``Pipeline.evaluate_loss``; or a function of the pipeline that
            returns a loss, and that every process calls.
        evaluate_every: after so many minibatches of training, and at the end; by default behind
            every epoch.
        callbacks: who looks on, in this order.
        checkpoints: where to save in the course of the loop, and how often.
        progress: let rank 0 print a line every few seconds on standard error, and one for each
            evaluation.
        watch: how it goes, shown in the ``"terminal"``, in ``"tensorboard"``, in ``"wandb"``, or in
            several of them: a ``penstock.Watch``, or what its first argument may be. In the
            terminal it takes the place of the lines of ``progress``.

    Returns:
        How many minibatches there were, every held-out loss, and whether a callback ended it.

    Raises:
        InputError: impossible arguments, something that waits for held-out losses without
            ``evaluate``, a loader that gives nothing, or as ``Pipeline.steps``.
        StageError, PeerError, DeadlineError, FileError: as ``Pipeline.steps``.
    """
    expect(pipeline, Pipeline, "what to fit", "give a pk.Pipeline")
    whole("epochs", epochs, 1)
    for name, count in (("max_steps", max_steps), ("evaluate_every", evaluate_every)):
        if count is not None:
            whole(name, count, 1)
    expect(callbacks, Sequence, "callbacks", "give a list of pk.Callback")
    for callback in callbacks:
        expect(callback, Callback, "a callback", "derive it from pk.Callback")
    flag("progress", progress)
    if evaluate is None:
        _check_nobody_waits(evaluate_every, callbacks)
    watches = [] if watch is None else [Watch.of(watch)]
    if not pipeline.trains:
        raise InputError(
            "fit trains, and this Pipeline has no optimizer; give Pipeline(…, "
            "optimizer=lambda parameters: torch.optim.AdamW(parameters))"
        )
    tells = progress and not is_quiet() and not any(watching.in_terminal for watching in watches)
    everybody = [*callbacks, *watches, *[ProgressLines()] * tells]
    batches = _batches(loader, epochs, evaluate_every)
    try:
        fitted = _Fitting(pipeline, everybody, evaluate, checkpoints).over(batches, max_steps)
    except BaseException as error:
        for failure in _ended(everybody, pipeline):
            error.add_note(f"on_end failed, too: {told(failure)}")
        raise
    failures = _ended(everybody, pipeline)
    for failure in failures[1:]:
        failures[0].add_note(f"Another on_end failed, too: {told(failure)}")
    if failures:
        raise failures[0]
    return fitted


def _ended(callbacks: Sequence[Callback], pipeline: Pipeline) -> list[Exception]:
    """Tell all callbacks that training has ended; what those raised that could not end."""
    failures = []
    for callback in callbacks:
        try:
            callback.on_end(pipeline)
        except Exception as error:
            failures.append(error)
    return failures


class _Fitting:
    """One call of ``fit``; arguments as there."""

    def __init__(
        self,
        pipeline: Pipeline,
        callbacks: Sequence[Callback],
        evaluate: Any,
        checkpoints: Checkpoints | None,
    ) -> None:
        self._pipeline = pipeline
        self._callbacks = callbacks
        self._evaluate = evaluate
        self._checkpoints = checkpoints
        self._num_steps = 0
        self._held_out: list[tuple[int, Tensor | None]] = []
        # A process whose stages have no parameters has no scheduler, and must come all the same.
        self._schedules = pipeline.any_process(pipeline.schedulers.wait_for_metric)
        if self._schedules and evaluate is None:
            raise _nothing_to_evaluate("the schedulers wait for a held-out loss")

    def over(self, stretches: Iterator[Iterator[Any]], max_steps: int | None) -> Fitted:
        stopped = False
        for stretch in stretches:
            left = None if max_steps is None else max_steps - self._num_steps
            if left == 0:
                break
            if self._train(islice(stretch, left)):
                stopped = True
                break
            if self._evaluate is not None and self._evaluated():
                stopped = True
                break
        return Fitted(self._num_steps, self._held_out, stopped)

    def _train(self, batches: Iterator[Any]) -> bool:
        """Train up to the next evaluation; whether a callback wants to stop."""
        pipeline = self._pipeline
        first = pipeline.num_steps
        try:
            with closing(pipeline.steps(batches, checkpoints=self._checkpoints)) as losses:
                for step, loss in enumerate(losses, first + 1):
                    # All are told, also when the first one wants to stop.
                    wishes = [
                        callback.on_step(step, loss, pipeline) for callback in self._callbacks
                    ]
                    if any(wishes):
                        return True
        finally:
            # What was under way when a callback wanted to stop has been trained on, too.
            self._num_steps += pipeline.num_steps - first
        return False

    def _evaluated(self) -> bool:
        """Evaluate, and tell everybody; whether a callback of any process wants to stop."""
        pipeline = self._pipeline
        step = pipeline.num_steps
        if isinstance(self._evaluate, Callable):  # type: ignore[arg-type]
            loss = self._evaluate(pipeline)
        else:
            loss = pipeline.evaluate_loss(self._evaluate)
        self._held_out.append((step, loss))
        if self._schedules and loss is not None:
            pipeline.schedulers.step(loss)
        wishes = [callback.on_evaluate(step, loss, pipeline) for callback in self._callbacks]
        return pipeline.any_process(any(wishes))


def _check_nobody_waits(evaluate_every: int | None, callbacks: Sequence[Callback]) -> None:
    """Raise ``InputError`` for wishes that only held-out data can fulfil."""
    if evaluate_every is not None:
        raise _nothing_to_evaluate(f"evaluate_every is {evaluate_every}")
    if any(isinstance(callback, EarlyStopping) for callback in callbacks):
        raise _nothing_to_evaluate("EarlyStopping waits for a held-out loss")


def _nothing_to_evaluate(who_asks: str) -> InputError:
    return InputError(
        f"{who_asks}, but there is nothing to evaluate; give evaluate=…: held-out data, or a "
        "function of the pipeline that returns a loss"
    )


def _batches(
    loader: Iterable[Any], epochs: int, evaluate_every: int | None
) -> Iterator[Iterator[Any]]:
    """The batches up to each evaluation."""
    if is_batch(loader):
        raise InputError(
            "the loader is a single batch; give an iterable of batches, as a DataLoader or [batch]"
        )
    expect(loader, Iterable, "the loader", "give an iterable of batches")
    each = (_epoch(loader, number) for number in range(epochs))
    if evaluate_every is None:
        return each
    return _stretches(chain.from_iterable(each), evaluate_every)


def _epoch(loader: Iterable[Any], number: int) -> Iterator[Any]:
    there_are_some = False
    for batch in loader:
        there_are_some = True
        yield batch
    if not there_are_some:
        again = "; an iterator can be read only once: give a list or a DataLoader" if number else ""
        raise InputError(f"the loader gives no batch in epoch {number + 1}{again}")


def _stretches(batches: Iterator[Any], length: int) -> Iterator[Iterator[Any]]:
    for first in batches:
        yield chain([first], islice(batches, length - 1))
