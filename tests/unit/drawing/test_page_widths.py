"""Pages fit into wide and narrow windows: what is wider scrolls in a box of its own."""

from __future__ import annotations

import html
import json
import re

import pytest

from penstock.drawing.contest_page import contest_page
from penstock.drawing.report_page import report_page
from tests.kit.chromium import CHROMIUM, dom_of
from tests.unit.drawing.test_contest import record  # noqa: F401 - a fixture
from tests.unit.drawing.test_report_page import NUMBERS, report

WIDTHS = (1280, 390)
"""Of a laptop's window and of a phone, in pixels."""

# Windows of headless browsers are 500 pixels wide at least, frames may be narrower; scroll bars of
# phones lie on the page.
MEASURES = """<style>html{scrollbar-width:none}</style><script>addEventListener("load", () => {
const page = document.documentElement, clipped = [];
for (const element of document.body.querySelectorAll("*")) {
  if (element.closest(".scroll, svg") || !element.getClientRects().length) continue;
  if (element.getBoundingClientRect().right > page.clientWidth + 0.5)
    clipped.push(element.outerHTML.slice(0, 80));
}
parent.postMessage({width: page.clientWidth, needs: page.scrollWidth, clipped}, "*");
})</script>"""

HARNESS = """<!DOCTYPE html><body><pre></pre><script>
const told = [];
addEventListener("message", event => {{
  told.push(event.data);
  document.querySelector("pre").textContent = JSON.stringify(told);
}});
</script>{frames}</body>"""


def measured(pages, folder):
    """What each page says of itself in a frame of each width."""
    frames = ""
    for page in pages:
        content = html.escape(page.replace("</body>", f"{MEASURES}</body>"), quote=True)
        for width in WIDTHS:
            style = f"width:{width}px;height:900px;border:0"
            frames += f'<iframe style="{style}" srcdoc="{content}"></iframe>'
    harness = folder / "harness.html"
    harness.write_text(HARNESS.format(frames=frames))
    dom = dom_of(
        harness, folder / "profile", "--window-size=1400,900", "--virtual-time-budget=9000"
    )
    return json.loads(html.unescape(re.search("<pre>(.*?)</pre>", dom, re.DOTALL)[1]))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome")
def test_nothing_is_clipped_on_a_laptop_and_on_a_phone(record, tmp_path):  # noqa: F811
    command = "penstock train 'a model with a long name' --plan plan.json " + "--option " * 30
    full = report(headline="Two devices trained 1.61 times as fast.", numbers=NUMBERS)
    pages = [contest_page(record), report_page(full), report_page(report(command=command))]
    told = measured(pages, tmp_path)
    assert sorted(page["width"] for page in told) == sorted(WIDTHS * len(pages))
    for page in told:
        assert page["needs"] <= page["width"], page
        assert not page["clipped"], page
