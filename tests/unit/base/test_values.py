import json
import os
import stat

import pytest

from penstock import Cluster, Device, Layer, LayerGraph, Link, plan
from penstock.base.errors import FileError
from penstock.base.values import write_atomically
from penstock.planning.plans import Plan

GRAPH = LayerGraph(
    layers=tuple(
        Layer(
            name=name,
            forward_seconds=0.1,
            backward_input_seconds=0.1,
            backward_weight_seconds=0.2,
            parameter_bytes=8,
        )
        for name in ("first", "second", "third")
    ),
    microbatch_size=4,
)
CLUSTER = Cluster(devices=(Device(name="a", speed=2.0), Device(name="b")), link=Link())
PLAN = plan(GRAPH, CLUSTER, microbatches=3)
VALUES = pytest.mark.parametrize("value", [GRAPH, CLUSTER, PLAN], ids=["graph", "cluster", "plan"])


@VALUES
def test_a_file_gives_the_value_back(value, tmp_path):
    value.save(tmp_path / "deep" / "value.json")
    assert type(value).load(tmp_path / "deep" / "value.json") == value


@VALUES
def test_a_file_is_for_people(value):
    text = value.to_json()
    assert text.count("\n") > 5
    assert '  "' in text


@VALUES
def test_an_unknown_key_is_refused(value):
    tree = json.loads(value.to_json())
    tree["colour"] = "red"
    with pytest.raises(FileError, match="unknown field `colour`"):
        type(value).from_json(json.dumps(tree))


def test_the_path_inside_the_file_is_named():
    tree = json.loads(GRAPH.to_json())
    tree["layers"][1]["forwad_seconds"] = 0.1
    with pytest.raises(FileError, match=r"`forwad_seconds` - at `\$.layers\[1\]`"):
        LayerGraph.from_json(json.dumps(tree))


def test_a_wrong_type_names_path_and_file(tmp_path):
    tree = json.loads(PLAN.to_json())
    tree["stages"][0]["rank"] = "zero"
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(FileError, match=r"plan\.json .*Plan.*int.*\$.stages\[0\].rank"):
        Plan.load(path)


def test_a_missing_key_is_named():
    with pytest.raises(FileError, match="forward_seconds"):
        LayerGraph.from_json('{"layers": [{"name": "a"}]}')


def test_a_value_that_contradicts_itself_is_refused_with_its_reason():
    tree = json.loads(CLUSTER.to_json())
    tree["devices"][1]["speed"] = 0
    with pytest.raises(FileError, match=r"speed is 0.*\$.devices\[1\]"):
        Cluster.from_json(json.dumps(tree))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7"])
def test_something_else_is_refused(text):
    with pytest.raises(FileError, match="not a valid Plan"):
        Plan.from_json(text)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileError, match=r"cannot read .*nothing\.json: No such file"):
        Plan.load(tmp_path / "nothing.json")


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="not UTF-8"):
        Plan.load(tmp_path / "plan.json")


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_written_file_is_readable_by_others(tmp_path):
    write_atomically(tmp_path / "file", "text")
    assert (tmp_path / "file").stat().st_mode & stat.S_IRUSR
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "file").stat().st_mode == plain.stat().st_mode


def test_writing_never_changes_the_umask_for_it_is_that_of_all_threads(tmp_path, monkeypatch):
    def umask(_):
        raise AssertionError("other threads would make files with these rights meanwhile")

    monkeypatch.setattr(os, "umask", umask)
    write_atomically(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_a_name_as_long_as_they_may_be_can_be_written(tmp_path):
    write_atomically(tmp_path / ("ä" * 127), "text")
    assert (tmp_path / ("ä" * 127)).read_text() == "text"


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot write"):
        write_atomically(tmp_path / "file" / "below", "text")
