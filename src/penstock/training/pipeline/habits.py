"""Remedies for what people try on a ``Pipeline`` because a module or an optimizer has it, and
lines on steps that go without an error and are not what people mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from penstock.base.arguments import nearest
from penstock.base.errors import NameMissing
from penstock.base.telling import tell

_CALL = "step(inputs, targets) trains on a minibatch, evaluate(inputs) gives outputs"
_LOOP = "pk.fit(pipeline, loader) trains on a loader, and so does a loop over steps(loader)"
_MODEL = "the model stays yours, so ask it"
_BEFORE = "before the pipeline is built"
_MODES = (
    "step() trains in the modes that the model's layers have; evaluate() and evaluate_loss() "
    "switch to evaluation and back"
)

_ADD_UP = "step() updates by itself and leaves no gradients; step(…, update=False) lets them add up"
_DEVICES = "each stage goes to its rank's device by itself; Pipeline(…, devices=…) says which"
_FACTORY = (
    "it belongs to the optimizer, of which Pipeline gets a function: "
    "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
)
_PLANNED = "the plan says it: pk.plan(graph, cluster, microbatches=…, stages=…, schedule=…)"
_AUTOCAST = "run steps under torch.autocast, or convert the model before it is profiled"
_MASTERS = (
    "convert the model to bfloat16 and wrap the optimizer's function: "
    "optimizer=pk.optimizers.master_weights(…) keeps float32 masters and sums, in every reducer"
)
ARGUMENTS = {
    "lr": _FACTORY,
    "learning_rate": _FACTORY,
    "weight_decay": _FACTORY,
    "momentum": _FACTORY,
    "optimizer_kwargs": _FACTORY,
    "optimizer_args": _FACTORY,
    "optimizer_params": _FACTORY,
    "scheduler_kwargs": "it belongs to the scheduler, of which Pipeline gets a function: "
    "lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer)",
    "microbatches": _PLANNED,
    "num_microbatches": _PLANNED,
    "n_microbatches": _PLANNED,
    "chunks": _PLANNED,
    "schedule": _PLANNED,
    "stages": _PLANNED,
    "num_stages": _PLANNED,
    "cuts": _PLANNED,
    "balance": _PLANNED,
    "batch_size": "a minibatch has the rows that step(inputs, targets) is given",
    "epochs": "pk.fit(pipeline, loader, epochs=…) has it",
    "amp": _AUTOCAST,
    "dtype": _AUTOCAST,
    "precision": _AUTOCAST,
    "mp_policy": _MASTERS,
    "mixed_precision": _MASTERS,
    "backend": "transport= says how messages travel",
    "recompute": "the plan says it: plan.recomputing(…)",
    "checkpoint": "the plan says it: plan.recomputing(…); saving is pipeline.save(folder)",
}
"""By the name of an argument that people give to ``Pipeline``, what does it."""

BATCH = (
    "a batch is one value: step(inputs, targets), or step(batch) for a mapping with the targets "
    "inside (under the key that Pipeline(…, labels=…) names)"
)
EVALUATED = "the inputs are one value: a tensor, or tensors in a tuple or a mapping"

REMEDIES = {
    "forward": _CALL,
    "predict": _CALL,
    "inference": _CALL,
    "train_step": _CALL,
    "training_step": _CALL,
    "train_batch": _CALL,
    "eval_batch": _CALL,
    "fit": _LOOP,
    "train_epoch": _LOOP,
    "model": "the model stays yours: threads train it in place, and gather_state_dict() has the "
    "weights of all processes",
    "loss": "step(inputs, targets) and evaluate_loss(inputs, targets) return it",
    "lr": "optimizers.learning_rates has those of all groups, optimizers.param_groups sets them",
    "backward": "step(inputs, targets) runs forwards, backwards and the update, and gives the loss",
    "train": _MODES,
    "eval": _MODES,
    "zero_grad": _ADD_UP,
    "no_sync": _ADD_UP,
    "to": _DEVICES,
    "cuda": _DEVICES,
    "cpu": _DEVICES,
    "half": f"convert the model {_BEFORE}, or run steps under torch.autocast",
    "bfloat16": f"convert the model {_BEFORE}, or run steps under torch.autocast",
    "float": f"convert the model {_BEFORE}",
    "double": f"convert the model {_BEFORE}",
    "parameters": f"{_MODEL}; optimizers has those of this process's stages in their groups",
    "named_parameters": f"{_MODEL}; state_dict() has this process's weights by their names",
    "buffers": _MODEL,
    "modules": _MODEL,
    "children": _MODEL,
    "module": _MODEL,
    "requires_grad_": f"freeze layers of the model {_BEFORE}",
    "apply": f"initialise the model {_BEFORE}, or give initial_weights=…",
    "register_forward_hook": f"register hooks on the model's layers {_BEFORE}",
    "load_state_dict": f"load(path) reads a checkpoint; or load the model {_BEFORE}, or give "
    "initial_weights=…",
    "compile": f"compile the model's layers {_BEFORE}",
    "optimizer": "optimizers has those of this process's stages",
    "scheduler": "schedulers has those of this process's stages",
}
"""By the name of what is tried, what does it."""


_Seen = tuple[int, int]


class SilentTraining:
    """Tells, once each, of steps that look like training and are not, or not of what is meant.

    Lines, and no warnings: both may be meant, and a program that makes errors of warnings goes on.

    Args:
        model: the user's.
        without_optimizer: the parameters that steps give gradients and do not update.
    """

    def __init__(self, model: nn.Module, without_optimizer: Sequence[nn.Parameter]) -> None:
        self._model = model
        self._watched = list(without_optimizer)
        self._after: list[_Seen] = []
        self._knows_mode = False

    def before(self) -> None:
        """A step that updates is about to begin."""
        if not self._knows_mode and not self._model.training:
            self._knows_mode = True
            self._tell_of_mode()
        if self._after and self._seen() == self._after:
            self._watched, self._after = [], []
            tell(
                "this Pipeline has no optimizer, so step() changes no weight: it adds gradients up "
                "in .grad, and nobody has used or cleared those of the step before. Give "
                "Pipeline(…, optimizer=lambda parameters: torch.optim.AdamW(parameters)) to train; "
                "to add up on purpose, write step(…, update=False); for the loss alone, "
                "evaluate_loss(…)"
            )

    def after(self) -> None:
        """The step has ended well."""
        self._after = self._seen()

    def _seen(self) -> list[_Seen]:
        """How often weights were written that have gradients, and these."""
        return [
            (parameter._version, parameter.grad._version)
            for parameter in self._watched
            if parameter.grad is not None
        ]

    def _tell_of_mode(self) -> None:
        modules = [*self._model.modules()]
        differing = next((module for module in modules if _differs_by_mode(module)), None)
        if differing is not None and not any(module.training for module in modules):
            tell(
                "the model is in evaluation mode, in which step() trains it without what "
                f"{type(differing).__name__} does in training; call model.train() before, or "
                "leave it so if that is meant"
            )


def _differs_by_mode(module: nn.Module) -> bool:
    """Whether a module of torch computes otherwise in training than in evaluation."""
    dropout = getattr(module, "p", 0.0) if isinstance(module, _DropoutNd) else 0.0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        dropout = module.dropout
    return dropout > 0 or (isinstance(module, _NormBase) and module.track_running_stats)


def nothing_like(name: str, names: Collection[str] = ()) -> AttributeError:
    """Why a pipeline has no attribute of a name.

    Args:
        names: those that it has.
    """
    if name == "__call__":
        return NameMissing(f"a Pipeline cannot be called: {_CALL}")
    if name in REMEDIES:
        return NameMissing(f"a Pipeline has no {name}: {REMEDIES[name]}")
    near = None if name.startswith("_") else nearest(name, names)
    if near is not None:
        return NameMissing(f"a Pipeline has no {name}; it has {near}, if that is meant")
    return AttributeError(f"'Pipeline' object has no attribute {name!r}")
