"""The demo as people see it first, at its full size."""

from __future__ import annotations

import json

import pytest

from tests.kit.command_line import run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


def test_the_whole_demo_trains_as_one_device(tmp_path):
    answer = json.loads(run("demo", "--steps", "20", "-o", tmp_path, "--json"))
    assert answer["largest_loss_difference"] == answer["largest_parameter_difference"] == 0
    assert (tmp_path / "index.html").exists()
