"""Fixtures and settings for all tests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("penstock", deadline=None, print_blob=True)
settings.load_profile("penstock")


@pytest.fixture(autouse=True)
def one_intra_op_thread():
    """Kernels sum in another order with more threads; bit-equality needs the same number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
