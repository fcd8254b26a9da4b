"""The example with compiled stages."""

from __future__ import annotations

import sys

import pytest

from examples import compiled_stages
from tests.kit.examples import more


@pytest.mark.parametrize("schedule", ["zb-v", more("1f1b")])
def test_compiled_stages_give_what_eager_mode_gives(schedule, monkeypatch, capsys):
    options = ["--schedule", schedule, "--backend", "aot_eager", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["compiled_stages.py", *options])
    compiled_stages.main()
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("compiled ")
    assert float(last.split()[-2]) < 1e-5
