"""Clocks of several hosts, played by processes that read theirs wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.run.drive.clocks import NUM_EXCHANGES
from tests.distributed.jobs.clocks import AHEAD
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "clocks.py"


@pytest.mark.parametrize("hosts", ["a,b", "a,b,c", "b,a,b"])
def test_the_offset_of_every_host_is_found(hosts):
    job = forked(JOB, 1 + len(hosts.split(",")), hosts)
    assert job.returncode == 0, job.output
    assert len(job.reports) == len(hosts.split(","))
    for report in job.reports.values():
        assert report["offsets"] == job.reports[1]["offsets"]
    first, *others = hosts.split(",")
    own, *found = job.reports[1]["offsets"]
    assert own == 0
    for rank, (host, offset) in enumerate(zip(others, found, strict=True), start=2):
        if host == first:
            assert offset == 0
        # The quickest round trip takes no longer than all of them on average.
        round_trip = job.reports[rank]["seconds"] / NUM_EXCHANGES
        assert abs(offset - (AHEAD[host] - AHEAD[first])) <= round_trip / 2
