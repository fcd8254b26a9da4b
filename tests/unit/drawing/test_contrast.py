"""What is written on a block can be read: WCAG's ratio for text, on light and on dark ground, over
every colour that text stands on."""

from __future__ import annotations

import re

import pytest

from penstock.core.schedule.op import Kind
from penstock.drawing.markup import resource
from penstock.drawing.timeline.boxes import LETTERS, PALEST, ink

LEAST = 4.5
SCHEMES = ("light", "dark")
_DARK = re.compile(r"@media \(prefers-color-scheme:dark\)\{((?:[^{}]*\{[^{}]*\})*)\}")
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")


def rules(name: str, scheme: str) -> dict[str, dict[str, str]]:
    """By selector, the declarations of a style sheet; variables are replaced."""
    text = resource(name)
    dark = "".join(_DARK.findall(text))
    found: dict[str, dict[str, str]] = {}
    for part in (_DARK.sub("", text), dark if scheme == "dark" else ""):
        for selectors, body in _RULE.findall(part):
            said = dict(one.partition(":")[::2] for one in body.split(";") if one)
            for selector in selectors.split(","):
                found.setdefault(selector.strip(), {}).update(said)
    return found


def variables(sheet: dict[str, dict[str, str]]) -> dict[str, str]:
    return {
        name: value
        for said in sheet.values()
        for name, value in said.items()
        if name.startswith("--")
    }


def colour(value: str, known: dict[str, str]) -> str:
    """A colour in six digits."""
    named = re.fullmatch(r"var\((--[\w-]+)\)", value)
    value = known[named[1]] if named else value
    assert re.fullmatch("#([0-9a-f]{3}|[0-9a-f]{6})", value), value
    return value if len(value) == 7 else "#" + "".join(2 * digit for digit in value[1:])


def luminance(value: str) -> float:
    parts = [int(value[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def sheet_of(*names: str, scheme: str) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Several sheets of one picture, the later ones on top."""
    merged: dict[str, dict[str, str]] = {}
    for name in names:
        for selector, said in rules(name, scheme).items():
            merged.setdefault(selector, {}).update(said)
    return merged, variables(merged)


def fill(sheet, known, selector: str) -> str:
    return colour(sheet[selector]["fill"], known)


def test_the_ratio_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("level", range(PALEST + 1))
@pytest.mark.parametrize("kind", LETTERS)
def test_labels_of_ops(kind: Kind, level: int, scheme: str):
    for sheet_name, dark_ink, light_ink in (
        ("timeline.css", ".timeline .span text", ".timeline .span .on-dark"),
        ("plan.css", ".plan .block text", ".plan .block .on-dark"),
    ):
        sheet, known = sheet_of("timeline.css", sheet_name, scheme=scheme)
        box = fill(sheet, known, f".timeline .{LETTERS[kind]}.s{level}")
        text = fill(sheet, known, light_ink if ink(kind, level) == "on-dark" else dark_ink)
        assert contrast(text, box) >= LEAST


@pytest.mark.parametrize("scheme", SCHEMES)
def test_hatched_boxes_have_a_halo_of_their_own_colour_around_their_labels(scheme):
    sheet, known = sheet_of("timeline.css", scheme=scheme)
    for letter in "IWR":
        for level in range(PALEST + 1):
            halo = colour(sheet[f".timeline .on-{letter}.s{level}"]["stroke"], known)
            assert halo == fill(sheet, known, f".timeline .{letter}.s{level}")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_labels_of_versions_transfers_and_jobs(scheme):
    found = 0
    for name, text_of, boxes in (
        ("versions.css", ".timeline .span .version", r"\.timeline \.v\d"),
        ("links.css", ".timeline .transfer text", r"\.timeline \.[VGSTOU]"),
        ("fleet.css", ".fleet .turn text", r"\.fleet \.j\d+"),
    ):
        sheet, known = sheet_of(name, scheme=scheme)
        for selector in (one for one in sheet if re.fullmatch(boxes, one)):
            found += 1
            text, box = fill(sheet, known, text_of), fill(sheet, known, selector)
            assert contrast(text, box) >= LEAST, selector
    assert found == 6 + 6 + 12


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "names", [("timeline.css", "plan.css"), ("chart.css",), ("contest.css",), ("fleet.css",)]
)
def test_words_beside_the_blocks(names, scheme):
    _, known = sheet_of(*names, scheme=scheme)
    grounds = [known[ground] for ground in ("--paper", "--card", "--track") if ground in known]
    assert grounds
    for text in ("--ink", "--muted", "--over"):
        for ground in grounds:
            assert text not in known or contrast(known[text], colour(ground, known)) >= LEAST


@pytest.mark.parametrize("scheme", SCHEMES)
def test_words_of_pages(scheme):
    _, known = sheet_of("page.css", scheme=scheme)
    for text in ("--ink", "--muted", "--accent"):
        for ground in ("--page", "--card"):
            assert contrast(known[text], known[ground]) >= LEAST


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["plan.css", "page.css"])
def test_what_memory_is_spent_on_has_no_colour_of_an_op(name, scheme):
    """Both stand in one picture, where a colour should mean one thing."""
    sheet, known = sheet_of("timeline.css", name, scheme=scheme)
    ops = {fill(sheet, known, f".timeline .{letter}.s0") for letter in set(LETTERS.values())}
    memory = [known[f"--m{part}"] for part in range(4)]
    assert len({*memory}) == 4
    for amount in memory:
        for op in ops:
            apart = [int(amount[at : at + 2], 16) - int(op[at : at + 2], 16) for at in (1, 3, 5)]
            assert sum(part * part for part in apart) > 45**2, (amount, op)
