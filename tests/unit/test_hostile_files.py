"""Files that somebody has made to hurt: they are refused before they cost anything, and what they
say reaches no terminal as commands to it."""

from __future__ import annotations

import json
import os
import re

import pytest

import penstock as pk
from penstock.errors import FileError
from penstock.turns.written import FleetFile
from penstock.values import MOST_FILE_BYTES, MOST_TOML_BYTES, read_text
from tests.unit.test_wrong_files import FILES, answered, folder, planned  # noqa: F401 - a fixture

READERS = (pk.LayerGraph.load, pk.Cluster.load, pk.Plan.load, FleetFile.load)


@pytest.fixture(params=READERS, ids=lambda reader: reader.__self__.__name__)
def load(request):
    return request.param


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "/dev/tty", "pipe", "link"])
def test_what_is_no_file_is_not_read(load, name, tmp_path):
    path = tmp_path / "cur.json"
    if name == "pipe":
        os.mkfifo(path)  # into which nobody writes
    else:
        path.symlink_to("/dev/zero" if name == "link" else name)
    with pytest.raises(FileError, match=r"cannot read .*cur.json: (it is a device|No such)"):
        load(path)


def test_a_folder_is_none_either(load, tmp_path):
    with pytest.raises(FileError, match="Is a directory"):
        load(tmp_path)


def test_what_is_too_large_is_not_read(load, tmp_path):
    path = tmp_path / "large.toml"
    with path.open("wb") as file:
        file.truncate(MOST_FILE_BYTES + 1)  # without a byte on the disk
    with pytest.raises(FileError, match="bytes, and may have"):
        load(path)


@pytest.mark.parametrize("kind", [pk.Cluster.load, FleetFile.load])
def test_toml_is_for_people_and_limited_more(kind, tmp_path):
    path = tmp_path / "large.toml"
    path.write_text("#" * (MOST_TOML_BYTES + 1))
    with pytest.raises(FileError, match="bytes, and may have"):
        kind(path)


@pytest.mark.parametrize(
    "text",
    [
        "a" + ".a" * 20_000 + " = 1",
        "x = 1\n[" + "a." * 20_000 + "a]",
        "x = 1\n" + '"a b" . ' * 100 + "a = 1",
        "'='." + "'a'." * 100 + "a = 1",
    ],
)
def test_a_key_of_many_parts_is_refused_before_it_is_read(text, tmp_path):
    path = tmp_path / "deep.toml"
    path.write_text(text)
    for load in (pk.Cluster.load, FleetFile.load):
        with pytest.raises(FileError, match=r"a key in line [12] has more than 32 parts"):
            load(path)


def test_what_only_looks_like_a_deep_key_is_read(tmp_path):
    path = tmp_path / "cluster.toml"
    numbers = ", ".join(["1.5"] * 100)
    path.write_text(f"numbers = [{numbers}]\n# {'a.b ' * 100}")
    with pytest.raises(FileError, match="numbers"):  # which is no key of a cluster
        pk.Cluster.load(path)
    path.write_text("x" * 10**6)  # soon
    with pytest.raises(FileError, match="is not a valid Cluster"):
        pk.Cluster.load(path)


@pytest.mark.parametrize("name", FILES)
def test_a_key_that_stands_twice_is_refused_with_its_path(folder, name):  # noqa: F811
    _, verb = FILES[name]
    text = (folder / name).read_text()
    first = next(iter(json.loads(text)))
    (folder / name).write_text(text[:-1] + "," + text[1:])
    assert f"the key `$.{first}` stands twice" in answered(*verb)


def test_a_key_that_stands_twice_deep_inside_is_refused_with_its_path():
    text = json.dumps(planned())
    inner = text.replace('"rank": 1', '"rank": 0, "rank": 1')
    assert inner != text
    with pytest.raises(FileError, match=re.escape("the key `$.stages[1].rank` stands twice")):
        pk.Plan.from_json(inner)
    escaped = text.replace('"rank": 1', '"rank": 0, "r\\u0061nk": 1')
    with pytest.raises(FileError, match=re.escape("the key `$.stages[1].rank` stands twice")):
        pk.Plan.from_json(escaped)


def test_a_plan_of_very_many_microbatches_is_refused_at_once():
    text = json.dumps({**planned(), "num_microbatches": 10**7})
    with pytest.raises(FileError, match="num_microbatches is 10000000, but may be 100,000 at most"):
        pk.Plan.from_json(text)


def test_an_ordinary_file_behind_a_link_is_read(tmp_path):
    (tmp_path / "file").write_text("\ufefftext", encoding="utf-8")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "text"
