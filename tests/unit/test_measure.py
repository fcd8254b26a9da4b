"""``tools.measure`` finds the names that the glossary replaces, and fails for them if asked to."""

from __future__ import annotations

import pytest

from tools import measure

CLEAN = "class Plan:\n    def cut(self, stage):\n        best = stage\n        return best\n"
VAGUE = """
class _Harvest:
    def take(self, what):
        told = [one for one in what]
        return told

class Plan:
    pass
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose files a test writes."""
    folder = tmp_path / "penstock"
    folder.mkdir()
    monkeypatch.setattr(measure, "PACKAGE", folder)
    return folder


def printed(monkeypatch, capsys, *options):
    """(exit status, lines) of the tool."""
    monkeypatch.setattr("sys.argv", ["measure", *options])
    with pytest.raises(SystemExit) as ended:
        measure.main()
    return int(ended.value.code), capsys.readouterr().out.splitlines()


def test_a_clean_package_passes(package, monkeypatch, capsys):
    (package / "plans.py").write_text(CLEAN)
    status, lines = printed(monkeypatch, capsys, "--strict")
    assert status == 0
    assert lines[0].startswith("4 statements in 1 files")
    assert lines[-1].startswith("0 class names used twice, 0 definitions over 40 lines, 0 names")


def test_names_of_the_glossary_are_listed_with_better_words_and_fail(package, monkeypatch, capsys):
    (package / "plans.py").write_text(CLEAN)
    (package / "runs.py").write_text(VAGUE)
    assert printed(monkeypatch, capsys)[0] == 0  # nobody asked
    assert printed(monkeypatch, capsys, "--names")[0] == 0
    status, lines = printed(monkeypatch, capsys, "--strict")
    assert status == 1
    assert lines[4:] == [
        "  class Plan is in penstock.plans, penstock.runs; let all but one say which it is",
        "  penstock.runs:2: class _Harvest; use StepResult",
        "  penstock.runs:3: variable what; use the name of the subject, as name, kind or role",
        "  penstock.runs:4: variable told; use message, words, text or note",
        "  penstock.runs:4: variable one; use the name of the element, as entry, stage or path",
    ]


def test_the_glossary_proposes_no_word_that_it_replaces():
    words = {*measure.VARIABLES.values(), *measure.CLASSES.values()}
    assert not words & {*measure.VARIABLES, *measure.CLASSES}
