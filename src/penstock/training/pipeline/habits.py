"""Remedies for what people try on a ``Pipeline`` because a module or an optimizer has it."""

from __future__ import annotations

from penstock.base.errors import InputError

_CALL = "step(inputs, targets) trains on a minibatch, evaluate(inputs) gives outputs"
_MODEL = "the model stays yours, so ask it"
_BEFORE = "before the pipeline is built"
_MODES = (
    "step() trains in the modes that the model's layers have; evaluate() and evaluate_loss() "
    "switch to evaluation and back"
)

_ADD_UP = "step() updates by itself and leaves no gradients; step(…, update=False) lets them add up"
_DEVICES = "each stage goes to its rank's device by itself; Pipeline(…, devices=…) says which"
REMEDIES = {
    "forward": _CALL,
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


class NoSuchMethod(InputError, AttributeError):
    """A pipeline does not have what was asked for; another method does it."""


def nothing_like(name: str) -> AttributeError:
    """Why a pipeline has no attribute of a name."""
    if name == "__call__":
        return NoSuchMethod(f"a Pipeline cannot be called: {_CALL}")
    if name in REMEDIES:
        return NoSuchMethod(f"a Pipeline has no {name}: {REMEDIES[name]}")
    return AttributeError(f"'Pipeline' object has no attribute {name!r}")
