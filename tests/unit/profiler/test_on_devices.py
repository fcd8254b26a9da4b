"""Profiles of models on accelerators, which are emulated ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock as pk

pytestmark = pytest.mark.usefixtures("accelerator")


def test_a_model_is_measured_on_the_device_that_it_is_on():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 8))
    model, inputs = model.to("emu:2"), torch.randn(16, 64, device="emu:2")
    generator = torch.get_device_module("emu").get_rng_state("emu:2")
    graph = pk.profile(model, inputs, repeats=3)
    assert graph.device == "emu:2"
    assert "emu" in graph.software
    assert [layer.name for layer in graph.layers] == ["0", "1", "2", "3"]
    assert all(layer.forward_seconds > 0 for layer in graph.layers)
    assert sum(layer.backward_weight_seconds for layer in graph.layers) > 0
    assert graph.layers[0].parameter_bytes == 4 * (64 * 64 + 64)
    assert torch.equal(torch.get_device_module("emu").get_rng_state("emu:2"), generator)


def test_a_model_on_two_devices_is_no_model_to_measure():
    model = nn.Sequential(nn.Linear(4, 4).to("emu:0"), nn.Linear(4, 4).to("emu:1"))
    with pytest.raises(pk.errors.InputError, match=r"several devices \(emu:0, emu:1\)"):
        pk.profile(model, torch.randn(2, 4, device="emu:0"))
