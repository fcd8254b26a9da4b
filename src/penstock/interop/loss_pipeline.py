"""A loss whose ``backward()`` is a pipeline's: what fits into loops that are not Penstock's.

Whoever else has a training loop (``transformers``, Lightning, accelerate, or one's own) calls the
model, calls ``loss.backward()``, and steps an optimizer of the model's parameters. A pipeline goes
backward before the loss of the last microbatch is known. So it does both at once, sets the
gradients aside, and gives a loss whose ``backward()`` adds them to ``.grad``, times whatever the
loop has multiplied the loss by. Everything else stays the loop's own: clipping, optimizer,
scheduler, accumulation, files.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.engine.model import microbatches, tree
from penstock.engine.model.microbatches import Microbatches, Weight
from penstock.engine.run.recipe import Loss
from penstock.interop.spread import Spread, check_one_process
from penstock.planning.plans import Plan
from penstock.training.pipeline import Pipeline


class LossPipeline:
    """A pipeline without an optimizer, for loops that have one of the model's own parameters.

    Its ranks are threads of this process, and the model's own parameters get the gradients, so that
    whatever reads or writes the model (optimizers, ``state_dict``, files) needs to know nothing of
    it. It is built when the first batch comes. Not for two batches at once, and not for loops that
    call ``backward`` on a loss after the next one was made.

    Args:
        model: whose parameters are trained.
        spread: how.
        loss: from (output, targets) of one microbatch to a scalar tensor.
        constants: keywords with which the model is called beside its inputs; always the same.
        name: of this, for errors.

    Raises:
        InputError: this process is one of several.
    """

    def __init__(
        self,
        model: nn.Module,
        spread: Spread,
        loss: Loss,
        *,
        constants: Mapping[str, Any] | None = None,
        name: str = "a LossPipeline",
    ) -> None:
        check_one_process(name)
        self.model = model
        self._spread = spread
        self._loss = loss
        self._constants = {} if constants is None else constants
        self._layers = model
        self._pipeline: Pipeline | None = None
        self._closed = False

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that runs the batches; its ``timeline`` is that of the last one.

        Raises:
            InputError: there has been no batch yet.
        """
        if self._pipeline is None:
            raise InputError("there is no pipeline before the first batch; train or evaluate first")
        return self._pipeline

    @property
    def plan(self) -> Plan:
        """The one that is run.

        Raises:
            InputError: there has been no batch yet.
        """
        return self.pipeline.plan

    def loss(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        *,
        weights: Sequence[float] | None = None,
        factor: float = 1.0,
        number: int | None = None,
    ) -> Tensor:
        """Run a batch forward and backward.

        Args:
            inputs: those of each microbatch.
            targets: those of each microbatch; anything that the loss takes.
            weights: how much the loss of each microbatch counts in the mean over them; by default
                all count the same.
            factor: what the loss, and so its gradients, is multiplied by.
            number: of the batch in the run, from which random layers draw; by default batches are
                numbered from 0.

        Returns:
            The loss of the batch, a scalar. Its ``backward()`` adds the gradients to ``.grad``.

        Raises:
            ModelError: the model cannot be cut, or the plan is for another one.
            InputError: microbatches that do not fit together.
            StageError: a layer or the loss raised.
        """
        shares = [1.0] * len(inputs) if weights is None else weights
        weighted = [
            (torch.tensor([share], dtype=torch.float64), target)
            for share, target in zip(shares, targets, strict=True)
        ]
        pipeline = self._built(inputs[0], weighted[0])
        if number is not None:
            pipeline.num_steps = number
        if self._layers is not self.model and self.model.training:
            self._layers.train()  # which graph a captured layer follows is its own mode
        parameters = [*self.model.parameters()]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            value = pipeline.step(Microbatches(inputs), Microbatches(weighted))
            made = [(own, own.grad) for own in parameters if own.grad is not None]
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        assert value is not None  # results are told on every rank
        with torch.enable_grad():
            loss: Tensor = _KnownLoss.apply(_anchor(), value, Made(made))  # type: ignore[no-untyped-call]
            return loss if factor == 1.0 else loss * factor

    def loss_of_batch(
        self,
        inputs: Any,
        targets: Any,
        *,
        weight: Weight | None = None,
        number: int | None = None,
    ) -> Tensor:
        """Cut a batch into microbatches, and run it forward and backward.

        Args:
            inputs, targets: rows first, as for ``penstock.Pipeline.step``.
            weight: of what the loss is a mean, if not of rows: how many terms the targets of one
                microbatch contribute.
            number: as for ``loss``.

        Returns:
            The loss of the batch, as one device would give it; as ``loss``.

        Raises:
            InputError: inputs and targets that do not fit together; else as ``loss``.
        """
        rows = [
            microbatches.num_rows(value, name)
            for value, name in ((inputs, "inputs"), (targets, "targets"))
        ]
        if rows[0] != rows[1]:
            raise InputError(f"inputs have {rows[0]} rows, but targets have {rows[1]}")
        count = self._spread.microbatches
        parts = in_microbatches(targets, count)
        count_terms = weight or _rows
        return self.loss(
            in_microbatches(inputs, count),
            parts,
            weights=[float(count_terms(part)) for part in parts],
            number=number,
        )

    def evaluate(self, inputs: Any) -> Any:
        """Run the model on a batch, in evaluation mode and without gradients.

        Args:
            inputs: of the whole batch, rows first.

        Returns:
            The model's outputs for all rows.
        """
        return self._built(inputs, None).evaluate(inputs)

    def _built(self, inputs: Any, targets: Any) -> Pipeline:
        if self._pipeline is not None and not self._closed:
            return self._pipeline
        inputs = tree.replace(Tensor, _for_autograd, inputs)
        # The first batch may be one of an evaluation, and batches come in the order of one device.
        modes = torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[])
        with modes[0], modes[1], modes[2]:
            if self._pipeline is None:
                # What is captured is run under the caller's autocast, and is not traced with it.
                kind = next(self.model.parameters()).device.type
                plainly = torch.autocast(kind, enabled=False)
                with _called_with(self.model, self._constants), plainly:
                    self._layers = self._spread.layers_of(self.model, inputs)
                plan = self._spread.plan_for(self._layers, inputs, targets, self._weighted_loss)
            else:
                plan = self._pipeline.plan
            self._pipeline = Pipeline(
                self._layers,
                plan,
                loss=self._weighted_loss,
                weight=_weight,
                devices=self._spread.devices,
                transport="threads",
                stop_at_nan=False,  # what becomes of such a loss is for the loop to say
            )
        self._closed = False
        return self._pipeline

    def _weighted_loss(self, outputs: Any, targets: tuple[Tensor, Any]) -> Tensor:
        return self._loss(outputs, targets[1])

    def close(self) -> None:
        """End the workers; the next batch would start them again."""
        if self._pipeline is not None and not self._closed:
            self._closed = True
            self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HasLossPipeline:
    """Shows the plan and the pipeline of whatever trains through a ``LossPipeline``."""

    @property
    def _loss_pipeline(self) -> LossPipeline:
        raise NotImplementedError

    @property
    def plan(self) -> Plan:
        """The plan by which batches are run.

        Raises:
            InputError: there has been no batch yet.
        """
        return self._loss_pipeline.plan

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that runs batches. Its ``timeline`` is that of the last batch, or update
        where a loop accumulates.

        Raises:
            InputError: there has been no batch yet.
        """
        return self._loss_pipeline.pipeline


@contextmanager
def _called_with(model: nn.Module, constants: Mapping[str, Any]) -> Iterator[None]:
    """Whoever calls the model meanwhile also gives these keywords."""
    forward, own = model.forward, vars(model).get("forward")

    @functools.wraps(forward)
    def with_constants(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs, **constants)

    if constants:
        vars(model)["forward"] = with_constants
    try:
        yield
    finally:
        vars(model).pop("forward", None)
        if own is not None:
            vars(model)["forward"] = own


def _rows(targets: Any) -> float:
    return microbatches.num_rows(targets, "targets")


def _weight(targets: tuple[Tensor, Any]) -> float:
    return float(targets[0])


def _for_autograd(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one that was made in inference mode, as autograd can have it."""
    with torch.inference_mode(False):
        return tensor.clone() if tensor.is_inference() else tensor


