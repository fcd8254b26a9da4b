"""Remedies for what people try on a ``Pipeline`` because a module or an optimizer has it."""

from __future__ import annotations

from collections.abc import Collection

from penstock.base.arguments import nearest
from penstock.base.errors import NameMissing

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
