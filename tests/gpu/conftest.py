"""The accelerators of this machine, whatever torch calls them."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.device.accelerators import accelerators
from tests.kit.on_devices import Places, hardware

EXACT = {"cuda": [(torch.backends.cudnn, "allow_tf32"), (torch.backends.cuda.matmul, "allow_tf32")]}
"""By kind of accelerator, what rounds to less than single precision unless it is switched off."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(params=["one device", "several devices"])
def places(request, monkeypatch) -> Places:
    """The accelerators: all ranks on one of them, or each on its own as far as there are."""
    here = accelerators()
    if not here:
        pytest.skip("torch knows of no accelerator on this machine")
    if request.param == "several devices" and len(here) == 1:
        pytest.skip(f"this machine has one accelerator, {here[0]}")
    for module, name in EXACT.get(here[0].type, ()):
        monkeypatch.setattr(module, name, False)
    count = 1 if request.param == "one device" else len(here)
    return hardware(here[0].type, count)
