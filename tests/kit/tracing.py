"""Loads what tracing a model loads: a process that is forked later need not do it for seconds."""

from __future__ import annotations

import torch
from torch import nn

from penstock.engine.tracing import capture

capture(nn.Linear(1, 1), torch.zeros(2, 1), verify=False)
