"""Links as rows of a timeline's picture: predicted, measured, in every format."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

import penstock as pk
from penstock.base.errors import FileError
from penstock.core.schedule import Kind
from penstock.core.schedule.lower import add_update
from penstock.core.timing.costs import Exchange
from penstock.core.timing.simulator.beside import Served
from penstock.core.timing.spans import Transfer
from penstock.core.timing.timeline import Timeline
from penstock.drawing.timeline.link_rows import link_rows
from penstock.drawing.timeline.svg import svg
from penstock.drawing.timeline.text import text
from tests.kit.paths import GOLDEN

COPIES = add_update(
    pk.schedules.build("1f1b", num_ranks=3, num_microbatches=4, replicas=(2, 1))
)  # fmt: skip
COSTS = pk.Costs(
    forward=[2.0, 1.0], backward_input=[2.0, 1.0], backward_weight=[2.0, 1.0], hop=0.5, link=0.5,
    update=0.5, exchanges=[Exchange(4, (1.5, 0.5), 0.25), None],
)  # fmt: skip
TIMELINE = pk.simulate(COPIES, COSTS)


@pytest.mark.parametrize("suffix", ["svg", "txt"])
def test_golden_drawing(suffix, tmp_path):
    golden = GOLDEN / f"drawing_links.{suffix}"
    pk.draw(TIMELINE, tmp_path / golden.name)
    assert (tmp_path / golden.name).read_bytes() == golden.read_bytes()


def test_every_transfer_is_a_box_with_its_words_in_every_format():
    picture = svg(TIMELINE)
    assert picture.count('class="transfer"') == len(TIMELINE.transfers) == 4 + 4 + 4
    assert "part 3 of the gradients of stage 0, ranks 0 + 1; 20.5 → 22 (1.5)" in picture
    for words in ("an output on its link", "a gradient on its link", "gradients being summed"):
        assert words in picture
    names = [row.name for row in link_rows(TIMELINE)]
    assert names == ["0 → 2", "1 → 2", "2 → 0", "2 → 1", "0 + 1"]
    assert re.search(r"0\+1 +│·+S0─+S1─+S2─+S3─+·+│", text(TIMELINE))
    assert text(TIMELINE).count("\n") == 3 + len(names)


@pytest.mark.parametrize("updates", [False, True])
def test_every_server_of_every_copy_has_a_row(updates, tmp_path):
    shown = Served((2, 0), updates).shown_in(TIMELINE)
    rows = {row.name: row.transfers for row in link_rows(shown)}
    assert [*rows][5:] == ["0 ⇄ servers 0–1", "1 ⇄ servers 0–1"]
    update = next(span for span in TIMELINE.by_rank[0] if span.op.kind is Kind.UPDATE)
    (box,) = rows["1 ⇄ servers 0–1"]  # the first part leaves before this copy has handed in all
    first = min(one.start for one in TIMELINE.transfers if one.kind == "sum")
    assert (box.start, box.end) == (first, update.end if updates else update.start)
    picture = svg(shown)
    assert "gradients of stage 0, rank 1 ⇄ servers 0–1; " in picture
    assert "gradients at a server, until its sums" in picture
    assert re.search(r"1⇄servers0–1 +│·+s0─+·*│", text(shown))
    assert Timeline.from_json(shown.to_json()) == shown
    pk.draw(shown, tmp_path / "trace.json")
    assert '"name":"1 ⇄ servers 0–1"' in (tmp_path / "trace.json").read_text()


def test_servers_that_take_differently_long_have_rows_of_their_own():
    served = [Transfer((0,), "served", 0, server, 16.0, 20.0 + (server > 1)) for server in range(3)]
    rows = link_rows(replace(TIMELINE, transfers=tuple(served)))
    assert [row.name for row in rows] == ["0 ⇄ servers 0–1", "0 ⇄ server 2"]


def test_without_servers_nothing_is_shown_of_them():
    assert Served().shown_in(TIMELINE) is TIMELINE


def test_a_trace_has_a_thread_per_link(tmp_path):
    pk.draw(TIMELINE, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    carried = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert [event["name"] for event in carried if event["cat"] == "sum"] == [
        f"sum {part}" for part in range(4)
    ]
    assert carried[0]["args"] == {"stage": 0, "ranks": [0, 2]}


def test_a_timeline_without_transfers_has_no_such_rows():
    plain = pk.simulate(COPIES)
    assert "transfer" not in svg(plain)
    assert link_rows(plain) == []


def test_a_file_with_a_transfer_between_nobody_is_refused():
    wrong = Timeline.of(TIMELINE.spans, 3, transfers=[Transfer((0, 7), "sum", 0, 0, 0.0, 1.0)])
    with pytest.raises(FileError, match=r"is of ranks \(0, 7\), but num_ranks is 3"):
        Timeline.from_json(wrong.to_json(), "a.json")
