"""A contest's figures, sentences, table and page, from a record made by hand."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.drawing.contest import (
    COLUMNS,
    ContestRecord,
    Entry,
    LossPoint,
    markdown,
    summary,
    table_rows,
)
from penstock.drawing.contest_page import contest_page, loss_panels, write_contest
from penstock.drawing.markup import resource, text_width


def entry(method, title, seconds, losses, memory_bytes=1000, **more):
    return Entry(
        method=method,
        title=title,
        where="2 threads, 2 cores",
        predicted_seconds=seconds,
        step_seconds=seconds,
        predicted_bytes=memory_bytes,
        memory_bytes=memory_bytes,
        moved_bytes=0,
        predicted_bubble=0.25,
        bubble=0.5,
        delay=more.pop("delay", 0.0),
        recorded_delay=0.0,
        losses=tuple(LossPoint(step=10 * k, loss=loss) for k, loss in enumerate(losses)),
        **more,
    )


@pytest.fixture
def record():
    return ContestRecord(
        title="a <model>",
        notes=("2 cores & busy.",),
        num_devices=2,
        num_microbatches=4,
        num_steps=20,
        target=2.0,
        entries=(
            entry("one-device", "one device", 0.2, [4, 3, 2], memory_bytes=4096),
            entry("1f1b", "1F1B", 0.1, [4, 3, 2], memory_bytes=2048, difference=0.0),
            entry("2bw", "2BW", 0.05, [4, 3.5, 2.5], delay=1.0, synchronous=False),
            Entry(method="hybrid", title="hybrid", reason="it takes 4 | devices"),
        ),
    )


def test_losses_are_compared_after_equal_time(record):
    one, pipeline, late, _ = record.entries
    assert record.equal_seconds == pytest.approx(20 * 0.05)  # the fastest one's whole time
    assert late.loss_at(1.0) == 2.5
    assert pipeline.loss_at(1.0) == 3  # 10 steps
    assert one.loss_at(1.0) == 3.5  # 5 steps, half way between 4 and 3
    assert one.loss_at(5.0) is None


def test_the_time_to_a_target_lies_between_evaluations(record):
    one, pipeline, late, _ = record.entries
    assert one.seconds_to(2.5) == pytest.approx(15 * 0.2)
    assert pipeline.seconds_to(2.0) == pytest.approx(20 * 0.1)
    assert late.seconds_to(2.0) is None
    assert late.seconds_to(5.0) == 0


def test_a_loss_that_is_not_finite_is_no_point(record):
    points = (LossPoint(step=0, loss=4.0), LossPoint(step=10, loss=None))
    diverged = replace(record.entries[1], losses=points)
    assert diverged.curve() == ((0.0, 4.0),)
    assert diverged.final_loss is None
    assert diverged.seconds_to(2.0) is None


def test_the_sentences_say_who_won_and_what_the_trade_is(record):
    said = summary(record)
    assert said.startswith("2BW took the least time per step, 50 ms, 4.00 times as fast as one dev")
    assert "gradients that are an update old" in said
    assert "Of those that compute what one device computes, 1F1B was fastest (100 ms)" in said
    assert "2BW needed the least memory per device, 1000 B instead of 4 KiB" in said
    assert "1F1B reached a held-out loss of 2 first, after 2 s" in said
    assert "1 method could not run here" in said


def test_where_nothing_is_faster_than_one_device_it_is_said(record):
    alone = replace(record, entries=(record.entries[0], record.entries[3]), target=None)
    assert "nothing was faster here than one device" in summary(alone)
    none = replace(record, entries=(record.entries[3],))
    assert summary(none) == "No method ran; each row says why."
    assert none.equal_seconds is None and "hybrid" in contest_page(none)


def test_the_table_has_a_row_for_each_method_and_the_reason_of_those_that_did_not_run(record):
    rows = table_rows(record)
    assert all(len(row) == len(COLUMNS) for row in rows)
    cells = dict(zip(COLUMNS, rows[2], strict=True))
    assert cells["bubble"] == "25 % → 50 %"
    assert cells["as one device"] == "no: delayed"
    assert cells["to target"] == "not reached"
    assert dict(zip(COLUMNS, rows[1], strict=True))["as one device"] == "to the bit"
    whole = replace(record.entries[1], method="whole")
    assert "itself" in table_rows(replace(record, entries=(whole,)))[0]
    lines = markdown(record).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {len(COLUMNS) + 1}
    assert "did not run: it takes 4 \\| devices" in lines[7]


def test_the_page_is_self_contained_and_escapes(record):
    page = contest_page(record)
    assert "a &lt;model&gt;" in page and "a <model>" not in page
    assert "2 cores &amp; busy." in page
    assert not re.search(r"(src|href)=", page)
    assert page.count('class="dark"') == 2 * 2  # for a wide and for a narrow screen
    assert page.count('class="late"') == 2


DISTURBED = "other programs had up to 48% of the cores meanwhile"


def test_a_ratio_that_others_have_measured_with_is_grey_and_says_so(record):
    one, pipeline, late, absent = record.entries
    disturbed = replace(record, entries=(one, replace(pipeline, others=0.48), late, absent))
    page = contest_page(disturbed)
    grey = re.findall(f'<td data-name="([^"]+)" class="figure doubtful" title="{DISTURBED}">', page)
    assert grey == ["time per step", "after equal time", "to target"]
    verdict = page[page.index('class="verdict"') :].partition("</p>")[0]
    told = f"1F1B was fastest (100 ms) (how fast says little: {DISTURBED})."
    doubtful = re.findall('<span class="doubtful">(.*?)</span>', verdict)
    assert [words.partition(" (how")[0].split()[-1] for words in doubtful] == ["ms)", "s"]
    assert told in summary(disturbed) and told in doubtful[0]
    assert "4.00 times as fast as one device" in verdict.replace(doubtful[0], "")
    says = f"Times of 1F1B say little, and are grey on a page: {DISTURBED}."
    assert says in page and says in markdown(disturbed)
    assert not re.search('class="[^"]*doubtful', contest_page(record))


def test_where_the_fastest_was_disturbed_so_is_what_others_had_learned_by_then(record):
    one, pipeline, late, absent = record.entries
    disturbed = replace(record, entries=(one, pipeline, replace(late, others=0.1), absent))
    page = contest_page(disturbed)
    assert page.count('data-name="after equal time" class="figure doubtful"') == 3
    assert page.count('data-name="time per step" class="figure doubtful"') == 1
    assert (
        "4.00 times as fast as one device"
        in re.search('<span class="doubtful">(.*?)</span>', page)[1]
    )


def test_each_panel_has_one_dark_line_and_all_others_behind_it(record):
    drawn = loss_panels(record)
    assert drawn.count('class="pale"') == 3 * 2
    assert drawn.count('class="dark"') == 2 and drawn.count('class="late"') == 1
    assert drawn.count('class="target"') == 3


def test_one_that_takes_very_long_is_cut_and_presses_no_other_into_a_corner(record):
    one, *others = record.entries
    slow = replace(record, entries=(replace(one, step_seconds=20.0), *others))
    assert loss_panels(record).count("<circle") == 3
    drawn = loss_panels(slow)
    assert drawn.count("<circle") == 2  # it ends beyond the frame
    farthest = max(float(x) for x in re.findall(r"[ML]([\d.]+) ", drawn))
    assert farthest <= float(re.search(r'width="([\d.]+)"', drawn)[1])


def test_the_suffix_decides_what_is_written(record, tmp_path):
    for suffix in (".html", ".svg", ".md", ".json"):
        write_contest(record, tmp_path / f"contest{suffix}")
        assert (tmp_path / f"contest{suffix}").read_text()
    assert ContestRecord.load(tmp_path / "contest.json") == record
    with pytest.raises(InputError, match=r"end the name in \.html, \.svg, \.md, \.json"):
        write_contest(record, tmp_path / "contest.png")
    with pytest.raises(InputError, match="the folder is not there"):
        write_contest(record, tmp_path / "none" / "contest.svg")


def test_its_table_fits_a_page_of_1280_pixels(record):
    """As wide as what cannot be broken in each column; the page's edges and the card's are not
    for the table."""
    sheet = resource("contest_page.css")
    size, padding = (
        float(re.search(p, sheet)[1]) for p in (r"font-size:([\d.]+)px", r"px (\d+)px")
    )
    wide = [
        replace(
            one,
            predicted_seconds=1.2345,
            step_seconds=0.9876,
            predicted_bytes=987_654_321,
            memory_bytes=987_654_321 - 2**24,
            moved_bytes=987_654_321,
            delay=10.5,
            recorded_delay=11.5,
        )
        for one in record.entries
    ]
    rows = table_rows(replace(record, entries=tuple(wide)))
    needed = 0.0
    for column, name in enumerate(COLUMNS):
        pieces = [*name.split(), *(p for row in rows[:3] for p in re.split("(?<=→) ", row[column]))]
        if column < 2:  # names and places break between words
            pieces = [word for piece in pieces for word in piece.split()]
        least = {0: 9.0, 1: 8.0}.get(column, 4.6) * size
        needed += max([least, *(text_width(piece, size) for piece in pieces)]) + 2 * padding
    assert needed <= 1280 - 2 * (0.03 * 1280 + 0.018 * 1280 + 1)
