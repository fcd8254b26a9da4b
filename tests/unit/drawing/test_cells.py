"""What notebooks show of values: images that need nothing else, and small ones."""

import base64
import re
from xml.etree import ElementTree

import pytest

import penstock as pk
from penstock.base.errors import InputError
from penstock.core.timing.fleet_timeline import FleetTimeline, Turn
from penstock.drawing import Fact, Report, Series, TimelineRecord
from penstock.interop.pipedream_profiles import read_pipedream_graph
from penstock.planning.planner import what_if
from tests.kit.paths import DOCS, ROOT

SCHEDULE = pk.schedules.build("1f1b", num_ranks=3, num_microbatches=5)
TIMELINE = pk.simulate(SCHEDULE, pk.Costs())
LONG = pk.simulate(pk.schedules.build("1f1b", num_ranks=4, num_microbatches=600), pk.Costs())
GRAPH = read_pipedream_graph(ROOT / "tests/data/pipedream/vgg16/graph.txt")
PLAN = pk.Plan.load(DOCS / "images" / "plan.json")
REPORT = Report(
    title="a run",
    facts=(Fact(label="step", value="3 ms", note="of 5"),),
    predicted=TimelineRecord.of(TIMELINE),
    losses=(Series(name="loss", points=((0, 2.0), (1, 1.5))),),
)
FLEET = FleetTimeline(
    jobs=("a", "b"),
    num_devices=1,
    turns=(Turn(0, "a", 0, 0, False, 0.0, 1.0), Turn(0, "b", 0, 0, False, 1.0, 2.0)),
)
CLUSTER = pk.Cluster.tree((2, 2), (pk.Link(bytes_per_second=1e9), pk.Link(bytes_per_second=1e8)))
VALUES = {
    "graph": (GRAPH, 1),
    "plan": (PLAN, 2),
    "schedule": (SCHEDULE, 1),
    "timeline": (TIMELINE, 1),
    "fleet": (FLEET, 1),
    "report": (REPORT, 2),
    "comparison": (pk.compare(SCHEDULE, {"again": TIMELINE}), 1),
    "drawn": (pk.draw(TIMELINE), 1),
    "cluster": (CLUSTER, 0),
}


def images_of(html):
    """The SVG documents of a cell, each parsed."""
    pattern = r'<img alt="[^"]+" src="data:image/svg\+xml;base64,([^"]+)" style="max-width:100%'
    return [ElementTree.fromstring(base64.b64decode(data)) for data in re.findall(pattern, html)]


@pytest.mark.parametrize("name", VALUES)
def test_a_cell_is_well_formed_small_and_whole_in_itself(name):
    value, num_images = VALUES[name]
    html = value._repr_html_()
    ElementTree.fromstring(html)
    assert len(images_of(html)) == html.count("<img") == num_images
    assert len(html) < 200_000
    outside = re.sub(r"data:[^\"]*", "", html)
    assert "http" not in outside
    assert "<style" not in outside and "<script" not in outside


@pytest.mark.parametrize("name", VALUES)
def test_pictures_have_a_dark_mode_and_scale_with_the_cell(name):
    for picture in images_of(VALUES[name][0]._repr_html_()):
        sheets = "".join(sheet.text for sheet in picture.iter("{http://www.w3.org/2000/svg}style"))
        assert "prefers-color-scheme:dark" in sheets
        assert picture.get("viewBox")
        assert float(picture.get("width")) <= 1100


def test_of_a_long_timeline_a_cell_has_the_beginning_and_the_end_with_labels():
    html = LONG._repr_html_()
    (picture,) = images_of(html)
    words = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert any("its beginning" in text for text in words)
    assert any("its end" in text for text in words)
    assert {"0", "599"} <= {re.sub(r"^[FB]", "", text) for text in words}
    assert len(html) < 200_000


def test_what_is_drawn_stays_text_and_is_shown_as_a_picture(tmp_path):
    drawn = pk.draw(TIMELINE, tmp_path / "x.svg")
    assert isinstance(drawn, str)
    assert (tmp_path / "x.svg").read_text() == drawn + "\n"
    assert images_of(drawn._repr_html_())


def test_a_cell_says_in_numbers_what_its_picture_is_of():
    assert "40 layers, a microbatch of" in GRAPH._repr_html_()
    assert "3 ms" in REPORT._repr_html_() and "a run" in REPORT._repr_html_()
    asked = what_if("memory=64GiB", GRAPH, pk.Cluster.local(2), microbatches=4)
    html = asked._repr_html_()
    assert "with memory=64GiB" in html
    assert len(images_of(html)) == 1


def test_a_graph_has_a_bar_as_high_as_its_layer_takes():
    (picture,) = images_of(GRAPH._repr_html_())
    svg = "{http://www.w3.org/2000/svg}"
    heights = {}
    for group in picture.iter(f"{svg}g"):
        layer = group.find(f"{svg}title").text.split(":")[0]
        drawn = [r for r in group.findall(f"{svg}rect") if r.get("class") == "F s0"]
        heights.setdefault(layer, sum(float(r.get("height")) for r in drawn))
    most = max(GRAPH.layers, key=lambda layer: layer.forward_seconds)
    for layer in GRAPH.layers:
        share = layer.forward_seconds / most.forward_seconds
        assert heights[layer.name] == pytest.approx(share * heights[most.name], abs=0.02)


def test_a_comparison_is_a_table_as_text():
    compared = pk.compare(
        SCHEDULE, {"gpipe": pk.schedules.build("gpipe", num_ranks=3, num_microbatches=5)}
    )
    head, first, second = str(compared).splitlines()
    assert head.split() == ["makespan", "bubble", "stage", "bubble", "peak", "activations"]
    assert first.split() == ["1f1b", "21", "28.6%", "28.6%", "3"]
    assert second.split() == ["gpipe", "21", "28.6%", "28.6%", "5"]
    slower = pk.compare(SCHEDULE, costs=pk.Costs(2, 2, 2)).timelines
    assert slower[0][1].makespan == 2 * TIMELINE.makespan


@pytest.mark.parametrize(
    ("compared", "words"),
    [
        ((), "nothing to compare"),
        ((SCHEDULE, SCHEDULE), "same title"),
        (("1f1b",), "compared is '1f1b', the name of a schedule; penstock.schedules.build"),
        (({"x": 3},), "give schedules, plans or timelines"),
    ],
)
def test_what_cannot_be_compared_is_refused(compared, words):
    with pytest.raises(InputError, match=words):
        pk.compare(*compared)


def test_a_cluster_shows_its_devices_and_how_they_are_joined():
    (count, *_), devices, joined = _parts(CLUSTER._repr_html_())
    assert count == "4 devices"
    assert devices[0] == ["device", "memory", "speed"]
    assert [row[0] for row in devices[1:]] == [f"device{number}" for number in range(4)]
    assert joined[1][0] == "server0: device0, device1" and joined[-1][0] == "between groups"
    assert "1 GB/s" in " ".join(joined[1]).replace("\N{NO-BREAK SPACE}", " ")


def test_many_devices_that_are_alike_share_a_row():
    many = pk.Cluster(
        devices=(
            pk.Device(name="slow", speed=0.5),
            *(pk.Device(name=f"gpu{number}") for number in range(64)),
        )
    )
    _, devices, _ = _parts(many._repr_html_())
    assert [row[0] for row in devices[1:]] == ["slow", "gpu0 … gpu63 (64)"]


def _parts(html):
    """The text of the note, and the cells of each table."""
    note, *tables = ElementTree.fromstring(html)
    return [note.text], *([[cell.text for cell in row] for row in table] for table in tables)
