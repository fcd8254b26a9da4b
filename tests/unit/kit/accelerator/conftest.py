"""Two streams of one emulated device."""

from __future__ import annotations

import pytest
import torch

DEVICE = "emu:1"


@pytest.fixture
def side(accelerator):
    return torch.Stream(DEVICE)


@pytest.fixture
def main(accelerator):
    return torch.accelerator.current_stream(DEVICE)
