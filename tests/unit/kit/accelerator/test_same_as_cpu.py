"""Small nets, trained three steps on a device and on the CPU: the weights are equal to the bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

from tests.kit.tiny_models import *  # noqa: F403

pytestmark = pytest.mark.usefixtures("accelerator")

DEVICE = "emu:1"
