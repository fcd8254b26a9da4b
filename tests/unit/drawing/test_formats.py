"""Figures as PNG and PDF, and figures of a given width."""

import dataclasses
import re
import struct
import sys
from xml.etree import ElementTree

import pytest

import penstock as pk
from penstock.base.errors import InputError
from penstock.core.timing.spans import Transfer
from penstock.drawing import draw_stacked
from penstock.drawing.formats import light

SVG = "{http://www.w3.org/2000/svg}"
SPLIT = pk.simulate(pk.schedules.build("zb-h1", num_ranks=4, num_microbatches=8), pk.Costs())
LONG = pk.simulate(pk.schedules.build("1f1b", num_ranks=4, num_microbatches=64), pk.Costs())


def test_a_resolved_figure_has_the_light_colours_and_nothing_that_asks_the_screen():
    picture = light(drawn(SPLIT))
    assert "var(" not in picture and "@media" not in picture and "system-ui" not in picture
    assert ".timeline .paper{fill:#ffffff}" in picture
    assert "#15191e" not in picture  # the dark paper
    ElementTree.fromstring(picture)


def drawn(timeline, **how):
    from penstock.drawing.timeline.svg import svg

    return svg(timeline, **how)


def test_a_png_is_twice_as_large_as_the_figure_and_has_its_colours(tmp_path):
    pytest.importorskip("resvg_py")
    path = tmp_path / "x.png"
    picture = pk.draw(SPLIT, path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    size = struct.unpack(">II", content[16:24])
    root = ElementTree.fromstring(picture)
    assert size == (2 * int(root.get("width")), 2 * int(root.get("height")))
    colours = {pixel[:3] for _, pixel in image(path).getcolors(1 << 20)}
    assert {(0xFF, 0xFF, 0xFF), (0x8F, 0xC1, 0xEA), (0xEC, 0xB6, 0x50)} <= colours


def image(path):
    return pytest.importorskip("PIL.Image").open(path).convert("RGBA")


def test_a_pdf_is_a_page_as_large_as_the_figure(tmp_path):
    pytest.importorskip("typst")
    path = tmp_path / "x.pdf"
    draw_stacked([("one", SPLIT), ("two", LONG)], path, width=800)
    content = path.read_bytes()
    assert content.startswith(b"%PDF")
    (box,) = re.findall(rb"/MediaBox ?\[0 0 ([\d.]+) ([\d.]+)\]", content)
    assert float(box[0]) == pytest.approx(800 * 72 / 96)
    assert b"/Subtype/Image" not in content  # vectors


@pytest.mark.parametrize(("suffix", "library"), [("png", "resvg-py"), ("pdf", "typst")])
def test_without_the_library_there_is_one_clear_error(suffix, library, tmp_path, monkeypatch):
    missing = library.replace("-", "_")
    monkeypatch.delitem(sys.modules, missing, raising=False)
    monkeypatch.setattr("penstock.drawing.formats.find_spec", lambda name: None)
    path = tmp_path / f"x.{suffix}"
    with pytest.raises(InputError, match=rf"needs {library}.*penstock\[pictures\]"):
        pk.draw(SPLIT, path)
    assert not path.exists()


def test_a_narrow_figure_of_a_long_timeline_has_its_ends_with_labels_that_fit():
    picture = ElementTree.fromstring(drawn(LONG, width=800, whole=False))
    assert picture.get("width") == "800"
    titles = [text.text for text in picture.iter(f"{SVG}text") if text.get("class") == "title"]
    assert [re.sub(r".*: (its \w+).*", r"\1", title) for title in titles] == [
        "its beginning",
        "its end",
    ]
    boxes = [group for group in picture.iter(f"{SVG}g") if group.get("class") == "span"]
    labelled = [group for group in boxes if group.find(f"{SVG}text") is not None]
    assert len(labelled) > 0.95 * len(boxes) > 50
    for text in picture.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x")) <= 800


def test_a_figure_that_fits_is_drawn_whole():
    short = ElementTree.fromstring(drawn(SPLIT, width=800, whole=False))
    boxes = [group for group in short.iter(f"{SVG}g") if group.get("class") == "span"]
    assert len(boxes) == sum(len(row.ops) for row in SPLIT.rows)


def test_an_excerpt_keeps_what_its_links_carry_meanwhile():
    transfers = [
        Transfer((0, 1), "value", 0, number, 3.0 * number, 3.0 * number + 1) for number in range(64)
    ]
    known = dataclasses.replace(LONG, transfers=tuple(transfers))
    picture = ElementTree.fromstring(drawn(known, width=800, whole=False))
    told = [one.find(f"{SVG}title").text for one in picture.iter(f"{SVG}g") if is_transfer(one)]
    numbers = [int(re.search(r"microbatch (\d+)", words)[1]) for words in told]
    assert numbers[0] == 0 and numbers[-1] == 63
    assert len(numbers) < 64
    left = min(float(one.find(f"{SVG}rect").get("x")) for one in picture.iter() if is_transfer(one))
    tracks = [one for one in picture.iter(f"{SVG}rect") if one.get("class") == "track"]
    assert left >= min(float(track.get("x")) for track in tracks[:4])


def is_transfer(element):
    return element.get("class") == "transfer"


@pytest.mark.parametrize("width", [479, 10, -1, float("nan")])
def test_a_width_that_holds_nothing_is_refused(width, tmp_path):
    with pytest.raises(InputError, match="width"):
        pk.draw(SPLIT, tmp_path / "x.svg", width=width)
