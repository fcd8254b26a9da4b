"""Loops of Hugging Face's libraries, with a pipeline where they call the model.

``PenstockTrainer`` is a ``transformers.Trainer``, ``prepare`` for loops that are written as
accelerate's are. Needs the extra ``huggingface``. Decisions:

- Batches that make one update (``gradient_accumulation_steps``) go through the pipeline together,
  with one flush.
- What the loss of a microbatch is, ``Trainer.compute_loss`` says, that of a subclass or mixin too:
  it is called with a stand-in for the model that notes with what the model is called, and, where
  the last stage ends, with one that has the outputs.
- Where the loss is a sum over items, divided by the number that it is told, it is told 1, and the
  sum over all microbatches is divided: what ``Trainer`` computes, whatever it counts as items.
- Gradients come to lie in the model's own parameters, so that clipping, the optimizer, its
  scheduler, callbacks, files and resuming are all ``Trainer``'s own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.base.values import expect
from penstock.interop.loss_pipeline import (
    HasLossPipeline,
    LossPipeline,
    OutputsAreGone,
    in_microbatches,
)
from penstock.interop.spread import Spread, need

need(("transformers", "accelerate"), "huggingface", "penstock.interop.huggingface")

from penstock.interop.huggingface_trainer import PenstockTrainer, items_of  # noqa: E402

__all__ = ["PenstockTrainer", "PreparedModel", "Spread", "prepare"]

BatchLoss = Callable[[Any, dict[str, Any]], Tensor]


class PreparedModel(HasLossPipeline, nn.Module):
    """A model that is called with batches, and runs each of them through a pipeline.

    In training mode a call gives an object with a ``loss``, whose ``backward()`` adds the gradients
    to the parameters' own; the outputs are gone with their microbatches. In evaluation mode, or
    under ``torch.no_grad``, it gives what the model gives.

    Args:
        module: the model.
        spread: how.
        loss: from (outputs, the inputs of one microbatch) to a scalar; by default the model's own,
            ``outputs.loss``.

    Attributes:
        module: the model, to be saved.
    """

    def __init__(
        self, module: nn.Module, spread: Spread | None = None, loss: BatchLoss | None = None
    ) -> None:
        super().__init__()
        spread = Spread() if spread is None else spread
        expect(spread, Spread, "spread", "give penstock.interop.spread.Spread(stages=2)")
        self.module = module
        self._spread = spread
        takes = inspect.signature(module.forward).parameters
        self._own = LossPipeline(
            module,
            spread,
            loss or _own_loss,
            constants={"use_cache": False} if "use_cache" in takes else None,
            name="prepare",
        )
        self.train(module.training)

    @property
    def _loss_pipeline(self) -> LossPipeline:
        return self._own

    def forward(self, **batch: Any) -> Any:
        """Run a batch, forward and backward or forward only.

        Args:
            batch: the keywords of the model's ``forward``, rows first.

        Raises:
            InputError: no row of the batch has a label that counts.
        """
        if not (self.training and torch.is_grad_enabled()):
            return self._own.evaluate(batch)
        parts = in_microbatches(batch, self._spread.microbatches)
        weighed = [(part, items) for part in parts if (items := items_of(self.module, part))]
        if not weighed:
            raise InputError("no label counts in this batch: all are -100")
        given = [part for part, _ in weighed]
        weights = [float(items) for _, items in weighed]
        return OutputsAreGone(loss=self._own.loss(given, given, weights=weights))

    def close(self) -> None:
        """End the pipeline's workers; the next batch would start them again."""
        self._own.close()


def _own_loss(outputs: Any, inputs: dict[str, Any]) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        raise InputError(
            f"the model gives no loss for {', '.join(inputs)}; give it labels, or give prepare a "
            "function, as loss=lambda outputs, batch: …"
        )
    return loss


def prepare(
    model: nn.Module,
    *others: Any,
    spread: Spread | None = None,
    loss: BatchLoss | None = None,
) -> Any:
    """Prepare a model for a loop that is written as accelerate's are.

    Losses and gradients are those of the model up to rounding, but for what random layers draw.
    What an ``accelerate.Accelerator`` prepares beside the model (optimizers, loaders, schedulers)
    it goes on preparing; the model is not for it.

    Args:
        model: any that can be captured, or has a spine.
        others: optimizers of the model's own parameters, loaders, schedulers; they are given back
            as they are.
        spread: the plan, or how to make one when the first batch comes.
        loss: from (outputs, the inputs of one microbatch) to a scalar, a mean over labels that are
            not −100, or over rows if there are no ``labels``; by default the model's own.

    Returns:
        The ``PreparedModel`` and all others, in the order in which they were given; alone if there
        are no others.

    Raises:
        InputError: this process is one of several, or an optimizer has parameters that are not the
            model's.
    """
    own = {id(parameter) for parameter in model.parameters()}
    for other in others:
        groups = getattr(other, "param_groups", [])
        if any(id(parameter) not in own for group in groups for parameter in group["params"]):
            raise InputError(
                f"{type(other).__name__} has parameters that are not the model's, so that it would "
                "not train it; make it of model.parameters()"
            )
    prepared = PreparedModel(model, spread, loss)
    return (prepared, *others) if others else prepared
