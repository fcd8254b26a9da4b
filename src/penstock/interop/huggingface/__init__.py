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

from penstock.interop.extras import need

need(("transformers", "accelerate"), "huggingface", "penstock.interop.huggingface")

from penstock.interop.huggingface.prepared import PreparedModel, prepare  # noqa: E402
from penstock.interop.huggingface.trainer import PenstockTrainer  # noqa: E402
from penstock.interop.spread import Spread  # noqa: E402

__all__ = ["PenstockTrainer", "PreparedModel", "Spread", "prepare"]
