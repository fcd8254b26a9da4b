"""The error to expect of an estimate, from how far earlier ones were off.

Medians of ``python -m benchmarks.predicting.published`` (2026-11) by software, whose runs are all
of transformers, and of ``benchmarks.predicting.estimates`` for a measured CPU, by kind of model.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from penstock.core.catalogue.parts import Hardware, Software


class ExpectedError(NamedTuple):
    """An error as a share, and from what it is known."""

    share: float
    basis: str


_COMPARED = ("a100", "h100", "b200", "b300", "gb200", "gb300")
_BY_SOFTWARE = {
    "megatron-2023": ExpectedError(0.06, "median of 837 published runs on A100"),
    "megatron-deepspeed-2022": ExpectedError(0.07, "median of 50 published runs on A100"),
    "megatron-core": ExpectedError(0.05, "median of 12 published runs on one B200 host"),
    "megatron-bridge": ExpectedError(0.08, "median of 45 published runs on H100 and Blackwell"),
    "llm-foundry": ExpectedError(0.05, "median of 139 published runs on A100"),
}
_OF_TORCH = ExpectedError(0.08, "median of 12 published runs of torchtitan on H100")
_MEASURED = "on one measured CPU"
ModelKind = Literal["transformer", "convolution", "recurrent", "other"]
"""Of what most of a model's products are."""

_OF_CPU: dict[ModelKind, ExpectedError] = {
    "transformer": ExpectedError(0.04, f"median of four transformers {_MEASURED}"),
    "convolution": ExpectedError(0.10, f"median of three convolutional models {_MEASURED}"),
    "recurrent": ExpectedError(0.13, f"the worse of two recurrent models {_MEASURED}"),
    "other": ExpectedError(0.07, f"median of ten models {_MEASURED}"),
}
_OF_NOBODY = 0.25


def expected_error(device: Hardware, software: Software, kind: ModelKind) -> ExpectedError:
    """The median error of steps that were predicted for hardware, software and a model like
    these."""
    if device.kind == "cpu":
        return _OF_CPU[kind]
    if not device.name.startswith(_COMPARED):
        return ExpectedError(_OF_NOBODY, "a guess: no published run on it was compared")
    if kind != "transformer":
        return ExpectedError(_OF_NOBODY, "a guess: published runs compared are of transformers")
    return _BY_SOFTWARE.get(software.name, _OF_TORCH)
