"""What a model costs, layer by layer: ``Layer`` and ``LayerGraph``.

A profile is a chain of layers in execution order. It knows nothing of torch, so a plan can be made
on another machine, from a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from penstock.errors import InputError
from penstock.values import Value


class Layer(Value, frozen=True, kw_only=True):
    """One indivisible piece of a model and its measured costs for one microbatch.

    Attributes:
        name: qualified name in the model, as in ``state_dict`` keys.
        kind: class name of the module, for people.
        forward_seconds: one forward pass.
        backward_input_seconds: the gradient with respect to the layer's input.
        backward_weight_seconds: the gradient with respect to its parameters.
        update_seconds: the optimizer's step on its parameters, once per minibatch.
        activation_bytes: what autograd keeps from forward until backward.
        held_input_bytes: its input, if autograd does not keep that anyway; what a stage that begins
            with it holds besides.
        weight_kept_bytes: what stays between the two halves of a split backward.
        output_bytes: what travels to the next layer, and as a gradient back from it.
        parameter_bytes: parameters; their gradients take as much again.
        optimizer_bytes: the optimizer's state for them.
        signature: shapes and dtypes of the parameters, so that a plan can tell its model.
    """

    name: str
    kind: str = ""
    forward_seconds: float
    backward_input_seconds: float
    backward_weight_seconds: float
    update_seconds: float = 0.0
    activation_bytes: int = 0
    held_input_bytes: int = 0
    weight_kept_bytes: int = 0
    output_bytes: int = 0
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    signature: str = ""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if not isinstance(value, str) and not value >= 0:
                raise InputError(f"layer {self.name!r}: {field} is {value}, but must be ≥ 0")

    @property
    def backward_seconds(self) -> float:
        """The full backward: input and weight gradients together."""
        return self.backward_input_seconds + self.backward_weight_seconds

    @property
    def compute_seconds(self) -> float:
        """Forward and full backward of one microbatch."""
        return self.forward_seconds + self.backward_seconds


class LayerGraph(Value, frozen=True, kw_only=True):
    """A profiled model: its layers in execution order.

    Attributes:
        layers: in execution order, names unique, at least one.
        microbatch_size: rows of the sample that was profiled; every cost is for one such
            microbatch.
        input_bytes: size of the model's own input for one microbatch.
        hop_seconds: measured overhead of handing one message to a neighbouring worker, or 0.
        num_threads: intra-op threads it was measured with; a worker gets as many.
        device: what it was measured on, for people.
    """

    layers: tuple[Layer, ...]
    microbatch_size: int = 1
    input_bytes: int = 0
    hop_seconds: float = 0.0
    num_threads: int = 1
    device: str = ""

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError("a LayerGraph needs at least one layer")
        names = [layer.name for layer in self.layers]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise InputError(f"layer names must be unique, but {', '.join(repeated)} repeat")
        if self.microbatch_size < 1:
            raise InputError(f"microbatch_size is {self.microbatch_size}, but must be ≥ 1")
        if self.num_threads < 1:
            raise InputError(f"num_threads is {self.num_threads}, but must be ≥ 1")

    @property
    def fingerprint(self) -> str:
        """A hash of layer names and parameter shapes: the same for the same architecture."""
        return fingerprint((layer.name, layer.signature) for layer in self.layers)


def fingerprint(names_and_signatures: Iterable[tuple[str, str]]) -> str:
    """The hash by which a plan recognises its model (16 hexadecimal digits)."""
    text = "\n".join(f"{name}:{signature}" for name, signature in names_and_signatures)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
