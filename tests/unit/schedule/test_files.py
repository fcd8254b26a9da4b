"""Schedules and timelines as files."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from penstock.core.schedule.lower import add_communication
from tests.kit.command_line import run

FAMILIES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-v", "seq1f1b", "partime"]


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(FAMILIES), st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_a_schedule_comes_back_as_it_was(tmp_path_factory, name, ranks, times, lowered):
    schedule = pk.schedules.build(name, num_ranks=ranks, num_microbatches=ranks * times)
    schedule = add_communication(schedule) if lowered else schedule
    folder = tmp_path_factory.mktemp("schedules")
    for suffix in ("json", "csv"):
        path = folder / f"{name}.{suffix}"
        schedule.save(path)
        again = pk.Schedule.load(path)
        assert (again.ranks, again.name) == (schedule.ranks, schedule.name)
        assert suffix == "csv" or again.activations == schedule.activations
    timeline = pk.simulate(schedule)
    timeline.save(folder / "timeline.json")
    assert pk.Timeline.load(folder / "timeline.json") == timeline


def test_an_idle_rank_is_kept(tmp_path):
    schedule = pk.Schedule.of([[pk.Op.parse("0F0"), pk.Op.parse("0B0")], []])
    schedule.save(tmp_path / "idle.json")
    assert pk.Schedule.load(tmp_path / "idle.json").num_ranks == 2


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{}", "not a valid Schedule"),
        ("a.json", '{"name": "a", "ranks": ["0F0,0X0"]}', "0X0.*not an op"),
        ("a.json", '{"name": "a", "ranks": ["0F0"], "colour": 1}', "colour"),
        ("a.csv", "0F0,0Q0\n", "0Q0.*not an op"),
    ],
)
def test_what_holds_no_schedule_is_refused_with_its_name(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(pk.FileError, match=rf"(?s){name}.*{said}"):
        pk.Schedule.load(tmp_path / name)


def test_a_missing_timeline_is_a_file_error(tmp_path):
    with pytest.raises(pk.FileError, match="cannot read"):
        pk.Timeline.load(tmp_path / "none.json")


def test_the_command_line_reads_both_kinds(tmp_path):
    schedule = pk.schedules.build("zb-h1", num_ranks=2, num_microbatches=4)
    outputs = {}
    for suffix in ("json", "csv"):
        path = tmp_path / f"mine.{suffix}"
        schedule.save(path)
        assert "ok: 24 ops" in run("check", path)
        outputs[suffix] = json.loads(run("simulate", path, "--json"))
    assert outputs["json"]["makespan"] == outputs["csv"]["makespan"]
