"""docs/lectures-results.md is what ``benchmarks.lectures`` says."""

import pytest

from benchmarks.lectures import answers
from benchmarks.lectures.__main__ import PAGE, shown
from benchmarks.lectures.claims import SPEED_UPS

QUICK = ("BytePS", "GPipe")


def test_the_page_has_every_part():
    text = PAGE.read_text()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [
        *answers.PARTS,
        "Not here",
    ]
    for row in SPEED_UPS:
        assert f"{row.model}, {row.hosts}×{row.devices}" in text


@pytest.mark.parametrize("title", QUICK)
def test_its_rows_are_todays_predictions(title):
    text = PAGE.read_text()
    rows = shown([*answers.PARTS[title]()])
    assert rows
    for row in rows:
        assert f"| {' | '.join(row)} |" in text


def test_a_stream_is_as_fast_as_its_host_issues_kernels():
    small = answers.stream_speed_up(10, 16, 5, 32)
    # A graph that is replayed does not wait for the host; small pictures do.
    assert all(eager <= replayed for eager, replayed in zip(*small, strict=True))
    assert small.eager[-1] < small.replayed[-1]
