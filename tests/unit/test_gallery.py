"""``docs/schedules`` is what ``make gallery`` writes, so that it cannot go stale."""

import importlib.util
import re
from pathlib import Path

import pytest

from penstock import schedules

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("gallery", DOCS / "gallery" / "make.py")
    gallery = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gallery)
    target = tmp_path_factory.mktemp("schedules")
    gallery.main(target)
    return target


def test_the_gallery_is_up_to_date(written):
    """If it is not: ``make gallery``, and look at what has changed."""
    kept = {path.name: path.read_text() for path in (DOCS / "schedules").iterdir()}
    new = {path.name: path.read_text() for path in written.iterdir()}
    assert sorted(kept) == sorted(new)
    assert [name for name in new if new[name] != kept[name]] == []


def test_every_family_has_its_page_and_is_in_the_index(written):
    index, choosing = ((written / page).read_text() for page in ("index.md", "choosing.md"))
    for name in schedules.names():
        page = (written / f"{name}.md").read_text()
        assert f"({name}.svg)" in page and (written / f"{name}.svg").exists()
        assert f"[{name}]({name}.md)" in index and f"({name}.svg)" in index
        for heading in ("Law", "When it wins", "When it loses", "How to cite"):
            assert f"\n## {heading}\n\n" in page
        assert "bubble" in page and "stage bubble" in page
    assert "post-validation" in choosing and "(choosing.svg)" in choosing


def test_links_lead_somewhere():
    for page in (DOCS / "schedules").glob("*.md"):
        for target, anchor in re.findall(r"\]\(([^)#:]+)(#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
            if anchor:
                headings = re.findall(r"^#+ (.*)$", (page.parent / target).read_text(), re.M)
                assert anchor[1:] in [one.lower().replace(" ", "-") for one in headings]