def _anchor() -> Tensor:
    """A tensor by which autograd knows that a loss can go backward."""
    return torch.zeros((), requires_grad=True)


class Made:
    """Gradients that a pipeline has made, until ``backward()`` asks for them.

    Args:
        gradients: (parameter, its gradient).
    """

    def __init__(self, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        self._gradients: list[tuple[nn.Parameter, Tensor]] | None = [*gradients]

    def add(self, factor: Tensor) -> None:
        """Add them to ``.grad``, times a factor.

        Raises:
            InputError: they were added already.
        """
        if self._gradients is None:
            raise InputError(
                "this loss went backward already, and its gradients are gone; run the batch again"
            )
        gradients, self._gradients = self._gradients, None
        for parameter, gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)


class _KnownLoss(torch.autograd.Function):
    """A loss that is known, with gradients that are known."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, made: Made) -> Tensor:
        ctx.made = made
        return loss.detach().clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        ctx.made.add(upstream[0])
        return None, None, None


def in_microbatches(batch: Any, count: int) -> list[Any]:
    """Cut a batch by rows, into as many microbatches as it has rows at most.

    Args:
        batch: tensors nested in dictionaries, tuples and lists, rows first.
        count: how many.

    Raises:
        InputError: tensors that disagree in their rows.
    """
    plain = _plain(batch)
    rows = microbatches.num_rows(plain, "the batch")
    return microbatches.split(plain, min(count, rows), copied=False)


def _plain(batch: Any) -> Any:
    """A collator's own kind of dictionary as a plain one, which torch's tree helpers know."""
    return {**batch} if isinstance(batch, Mapping) else batch


def let_state_follow(optimizer: torch.optim.Optimizer) -> None:
    """Move what an optimizer keeps of each parameter to where the parameter is.

    A loop that resumes has loaded it before the first batch, and so before the model was spread.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            # Counters of steps have no dimensions, and may stay on the CPU.
            if isinstance(value, Tensor) and value.dim() and value.device != parameter.device:
                state[key] = value.to(parameter.device)


class OutputsAreGone:
    """The outputs of a model for a batch of which only the loss is left.

    Args:
        loss: of the batch; ``None`` where it is not known yet.
    """

    def __init__(self, loss: Tensor | None = None) -> None:
        if loss is not None:
            self.loss = loss

    def __getattr__(self, name: str) -> Any:
        raise _gone(repr(name))

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__(str(key))

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise _gone(getattr(function, "__name__", str(function)))


def _gone(asked: str) -> InputError:
    return InputError(
        f"{asked} was asked for outputs of a training step, and there are none: they were used up "
        "where the last stage ends, a microbatch at a time, by the loss; use nothing but the loss, "
        "and look at outputs in evaluation"
    )
