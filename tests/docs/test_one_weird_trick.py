"""The example of convolutions by rows and linear layers by parameters says what it does."""

from __future__ import annotations

import sys

import pytest

from examples import one_weird_trick


@pytest.mark.soak  # it profiles a model that is large enough to be planned for
def test_the_planner_finds_the_trick_and_it_trains_as_one_device(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["one_weird_trick.py", "--steps", "2", "--rows", "8"])
    one_weird_trick.main()
    told = capsys.readouterr().out
    assert "0 Conv2d     data" in told
    assert "Linear     row" in told or "Linear     column" in told
    assert float(told.split()[-1]) < 1e-6
