import base64
import json
import re
from xml.etree import ElementTree

import pytest

from penstock import Costs, Timeline, errors, schedules, simulate
from penstock.core.schedule.lower import add_communication, add_update
from penstock.core.timing.spans import BUSY
from penstock.drawing import (
    Fact,
    Report,
    Series,
    StageRow,
    TimelineRecord,
    read_report,
    write_report,
)
from penstock.drawing.report_page import WORDS, explained, report_page
from tests.kit.chromium import CHROMIUM, dom_of

FILES = {"index.html", "predicted.svg", "measured.svg", "timelines.svg", "run.json"}


def step(source, forward):
    schedule = add_update(schedules.build("1f1b", num_ranks=2, num_microbatches=4))
    costs = Costs(forward, 0.0098, 0.0094, hop=0.0006, update=0.004)
    timeline = simulate(add_communication(schedule), costs)
    return Timeline(timeline.rows, timeline.name, source)


PREDICTED, MEASURED = step("predicted", 0.0105), step("measured", 0.0123)
BUSY_SPANS = sum(s.op.kind in BUSY for s in (*PREDICTED.spans, *MEASURED.spans))


def report(**changes):
    stage = {"forward_seconds": 0.0105, "backward_seconds": 0.0192, "parameter_bytes": 1 << 20}
    values = {
        "title": "A run & <its> report",
        "subtitle": "laptop, 2026-11-21",
        "facts": (Fact(label="step time", value="189 ms", note="predicted <170 ms>"),),
        "plan_text": "stage  layers\n0      <embed>",
        "stages": (
            StageRow(layers=("<embed>", "a"), rank=0, activation_bytes=3 << 20, **stage),
            StageRow(layers=tuple("bcdef"), rank=1, peak_activations=1.5, **stage),
        ),
        "predicted": TimelineRecord.of(PREDICTED),
        "measured": TimelineRecord.of(MEASURED),
        "losses": (
            Series(name="training", points=((0, 2.5), (1, 2.25), (2, None))),
            Series(name="held-out", points=((1, 2.5),)),
        ),
    }
    return Report(**{**values, **changes})


@pytest.fixture
def folder(tmp_path):
    write_report(report(), tmp_path / "run")
    return tmp_path / "run"


def test_a_report_is_a_folder(folder):
    assert {path.name for path in folder.iterdir()} == FILES
    for picture in folder.glob("*.svg"):
        ElementTree.parse(picture)
    spans = (folder / "timelines.svg").read_text().count('class="span"')
    assert spans == BUSY_SPANS


def test_it_is_drawn_again_from_its_file_alone(folder, tmp_path):
    assert read_report(folder) == read_report(folder / "run.json") == report()
    write_report(read_report(folder), tmp_path / "again")
    for name in FILES:
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_timelines_come_back_exactly():
    record = TimelineRecord.of(MEASURED)
    assert record.timeline() == MEASURED
    assert TimelineRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("place", "key", "where"),
    [
        ((), "titel", "titel"),
        (("facts", 0), "nota", r"\$\.facts\[0\]"),
        (("measured",), "ranks", r"\$\.measured"),
    ],
)
def test_unknown_keys_are_refused(folder, place, key, where):
    tree = json.loads((folder / "run.json").read_text())
    part = tree
    for name in place:
        part = part[name]
    part[key] = 1
    (folder / "run.json").write_text(json.dumps(tree))
    with pytest.raises(errors.FileError, match=where):
        read_report(folder)


def test_a_contradictory_timeline_is_refused(folder):
    tree = json.loads((folder / "run.json").read_text())
    tree["measured"]["num_ranks"] = 1
    (folder / "run.json").write_text(json.dumps(tree))
    with pytest.raises(errors.FileError, match="num_ranks is 1"):
        read_report(folder)


def test_other_versions_and_missing_reports_are_refused(tmp_path):
    with pytest.raises(errors.InputError, match="version 2"):
        report(version=2)
    with pytest.raises(errors.FileError, match="cannot read"):
        read_report(tmp_path)


def test_the_page_says_everything():
    page = report_page(report())
    for words in ("189 ms", "predicted &lt;170 ms&gt;", "&lt;embed&gt;, a", "b … f (5 layers)"):
        assert words in page
    assert "<its>" not in page and "<embed>" not in page
    assert "training, last 2.25" in page and "held-out, last 2.5" in page
    assert re.search(r"weights 1\sMiB", page) and "laptop" in page


def text_of(part):
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", part))


def test_the_page_splits_the_idle_time_of_every_rank():
    page = report_page(report())
    section = page[page.index("Where the idle time comes from") :]
    rows = re.findall("<tr>(.*?)</tr>", section[: section.index("</section>")])[1:]
    assert [text_of(row).split()[:2] for row in rows[::2]] == [
        ["0", "predicted"],
        ["1", "predicted"],
    ]
    assert all(text_of(row).strip().startswith("measured") for row in rows[1::2])
    # Four hops of 0.6 ms each are not hidden; costs are exact, so that no one waits for more.
    idle, *parts = re.findall(r"[\d.]+ m?s", text_of(rows[0]))
    assert float(idle.split()[0]) == pytest.approx(sum(float(part.split()[0]) for part in parts))
    assert parts[1:] == ["0 s", "2.4 ms"]


