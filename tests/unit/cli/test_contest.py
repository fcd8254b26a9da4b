"""``penstock contest``: what it asks for, what it shows, and what it refuses before it trains."""

from __future__ import annotations

import json
from math import inf

import pytest
from click.testing import CliRunner

from penstock.base.errors import InputError
from penstock.cli import penstock
from penstock.core.cluster import Link
from penstock.drawing.contest import ContestRecord, Entry, LossPoint
from penstock.trial import contest as contest_room


def entry(method, title, **more):
    return Entry(
        method=method,
        title=title,
        where="1 thread",
        predicted_seconds=0.1,
        step_seconds=0.1,
        losses=(LossPoint(step=0, loss=2.0), LossPoint(step=4, loss=1.0)),
        **more,
    )


@pytest.fixture
def asked(monkeypatch):
    """What the verb asks for; it gets a record with one method that computes something else."""
    calls = []

    def recorded(load, **options):
        calls.append({"load": load, **options})
        return ContestRecord(
            title="small",
            notes=("On two cores.",),
            num_devices=2,
            num_microbatches=4,
            num_steps=4,
            entries=(
                entry("one-device", "one device"),
                entry("gpipe", "GPipe", difference=0.5, reason="it does not compute the same"),
            ),
        )

    monkeypatch.setattr(contest_room, "run_contest", recorded)
    return calls


def run(*words):
    return CliRunner().invoke(penstock, ["contest", *words])


def test_a_contest_is_quick_unless_asked(asked):
    run("tests.kit.small_workload:workload")
    run("tests.kit.small_workload:workload", "--full", "-p", "4", "-m", "2", "--on", "emulated")
    run(
        "tests.kit.small_workload:workload",
        "--steps",
        "7",
        "--methods",
        "GPipe, 1f1b",
        "--link",
        "8Mbit/s",
    )
    quick, full, given = asked
    assert quick["load"]().name == "small"
    assert (quick["num_steps"], quick["seconds"], quick["stage"]) == (40, 60.0, None)
    assert (full["num_steps"], full["seconds"], full["stage"]) == (200, inf, "emulated")
    assert (full["num_devices"], full["num_microbatches"]) == (4, 2)
    assert (given["num_steps"], given["seconds"]) == (7, inf)
    assert given["methods"] == ["gpipe", "1f1b"]
    assert quick["link"] is None and given["link"] == Link(bytes_per_second=1e6)


@pytest.mark.usefixtures("asked")
def test_it_shows_tables_and_sentences_and_fails_if_losses_do(tmp_path):
    shown = run("-o", str(tmp_path / "contest.html"))
    assert shown.exit_code == 1
    assert "NOT what one device computes: GPipe." in shown.output
    assert "GPipe did not run: it does not compute the same" in shown.output
    assert "100 ms" in shown.output and "On two cores." in shown.output
    assert "a contest of methods" in (tmp_path / "contest.html").read_text()
    record = json.loads(run("--json").stdout)
    assert [row["method"] for row in record["entries"]] == ["one-device", "gpipe"]


@pytest.mark.usefixtures("asked")
def test_standard_output_gets_everything_and_nothing_else():
    assert json.loads(run("-o", "-").stdout) == json.loads(run("--json").stdout)


@pytest.mark.parametrize(("reason", "status"), [("", 0), ("no luck", 1)])
def test_a_contest_in_which_no_method_ran_fails(monkeypatch, reason, status):
    record = ContestRecord(
        title="small",
        num_devices=2,
        num_microbatches=4,
        num_steps=4,
        entries=(entry("one-device", "one device", reason=reason),),
    )
    monkeypatch.setattr(contest_room, "run_contest", lambda *_, **__: record)
    shown = run()
    assert shown.exit_code == status
    assert ("No method ran" in shown.output) == bool(status)


def test_what_cannot_be_is_refused_before_anything_trains(asked, tmp_path):
    for words, said in (
        (["-o", "contest.png"], "end the name in .html, .svg, .md, .json"),
        (["--link", "0Mbit/s"], "over links of 0Mbit/s nothing would arrive"),
        (["--link", ""], "'' is not a bandwidth"),
    ):
        refused = run(*words)
        assert isinstance(refused.exception, InputError) and said in str(refused.exception)
    refused = run("-o", str(tmp_path / "no" / "contest.md"))
    assert refused.exit_code == 2 and "there is no folder" in refused.output
    assert not asked
