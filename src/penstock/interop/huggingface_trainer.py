"""``Trainer`` whose batches go through a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from penstock.base.errors import InputError
from penstock.base.values import expect
from penstock.engine.model.spine import evaluation_mode
from penstock.interop.loss_pipeline import (
    HasLossPipeline,
    LossPipeline,
    in_microbatches,
    let_state_follow,
)
from penstock.interop.spread import Spread, check_one_process

_DOES_NOT_COUNT = -100
"""A label of transformers that is no item."""
_UPDATES_IN_BACKWARD = ("lomo", "adalomo")


class PenstockTrainer(HasLossPipeline, Trainer):
    """A ``transformers.Trainer`` that trains and evaluates through a pipeline in this process.

    All arguments are ``Trainer``'s but ``spread``. Losses and weights are those of ``Trainer`` on
    one device up to rounding: gradients are summed over other microbatches, and dropout draws from
    the seed, the step, the microbatch and the layer, so that resumed runs draw alike.

    Args:
        spread: the plan, or how to make one when the first batch comes.

    Raises:
        InputError: arguments that a pipeline in one process cannot honour; it says which.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        spread: Spread | None = None,
        **named: Any,
    ) -> None:
        spread = Spread() if spread is None else spread
        expect(spread, Spread, "spread", "give penstock.interop.spread.Spread(stages=2)")
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        _check(args)
        args._n_gpu = min(args.n_gpu, 1)  # or Trainer would copy the model to all of them
        super().__init__(model, args, *positional, **named)
        self.spread = spread
        self._splits: dict[tuple[Any, ...], LossPipeline] = {}
        self._of_model: nn.Module | None = None
        self._waiting: list[dict[str, Any]] = []
        self._sums_items: bool | None = None  # not known yet

    @property
    def _trained(self) -> nn.Module:
        assert self.model is not None
        return self.model

    @property
    def _loss_pipeline(self) -> LossPipeline:
        if not self._splits:
            raise InputError("there is no pipeline before the first batch; train or evaluate first")
        return next(iter(self._splits.values()))

    def _split_for(self, inputs: Mapping[str, Any]) -> LossPipeline:
        """The pipeline of the model as it is called with these inputs, which may lack labels."""
        if self._of_model is not self.model:  # model_init makes another one for each train()
            self.close()
            self._of_model = self.model
            # What casts outputs for mixed precision would be traced.
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        kind = (self._num_stated, *sorted(inputs))
        if kind not in self._splits:
            self._splits[kind] = LossPipeline(
                self._trained,
                self.spread,
                self._loss_of_microbatch,
                constants={"num_items_in_batch": self._num_stated} if self._num_stated else None,
                name="PenstockTrainer",
            )
        return self._splits[kind]

    def close(self) -> None:
        """End the pipeline's workers; the next batch would start them again."""
        while self._splits:
            self._splits.popitem()[1].close()

    def train(self, *positional: Any, **named: Any) -> Any:
        """As ``Trainer.train``."""
        self._waiting.clear()  # of a run that ended between the batches of an update
        return super().train(*positional, **named)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch.

        In training, batches wait for the last one of their update, which then gives the loss of
        all, and the others 0.

        Args:
            model: ``Trainer``'s, or what stands for it.
            inputs: the batch.
            return_outputs: whether to give (loss, outputs); not in training.
            num_items_in_batch: how many items the batches of the update have together.
        """
        if isinstance(model, _StandIn):
            return super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch=num_items_in_batch
            )
        if return_outputs:
            raise InputError(
                "PenstockTrainer has no outputs beside the loss in training: they are gone with "
                "their microbatches; call evaluate() or predict()"
            )
        self._waiting.append(dict(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device, requires_grad=True)
        batches, self._waiting = self._waiting, []
        return self._loss_of_update(batches, num_items_in_batch)

    def _loss_of_update(self, batches: list[dict[str, Any]], num_items: Any) -> Tensor:
        """The loss of the batches that make one update, from one run of the pipeline.

        Batches wait for each other, so that there is one flush; ``Trainer`` divides what it gets by
        their number where the loss is no sum over all of their items.
        """
        self._learn_what_losses_are(batches[0], num_items)
        each = -(-self.spread.microbatches // len(batches))
        parts = [in_microbatches(batch, each) for batch in batches]
        given = [part for of_batch in parts for part in of_batch]
        if self._sums_items:
            weights, factor = [1.0] * len(given), len(given) / float(num_items)
        else:
            weights = [share for of_batch in parts for share in self._shares(of_batch)]
            factor = float(len(batches))
            # The mean over nothing is no number, not even times 0.
            given = [part for part, weight in zip(given, weights, strict=True) if weight]
            weights = [weight for weight in weights if weight]
        if not given:
            raise InputError(
                f"no label counts in the batches of step {self.state.global_step}: all are -100"
            )
        asked = [self._asked_of_model(part) for part in given]
        with self.accelerator.autocast():
            loss = self._split_for(asked[0]).loss(
                asked, given, weights=weights, factor=factor, number=self.state.global_step
            )
        if self.optimizer is not None:
            let_state_follow(self.optimizer)
        return loss.to(self.args.device)

    def _loss_of_microbatch(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        """A sum over the items of a microbatch, or a mean; called where the last stage ends."""
        gave = _GivenOutputs(self._trained, outputs)
        loss: Any = super().compute_loss(gave, dict(inputs), num_items_in_batch=self._num_stated)
        return cast(Tensor, loss)

    def _asked_of_model(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """With what ``compute_loss`` calls the model."""
        asked = _CallRecorder(self._trained)
        try:
            super().compute_loss(asked, dict(inputs), num_items_in_batch=self._num_stated)
        except _ModelIsCalledError:
            return asked.given
        raise InputError("compute_loss does not call the model, so that there is nothing to train")

    def _shares(self, parts: list[dict[str, Any]]) -> list[float]:
        """How much of a batch's items each of its microbatches has."""
        counts = [items_of(self._trained, part) for part in parts]
        return [count / max(sum(counts), 1) for count in counts]

    @property
    def _num_stated(self) -> int | None:
        """How many items the loss of a microbatch is told there are."""
        return 1 if self._sums_items else None

    @torch.no_grad()
    def _learn_what_losses_are(self, batch: dict[str, Any], num_items: Any) -> None:
        """See whether the loss is a sum over items, divided by the number that it is told.

        Many models take that number and make nothing of it; ``Trainer`` then adds up the means of
        accumulated batches. To do as it does, the model is asked twice, before it is spread.
        """
        if num_items is None or self._sums_items is not None:
            return
        part = in_microbatches(batch, self.spread.microbatches)[0]
        compute: Callable[..., Any] = super().compute_loss
        with evaluation_mode(self._trained), self.accelerator.autocast():
            once, half = (
                float(compute(self._trained, dict(part), num_items_in_batch=torch.tensor(count)))
                for count in (1.0, 2.0)
            )
        if once:  # 0 where none of these labels counts
            self._sums_items = abs(half - once) > abs(once) / 4

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Evaluate a batch through the pipeline; as ``Trainer.prediction_step``."""
        evaluates = _Evaluates(self._trained, self._evaluate_batch)
        return super().prediction_step(evaluates, inputs, prediction_loss_only, ignore_keys)

    def _evaluate_batch(self, inputs: dict[str, Any], num_items: Any) -> Any:
        """The model's outputs for a batch, with the loss that it would have given."""
        self._learn_what_losses_are(inputs, num_items)
        with self.accelerator.autocast():
            outputs = self._split_for(inputs).evaluate(inputs)
        if self._num_stated and isinstance(outputs, dict) and outputs.get("loss") is not None:
            outputs["loss"] = outputs["loss"] / num_items
        return outputs


