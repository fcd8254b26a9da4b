"""Which backend moves tensors between accelerators, and where tensors lie for it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from penstock.engine.device import accelerators
from penstock.engine.device.accelerators import (
    backend_of_accelerators,
    device_of,
    is_of_accelerators,
)


@pytest.fixture
def here(monkeypatch):
    """Says which kind of accelerator this process has."""

    def have(kind, available=True):
        monkeypatch.setattr(accelerators, "accelerator_kind", lambda: kind)
        monkeypatch.setattr(dist, "is_backend_available", lambda backend: available)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)

    return have


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("xpu", "xccl")])
def test_each_kind_has_its_own_backend(here, kind, backend):
    here(kind)
    assert backend_of_accelerators() == backend
    assert is_of_accelerators(backend)
    assert device_of(backend) == torch.device(kind, 1)
    assert device_of("gloo") == torch.device("cpu")
    here(kind, available=False)
    assert backend_of_accelerators() is None
    assert device_of(backend) == torch.device("cpu")


@pytest.mark.parametrize("kind", [None, "mps", "cpu"])
def test_without_one_tensors_lie_in_main_memory(here, kind):
    here(kind)
    assert not is_of_accelerators("gloo")
    assert device_of("gloo") == torch.device("cpu")


def test_an_emulated_accelerator_has_none(accelerator):
    assert backend_of_accelerators() is None
