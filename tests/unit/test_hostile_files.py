"""Files that somebody has made to hurt: they are refused before they cost anything, and what they
say reaches no terminal as commands to it."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest

import penstock as pk
from penstock.base.errors import FileError, InputError, PenstockError
from penstock.base.values import MOST_FILE_BYTES, MOST_TOML_BYTES, read_text
from penstock.planning.turns.written import FleetFile
from tests.unit.test_wrong_files import FILES, answered, folder, planned  # noqa: F401 - a fixture

READERS = (pk.LayerGraph.load, pk.Cluster.load, pk.Plan.load, FleetFile.load)


@pytest.fixture(params=READERS, ids=lambda reader: reader.__self__.__name__)
def load(request):
    return request.param


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "/dev/tty"])
def test_what_is_no_file_is_not_read(load, name, tmp_path):
    path = tmp_path / "cur.json"
    path.symlink_to(name)
    with pytest.raises(FileError, match=r"cannot read .*cur.json: it is a device"):
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
    text = json.dumps({**planned(), "num_microbatches": 10**8})
    with pytest.raises(
        FileError, match="num_microbatches is 100000000, but may be 10,000,000 at most"
    ):
        pk.Plan.from_json(text)


def test_a_plan_of_very_many_stages_is_refused_at_once():
    content = planned()
    first = content["stages"][0]
    stages = [{**first, "layers": [str(rank)], "rank": rank} for rank in range(10_001)]
    with pytest.raises(FileError, match="number of stages is 10001, but may be 10,000 at most"):
        pk.Plan.from_json(json.dumps({**content, "stages": stages}))


def test_sums_of_very_many_parts_or_levels_are_refused_at_once():
    content = planned()
    first, *others = content["stages"]
    with pytest.raises(FileError, match="reduce_parts is 1000000000, but may be 10,000 at most"):
        pk.Plan.from_json(
            json.dumps({**content, "stages": [{**first, "reduce_parts": 10**9}, *others]})
        )
    levels = [[0] * len(content["stages"])] * 100_000
    with pytest.raises(FileError, match="number of levels is 100000, but may be 32 at most"):
        pk.Plan.from_json(json.dumps({**content, "summing": {"levels": levels}}))


def test_groups_in_groups_in_groups_are_refused_at_once():
    def nested(depth):
        inner = [{"name": f"g{k}", "members": [f"g{k - 1}" if k else "a"]} for k in range(depth)]
        return json.dumps({"devices": [{"name": "a"}], "groups": inner})

    assert len(pk.Cluster.from_json(nested(32)).groups) == 32
    for depth in (33, 10_000):
        with pytest.raises(FileError, match=r"group 'g0' is inside \d+ others, .* 32 levels"):
            pk.Cluster.from_json(nested(depth))


def test_spare_machines_are_counted_before_they_are_made():
    text = '[[devices]]\nname = "a"\n' + '[[spares]]\nbandwidth = "1Gbit/s"\ncount = 60_000\n' * 2
    with pytest.raises(FileError, match="number of spare machines is 120000, but may be 100,000"):
        pk.Cluster.from_toml(text)


def test_an_ordinary_file_behind_a_link_is_read(tmp_path):
    (tmp_path / "file").write_text("\ufefftext", encoding="utf-8")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "text"


EVIL = "\x1b]0;pwned\x07\x9b2J\x7f\r\u202e[red]:smile:"
SHOWN = r"\u001b]0;pwned\u0007\u009b2J\u007f\u000d\u202e[red]:smile:"
COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def evil(content, key=""):
    """The same with commands to a terminal wherever names and reasons stand."""
    if isinstance(content, dict):
        return {name: evil(part, name) for name, part in content.items()}
    if isinstance(content, list):
        return [evil(part, key) for part in content]
    is_free = key in ("name", "layers", "reason", "warnings", "alternatives")
    return f"{content}{EVIL}" if is_free and isinstance(content, str) else content


@pytest.mark.parametrize(
    "verb",
    [
        ("plan", "graph.json", "cluster.json", "-m", "4"),
        ("plan", "graph.json", "cluster.json", "-m", "4", "--json"),
        ("cluster", "cluster.json"),
        ("draw", "plan.json"),
        ("explain", "plan.json"),
        ("explain", "plan.json", "--json"),
        ("simulate", "plan.json"),
        ("simulate", "timeline.json"),
        ("compare", "plan.json", "timeline.json"),
        ("draw", "timeline.json"),
    ],
    ids=" ".join,
)
def test_no_text_of_a_file_is_a_command_to_the_terminal(folder, verb):  # noqa: F811
    contents = {name: evil(content) for name, (content, _) in FILES.items()}
    contents["plan.json"]["reason"] = contents["timeline.json"]["name"] = f"because{EVIL}"
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    said = answered(*verb)
    assert "is not a valid" not in said  # they are read, and not refused
    assert not COMMANDS.search(said), repr(said)
    if "--json" in verb:
        json.loads(said)


def test_a_name_in_a_table_is_no_markup_and_is_shown_in_full(folder):  # noqa: F811
    content = {**FILES["timeline.json"][0], "name": EVIL}
    (folder / "timeline.json").write_text(json.dumps(content))
    assert SHOWN in answered("simulate", "timeline.json")


def test_no_error_is_a_command_to_the_terminal(folder):  # noqa: F811
    (folder / "plan.json").write_text(json.dumps({**planned(), EVIL: 1}))
    assert r"unknown field `\u001b]0;pwned" in answered("draw", "plan.json")
    assert str(InputError(f"{EVIL}\nand more")) == f"{SHOWN}\nand more"
    assert not COMMANDS.search(str(PenstockError(EVIL)))


def test_a_plan_and_a_graph_print_no_commands_in_a_script_either():
    plan = pk.Plan.from_json(json.dumps({**planned(), "reason": EVIL}))
    graph = pk.LayerGraph.from_json(json.dumps({**FILES["graph.json"][0], "warnings": [EVIL]}))
    assert SHOWN in str(plan)
    assert SHOWN in str(graph)


def test_the_name_of_a_job_reaches_the_terminal_in_words_only(folder):  # noqa: F811
    (folder / "fleet.toml").write_text(
        'steps = 2\n[jobs."\\u001b]0;pwned\\u0007"]\nplan = "plan.json"\n'
        '[jobs.b]\nplan = "plan.json"\n'
    )
    said = answered("fleet", "fleet.toml", "--simulate")
    assert not COMMANDS.search(said), repr(said)
    assert "pwned" in said


def test_a_drawing_that_goes_to_a_terminal_is_no_command_and_to_a_program_is_as_it_is(
    folder,  # noqa: F811
    monkeypatch,
):
    content = {**FILES["timeline.json"][0], "name": f"name{EVIL}"}
    (folder / "timeline.json").write_text(json.dumps(content))
    answer = answered("draw", "timeline.json", "-o", "-")
    monkeypatch.setattr("penstock.cli.output._to_terminal", lambda: True)
    assert not COMMANDS.search(answered("draw", "timeline.json", "-o", "-"))
    assert "<svg" in answer


def test_a_pipe_is_read_but_not_without_end(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with (
        subprocess.Popen(["sh", "-c", 'yes > "$0"', path], stderr=subprocess.DEVNULL),
        pytest.raises(FileError, match="it has more than 1,000 bytes"),
    ):
        read_text(path, 1000)