class _StandIn(nn.Module):
    """A stand-in for the model, with which ``compute_loss`` is called.

    Args:
        model: for which it stands.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._name = type(model).__name__

    def _get_name(self) -> str:
        return self._name  # by which label smoothing knows language models


class _ModelIsCalledError(Exception):
    """``compute_loss`` has come to where it calls the model."""


class _CallRecorder(_StandIn):
    """Notes with what the model is called."""

    given: dict[str, Any]

    def forward(self, **inputs: Any) -> Any:
        inputs.pop("num_items_in_batch", None)
        self.given = inputs
        raise _ModelIsCalledError


class _GivenOutputs(_StandIn):
    """Gives what the model has given for a microbatch."""

    def __init__(self, model: nn.Module, outputs: Any) -> None:
        super().__init__(model)
        self._outputs = outputs

    def forward(self, **inputs: Any) -> Any:
        return self._outputs


class _Evaluates(_StandIn):
    """Gives what the pipeline gives for a batch."""

    def __init__(self, model: nn.Module, evaluate: Callable[[dict[str, Any], Any], Any]) -> None:
        super().__init__(model)
        self._evaluate = evaluate

    def forward(self, *, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        return self._evaluate(inputs, num_items_in_batch)


def _check(args: TrainingArguments) -> None:
    """Refuse what a pipeline in one process cannot honour.

    Raises:
        InputError: it says what, and what to do instead.
    """
    instead = "leave it out"
    refused = {
        "fp16": "use bf16=True, which needs no loss scaling",
        "fp16_full_eval": "use bf16=True, which evaluates under autocast",
        "bf16_full_eval": "use bf16=True, which evaluates under autocast",
        "deepspeed": instead,
        "fsdp": instead,
        "parallelism_config": instead,
        "torch_compile": "compile the model's layers, not the whole",
        "activation_checkpointing": "use a plan that recomputes, as plan.recomputing('layers')",
        "gradient_checkpointing": "use a plan that recomputes, as plan.recomputing('layers')",
    }
    for name, remedy in refused.items():
        if getattr(args, name, None):
            raise InputError(f"PenstockTrainer cannot honour {name} of TrainingArguments; {remedy}")
    optimizer = getattr(args.optim, "value", args.optim)
    if optimizer in _UPDATES_IN_BACKWARD:
        raise InputError(
            f"optim={optimizer!r} updates weights while it goes backward, which a pipeline does "
            "for several microbatches at once; take another optimizer"
        )
    check_one_process("PenstockTrainer")


def items_of(model: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Over how many items the loss of these inputs is a mean.

    Labels that are −100 do not count, nor do the first ones of rows from which the next token is
    predicted. Without labels, rows count.

    Args:
        inputs: keywords of the model's ``forward``.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor):
        return next(len(value) for value in inputs.values() if isinstance(value, Tensor))
    counted = labels[..., 1:] if _predicts_the_next(model) else labels
    return int(counted.ne(_DOES_NOT_COUNT).sum())


def _predicts_the_next(model: nn.Module) -> bool:
    shifts = getattr(model, "loss_function", None) is ForCausalLMLoss
    # Decoders behind an encoder are given what they see shifted already.
    return shifts and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
