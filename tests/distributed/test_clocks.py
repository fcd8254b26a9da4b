"""Clocks of several hosts, played by processes that read theirs wrongly."""

from __future__ import annotations

from pathlib import Path

from penstock.engine.run.drive.joining import NUM_EXCHANGES
from tests.distributed.jobs.clocks import AHEAD
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "clocks.py"
PLACES = ("a,b", "a,b,c", "b,a,b")
"""The hosts of ranks 1, 2 and so on."""


def test_the_offset_of_every_host_is_found():
    job = forked(JOB, 4, *PLACES)
    assert job.returncode == 0, job.output
    for hosts in PLACES:
        reports = {rank: told[hosts] for rank, told in job.reports.items() if hosts in told}
        assert len(reports) == len(hosts.split(","))
        for report in reports.values():
            assert report["offsets"] == reports[1]["offsets"]
        first, *others = hosts.split(",")
        own, *found = reports[1]["offsets"]
        assert own == 0
        for rank, (host, offset) in enumerate(zip(others, found, strict=True), start=2):
            if host == first:
                assert offset == 0
            # The quickest round trip takes no longer than all of them on average.
            round_trip = reports[rank]["seconds"] / NUM_EXCHANGES
            assert abs(offset - (AHEAD[host] - AHEAD[first])) <= round_trip / 2
