"""Every pipeline of a test session on emulated devices, whatever the tests ask for; a plugin.

``pytest -p tests.kit.accelerator.everywhere tests/numerics/test_all_families.py``: tests that were
written for the CPU prove that devices change no bit. What pipelines return is brought to the CPU,
where the tests compare it.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import penstock as pk
from penstock.engine.device import accelerators
from penstock.engine.model import tree
from penstock.engine.run import assembly
from penstock.engine.run.materialising import place_buffers, place_parameters
from tests.kit.accelerator import own_process
from tests.kit.accelerator.device_module import NAME
from tests.kit.accelerator.devices import register

_NUM_DEVICES = 3  # so that some ranks share one where there are four


def _devices_of_ranks(given, on_accelerator, ranks, first=0):
    if given is None:
        given = [f"{NAME}:{rank % _NUM_DEVICES}" for rank in range(len(on_accelerator))]
    return accelerators.devices_of_ranks(given, on_accelerator, ranks, first)


def _on_cpu(value):
    return tree.replace(Tensor, lambda tensor: tensor.cpu(), value)


def _bringing(method):
    @functools.wraps(method)
    def bringing(self, *args, **options):
        return _on_cpu(method(self, *args, **options))

    return bringing


def _bringing_each(method):
    @functools.wraps(method)
    def bringing(self, *args, **options):
        values = method(self, *args, **options)
        try:
            for value in values:
                yield _on_cpu(value)
        finally:
            values.close()

    return bringing


def _on_host(function):
    """The function, which sees all tensors on the CPU."""

    @functools.wraps(function)
    def compared(*args, **options):
        return function(*_on_cpu(list(args)), **options)

    return compared


def _closing(close):
    @functools.wraps(close)
    def closing(self, *args, **options):
        close(self, *args, **options)
        cpu = torch.device("cpu")
        place_parameters(self._model, cpu)
        place_buffers(self._model.modules(), cpu)

    return closing


@pytest.fixture(autouse=True)
def _each_test_for_itself():
    """What one test does wrong must not fail the others."""
    own_process._put_to_rest(register())
    yield
    register().check()


def pytest_configure() -> None:
    """Only where it is asked for: whoever collects tests imports this module, too."""
    register()
    assembly.devices_of_ranks = _devices_of_ranks
    for name in ("step", "evaluate", "state_dict"):
        setattr(pk.Pipeline, name, _bringing(getattr(pk.Pipeline, name)))
    pk.Pipeline.steps = _bringing_each(pk.Pipeline.steps)
    pk.Pipeline.close = _closing(pk.Pipeline.close)
    torch.testing.assert_close = _on_host(torch.testing.assert_close)
    torch.equal = _on_host(torch.equal)
    torch.allclose = _on_host(torch.allclose)