def test_the_page_names_the_op_where_the_timelines_part():
    page = report_page(report())
    words = (
        "The first op to depart from the prediction is 1B0 on rank 1: it started at 25.2 ms "
        "instead of 21.6 ms, for several reasons, the largest that 0F0 on rank 0 took 12.3 ms "
        "instead of 10.5 ms."
    )
    assert words in text_of(page)
    same = report_page(report(measured=TimelineRecord.of(PREDICTED)))
    assert "No op departs from the prediction by more than 2% of the step" in same


def test_timelines_that_cannot_be_compared_or_taken_apart_are_shown_all_the_same():
    spans = [span for span in MEASURED.spans if span.op.microbatch and span.rank == 0]
    part = TimelineRecord.of(Timeline.of(spans, 1, "", "measured"))
    page = report_page(report(measured=part))
    assert "One step, predicted and measured" in page
    assert "The first op" not in page and "idle time comes from" not in page
    alone = report_page(report(predicted=None, measured=part))
    assert "idle time comes from" not in alone


def test_what_is_not_known_is_left_out():
    page = report_page(Report(title="bare"))
    assert "<section" not in page and "<h1>bare</h1>" in page
    only_measured = report_page(report(predicted=None, stages=(), losses=()))
    assert "One step, measured" in only_measured
    assert "stage  layers" in only_measured


def test_only_the_known_timelines_become_pictures(tmp_path):
    write_report(report(predicted=None), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES - {"predicted.svg"}


def test_nothing_is_fetched():
    page = report_page(report())
    assert not re.search(r"""(src|href)\s*=(?!"data:)|@import|url\((?!#)|https?://""", page)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome")
def test_chromium_shows_both_timelines(folder, tmp_path):
    dom = dom_of(folder / "index.html", tmp_path / "profile")
    panels = dom.split('class="panel"')[1:]
    assert [panel.count('class="span"') for panel in panels] == [BUSY_SPANS // 2] * 2
    assert [re.search(">(Predicted|Measured)<", panel)[1] for panel in panels] == [
        "Predicted",
        "Measured",
    ]
    # The script ran to its end: the buttons are there and every op knows its microbatch.
    assert '<div class="bar">' in dom
    assert dom.count("data-microbatch=") == 2 * 4 * 2 * 2
    assert not re.search(r"""(src|href)="https?:""", dom)


NUMBERS = (
    Fact(label="as fast as one device", value="1.61×", note="on 2; median"),
    Fact(label="same as one device", value="to the bit", note="4 steps"),
    Fact(label="devices idle (bubble)", value="12.0%", note="11.1% predicted"),
)


def test_a_report_begins_with_a_sentence_and_three_numbers():
    page = report_page(report(headline="Two devices, 1.61 times <as fast>.", numbers=NUMBERS))
    body = page[page.index("<main>") :]
    text = text_of(body)
    assert "&lt;as fast&gt;" in text
    order = ["A run &amp; &lt;its&gt; report", "Two devices", "1.61×", "to the bit", "12.0%"]
    order += ["One step, predicted and measured", "All numbers", "189 ms", "Again, or elsewhere"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_jargon_is_explained_in_place_and_in_a_list():
    page = report_page(report(numbers=NUMBERS))
    assert re.search(r'<abbr title="bubble: [^"]+">bubble</abbr>', page)
    assert re.search(r'<abbr title="in flight: [^"]+">in flight</abbr>', page)
    assert explained("stages & a stage bubble").count("<abbr") == 2
    assert explained("A <microbatch>") == (
        f'A &lt;<abbr title="microbatch: {WORDS["microbatch"]}">microbatch</abbr>&gt;'
    )
    listed = page[page.index("What the words on this page mean") :]
    for word, meaning in WORDS.items():
        assert f"<dt>{word}</dt><dd>{meaning}</dd>" in listed.replace("&#x27;", "'")


def test_command_plan_losses_and_run_can_be_taken_from_the_page(tmp_path):
    known = report(command="penstock train 'my model' --steps 4", plan_json='{"stages": []}')
    page = report_page(known)
    assert "<pre>penstock train &#x27;my model&#x27; --steps 4</pre>" in page
    assert 'data-copy="penstock train' in page
    files = {
        name: base64.b64decode(data).decode()
        for data, name in re.findall(r'href="data:[\w/]+;base64,([^"]+)" download="([^"]+)"', page)
    }
    assert set(files) == {"plan.json", "losses.csv", "run.json"}
    assert files["plan.json"] == '{"stages": []}'
    assert files["losses.csv"] == 'step,"training","held-out"\n0,2.5,\n1,2.25,2.5\n2,,\n'
    assert Report.from_json(files["run.json"]) == known
    write_report(known, tmp_path)
    assert read_report(tmp_path) == known
