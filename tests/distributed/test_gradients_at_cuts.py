"""A job of processes between which a leaf keeps the ``requires_grad`` that it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "masked.py"


@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
def test_a_padding_mask_is_trained_in_no_process(transport):
    done = forked(JOB, 2, transport)
    assert done.returncode == 0, done.output
    assert done.reports == {0: [], 1: []}
