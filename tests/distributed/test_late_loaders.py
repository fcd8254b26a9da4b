"""What was first is told, whoever gives up for want of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "late_loaders.py"


@pytest.mark.parametrize(
    "transport", ["shared-memory", pytest.param("process-group", marks=pytest.mark.soak)]
)
def test_a_loaders_error_is_told_though_its_rank_waits_in_vain_for_another(transport):
    told = forked(JOB, 3, transport).reports
    assert told[1] == "OSError: disk gone"
    for rank in (0, 2):
        assert "the loader of rank 1 has raised an error behind" in told[rank], told
        assert "(OSError: disk gone)" in told[rank], told
