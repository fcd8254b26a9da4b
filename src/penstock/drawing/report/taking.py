"""What a reader takes from a report: the command, to copy; the plan, the losses and the run, as
files that the page itself holds."""

from __future__ import annotations

from base64 import b64encode

from penstock.drawing.markup import escaped, tag
from penstock.drawing.report.run_report import Report

_MOST_BYTES = 2_000_000
"""A larger file is not put into the page as well; it lies beside it."""


def taking_section(report: Report) -> str:
    """A section with a button for the command and links to files; nothing where a report has
    none."""
    if not (report.command or report.plan_json or report.losses):
        return ""
    files = {
        "plan.json": ("the plan", report.plan_json),
        "losses.csv": ("the losses", _as_csv(report)),
        "run.json": ("everything on this page", report.to_json()),
    }
    links = [
        _link(name, words, content)
        for name, (words, content) in files.items()
        if content and len(content) <= _MOST_BYTES
    ]
    command = ""
    if report.command:
        button = tag("button", "Copy", type="button", data_copy=report.command)
        command = (
            f'<div class="command"><div class="scroll" tabindex="0"><pre>{escaped(report.command)}'
            f"</pre></div>{button}</div>"
        )
    body = f'{command}\n<p class="files">{" · ".join(links)}</p>'
    return f'<section class="card">\n{tag("h2", "Again, or elsewhere")}\n{body}\n</section>'


def _link(name: str, words: str, content: str) -> str:
    kind = "text/csv" if name.endswith(".csv") else "application/json"
    data = b64encode(content.encode()).decode()
    address = f"data:{kind};base64,{data}"
    return tag("a", f"{escaped(words)} ({escaped(name)})", href=address, download=name)


def _as_csv(report: Report) -> str:
    """A line per step, a column per curve; empty where a curve has no value."""
    curves = [dict(series.points) for series in report.losses]
    if not curves:
        return ""
    names = ['"' + series.name.replace('"', '""') + '"' for series in report.losses]
    steps = sorted({step for curve in curves for step in curve})
    rows = [
        [str(step), *("" if curve.get(step) is None else repr(curve[step]) for curve in curves)]
        for step in steps
    ]
    return "\n".join(",".join(row) for row in [["step", *names], *rows]) + "\n"
