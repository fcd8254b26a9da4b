"""The example in which torch's runtime trains by a plan."""

from __future__ import annotations

import sys

import pytest

from examples import torch_pipelining


@pytest.mark.soak  # its processes import torch
@pytest.mark.parametrize("schedule", ["zb-v", "1f1b"])
def test_torch_trains_by_the_plan_and_its_weights_come_back(schedule, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torch_pipelining.py", "--schedule", schedule])
    torch_pipelining.main()
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("trained by torch, evaluated by Penstock: ")
    assert int(told.split()[-2].rstrip("%")) > 90
