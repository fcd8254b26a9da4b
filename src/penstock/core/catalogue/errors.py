"""The error to expect of an estimate, from what is known of earlier ones."""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.catalogue.parts import Hardware, Software


class ExpectedError(NamedTuple):
    """An error as a share, and from what it is known."""

    share: float
    basis: str


def expected_error(device: Hardware, software: Software) -> ExpectedError:
    """The median error of steps that were predicted for hardware and software like these."""
    if device.kind == "cpu":
        return ExpectedError(0.15, "ten models on one measured CPU")
    return ExpectedError(0.15, "published runs on A100, H100 and B200")
