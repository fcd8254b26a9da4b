"""Figures as PNG and PDF, by libraries that are made for it (the extra ``pictures``): resvg for
pixels, typst for vectors with text that can be searched. Both read SVG with the same parser.

That parser knows nothing of the reader's screen: style sheets are resolved before, to the light
ones, and fonts to those that most machines have.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

from penstock.base.errors import InputError

_NEEDED = {".png": "resvg_py", ".pdf": "typst"}
_FONTS = 'Arial,"Liberation Sans",Helvetica,"DejaVu Sans",sans-serif'
_PIXELS = 2.0
"""Of a PNG, in each direction, for each of the figure's: for screens and print as they are."""

_SHEET = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_MEDIA = re.compile(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}")
_SET = re.compile(r"--([\w-]+):([^;}]+)[;]?")
_FALLBACK = re.compile(r"([\w-]+):[^;{}]+;(?=\1:var\()")
_USED = re.compile(r"var\(--([\w-]+)\)")
_FAMILY = re.compile(r"font-family:[^;}]*")
_SCHEME = re.compile(r"color-scheme:[^;}]*;?")

_OTHER_WORDS = {
    "font-weight:650": "font-weight:700",
    ".timeline [class^=on-]": ".timeline .on-I,.timeline .on-W,.timeline .on-R",
}
"""What the parser does not know, and the same as it does."""


def check_installed(suffix: str) -> None:
    """Raise ``InputError`` unless the library is there that writes ``.png`` or ``.pdf``."""
    if find_spec(_NEEDED[suffix]) is None:
        raise InputError(
            f"{suffix} needs {_NEEDED[suffix].replace('_', '-')}; install it with "
            'pip install "penstock[pictures]", or end the name in .svg'
        )


def rendered(picture: str, suffix: str) -> bytes:
    """An SVG document of Penstock's as ``.png`` (two pixels for each of its own, in each direction)
    or ``.pdf`` (vectors; 96 of its pixels are an inch).

    Raises:
        InputError: the library is not installed.
    """
    check_installed(suffix)
    plain = light(picture).encode()
    if suffix == ".png":
        import resvg_py

        return bytes(resvg_py.svg_to_bytes(svg_string=plain.decode(), zoom=_PIXELS))
    import typst

    page: Any = {
        "main.typ": b"#set page(width: auto, height: auto, margin: 0pt)\n"
        b'#image("picture.svg", alt: sys.inputs.words)',
        "picture.svg": plain,
    }
    match = re.search(r'aria-label="([^"]*)"', picture)
    return bytes(typst.compile(page, sys_inputs={"words": match[1] if match else ""}))


def light(picture: str) -> str:
    """An SVG document as it is on a light screen: no media queries, no variables, fonts by name."""
    sheets = [_MEDIA.sub("", sheet) for sheet in _SHEET.findall(picture)]
    # Later sheets know the names that earlier ones set.
    values = dict(pair for sheet in sheets for pair in _SET.findall(sheet))

    def resolved(match: re.Match[str]) -> str:
        sheet = _SET.sub("", _SCHEME.sub("", _MEDIA.sub("", match[1])))
        sheet = _USED.sub(lambda used: values[used[1]], _FALLBACK.sub("", sheet))
        for theirs, ours in _OTHER_WORDS.items():
            sheet = sheet.replace(theirs, ours)
        return f"<style>{_FAMILY.sub(f'font-family:{_FONTS}', sheet)}</style>"

    return _SHEET.sub(resolved, picture)
