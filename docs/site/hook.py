"""What MkDocs is told beside ``mkdocs.yml``, so that the site needs no second copy of anything.

- ``README.md`` is the home page, and the other pages of the repository's root are pages, too.
- A link that leads out of ``docs/`` leads to a copy of that file in the site; one to a folder is
  text.
- An entry ``folder/`` of the navigation means the folder's pages that are not listed elsewhere.
  What is listed nowhere comes under "More", so that a new page is never lost.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[2]
FROM_THE_ROOT = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
}
"""Pages of the repository's root, and where they are in the site."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^( *```.*?^ *```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root and the files that links lead to, and complete the navigation."""
    for source, target in FROM_THE_ROOT.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    wanted = {
        linked.relative_to(ROOT).as_posix()
        for file in files.documentation_pages()
        for linked in _linked_files(file)
    }
    for path in sorted(wanted):
        if files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    pages = sorted(file.src_uri for file in files.documentation_pages())
    config.nav = complete(config.nav, pages)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where their targets are in the site; give the home page all of the width."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]

    def pointed(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        place = _place_of(page.file, target)
        if place is None:
            return match[0]
        if place.is_dir():
            return text
        to = posixpath.relpath(_in_site(place), posixpath.dirname(page.file.src_uri) or ".")
        _, hash_, anchor = target.partition("#")
        return f"{mark}[{text}]({to}{hash_}{anchor})"

    return "".join(
        part if part.lstrip().startswith("```") else _LINK.sub(pointed, part)
        for part in _FENCE.split(markdown)
    )


def complete(nav: list[Any], pages: list[str]) -> list[Any]:
    """The navigation with its folders filled in, and "More" for pages that it does not have."""
    listed = {*_entries(nav)}
    rest = [page for page in pages if page not in listed]

    def filled(entries: list[Any]) -> Iterator[Any]:
        for entry in entries:
            if isinstance(entry, dict):
                for title, value in entry.items():
                    yield {title: [*filled(value)] if isinstance(value, list) else value}
            elif entry.endswith("/"):
                yield from (page for page in rest if page.startswith(entry))
            else:
                yield entry

    whole = [*filled(nav)]
    listed = {*_entries(whole)}
    more = [page for page in pages if page not in listed]
    return [*whole, {"More": more}] if more else whole


def _entries(nav: list[Any]) -> Iterator[str]:
    """The pages and folders that a navigation names."""
    for entry in nav:
        values = entry.values() if isinstance(entry, dict) else [entry]
        for value in values:
            yield from _entries(value) if isinstance(value, list) else [value]


def _linked_files(file: File) -> Iterator[Path]:
    """Files outside of ``docs/`` that a page links to, and that are no pages of the site."""
    for _, _, target in _LINK.findall(_FENCE.sub("", file.content_string)):
        place = _place_of(file, target)
        if place is not None and place.is_file() and _in_site(place) == _in_repository(place):
            yield place


def _place_of(file: File, target: str) -> Path | None:
    """What a relative link leads to, if it is there and not simply beside the page in ``docs/``."""
    path = target.partition("#")[0]
    source = Path(str(file.abs_src_path))
    if not path or ":" in path:
        return None
    place = (source.parent / path).resolve()
    within = (ROOT / "docs") in place.parents
    if not place.exists() or ((ROOT / "docs") in source.parents and within and place.is_file()):
        return None
    return place


def _in_repository(place: Path) -> str:
    return place.relative_to(ROOT).as_posix()


def _in_site(place: Path) -> str:
    path = _in_repository(place)
    return FROM_THE_ROOT.get(path, path.removeprefix("docs/"))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Let the page find what search needs without a server beside it, not on the internet."""
    here = get_relative_url("site/worker.js", page.url)
    return output.replace("https://unpkg.com/iframe-worker/shim", here)
