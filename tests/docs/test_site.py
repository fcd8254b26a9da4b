"""The site: it can be built without a warning, and its lists are of what is there."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import sys
from functools import cache

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import penstock as pk
from tests.kit.paths import DOCS, ROOT

SOURCES = sorted((ROOT / "src" / "penstock").rglob("*.py"))


@pytest.fixture
def told(monkeypatch):
    """What MkDocs is told beside ``mkdocs.yml``: modules by their names."""
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    yield importlib.import_module
    for name in ("hook", "docstrings"):
        sys.modules.pop(name, None)


def test_the_site_can_be_built_without_a_warning(tmp_path, monkeypatch):
    """Every link of every page leads somewhere, also to a heading; every entry of the navigation is
    there; every name of the reference has a docstring that can be read."""
    monkeypatch.chdir(ROOT)
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    config.plugins.on_shutdown()
    home = (tmp_path / "index.html").read_text()
    assert "Train networks that are too big" in home
    assert 'src="schedules/1f1b.svg"' in home
    assert "unpkg" not in home and 'src="site/worker.js"' in home  # search without a server
    assert (tmp_path / "site/worker.js").exists()
    assert (tmp_path / "src/penstock/core/versions/policies.py").exists()  # a page links to it
    assert "pk.Pipeline" in (tmp_path / "reference/index.html").read_text()


def test_doctests_become_code(told):
    results = doctest.testmod(told("docstrings"))
    assert results.attempted == 1
    assert results.failed == 0


def test_a_page_that_nobody_lists_is_not_lost(told):
    complete = told("hook").complete
    nav = ["a.md", {"Folder": ["folder/"]}, {"Named": "b.md"}]
    pages = ["a.md", "b.md", "folder/x.md", "folder/y.md", "new.md"]
    filled = ["a.md", {"Folder": ["folder/x.md", "folder/y.md"]}, {"Named": "b.md"}]
    assert complete(nav, pages) == [*filled, {"More": ["new.md"]}]
    assert complete(nav, pages[:-1]) == filled


def text_of(node):
    """A string of the source, with ``…`` for what is put into it."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(value) or "…" for value in values)
    return None


@cache
def said_in_the_source():
    """All strings of the package: those that errors are made of are among them."""
    trees = (ast.parse(path.read_text()) for path in SOURCES)
    return [text for tree in trees for node in ast.walk(tree) if (text := text_of(node))]


def quoted_errors():
    lines = (DOCS / "troubleshooting.md").read_text().splitlines()
    cells = [line.split(" | ")[0] for line in lines if line.startswith("| `")]
    return [quoted for cell in cells for quoted in re.findall(r"`([^`]+)`", cell)]


def test_errors_of_troubleshooting_are_those_of_the_source():
    quoted = quoted_errors()
    assert len(quoted) > 45
    for error in quoted:
        pattern = re.compile(".+?".join(map(re.escape, error.split("…"))))
        assert any(pattern.search(text) for text in said_in_the_source()), error


def referred():
    """The objects of which the reference has an entry."""
    pages = "".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))
    names = re.findall(r"^::: ([\w.]+)$", pages, flags=re.MULTILINE)
    assert len(names) == len(set(names))
    for name in names:
        room, _, attribute = name.rpartition(".")
        yield getattr(importlib.import_module(room), attribute)


def test_the_reference_has_every_public_name():
    entries = [*referred()]
    groups = {"schedules": pk.schedules.build, "versions": pk.versions.Flush}
    listed = (DOCS / "reference" / "index.md").read_text()
    for name in pk.__all__:
        assert f"`pk.{name}`" in listed
        entry = groups.get(name, getattr(pk, name))
        whole_room = vars(pk.errors).values() if pk.errors in entries else ()
        assert entry in entries or entry in whole_room, name
    for policy in pk.versions.POLICIES.values():
        assert policy in entries
