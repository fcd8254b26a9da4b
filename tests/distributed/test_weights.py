"""Where weights are under torchrun, and what else than tensors may travel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "weights.py"


@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
def test_weights_that_others_have_trained_are_gathered_or_warned_of(transport):
    job = forked(JOB, 2, transport)
    assert set(job.reports) == {0, 1}, job.output
    for rank, report in job.reports.items():
        assert report["whole"] == []
        assert report["reading"] == {
            "before": 0,
            "state_dict": 1,
            "call": 1,
            "own": 0,
            "whole": 0,
            "evaluate": 0,
            "copy": rank,  # rank 0 has loaded the whole weights into it
            "after": 1,
        }
        refused, went_on = report["own classes"]
        assert re.search(r"it holds a .*Pair; .*message_types=\[Pair\]", refused)
        assert went_on == "True"
