"""What the words of a report mean, in place: under the pointer, and in a list that opens."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.drawing.markup import escaped, lines, tag

WORDS: Mapping[str, str] = {
    "activations": "what a forward keeps for its backward; most of a stage's memory comes and goes "
    "with them",
    "bubble": "the share of the devices' time in which they do nothing, since the order of work "
    "leaves gaps",
    "held-out": "measured on data that is never trained on",
    "in flight": "microbatches whose forward is done on a rank, and whose backward is not",
    "makespan": "from the first op's start to the last op's end",
    "median": "half of the steps took longer, half less",
    "microbatch": "a part of a minibatch that goes through the stages on its own; weights change "
    "only after all of them",
    "minibatch": "the rows after which the weights change",
    "optimizer": "what it remembers about each weight, as Adam's two averages",
    "rank": "a device, or the worker that has one",
    "stage bubble": "the same share, of each rank's time from its first op to its last only",
    "stage": "consecutive layers on one device",
    "throughput": "how much is trained per second",
}
"""Words by how they stand in the page, lower case; each meaning is part of a sentence."""

# Longer ones first, so that a stage bubble is no stage.
_ANY = re.compile(
    r"\b(" + "|".join(map(re.escape, sorted(WORDS, key=len, reverse=True))) + r")(e?s)?\b"
)


def explained(text: str) -> str:
    """Plain text as markup, in which each known word says under the pointer what it means."""

    def abbreviation(match: re.Match[str]) -> str:
        return tag("abbr", match[0], title=f"{match[1]}: {WORDS[match[1]]}")

    return _ANY.sub(abbreviation, escaped(text))


def glossary() -> str:
    """All words, for those who cannot point, in a list that is closed at first."""
    entries = lines(
        f"<div><dt>{escaped(word)}</dt><dd>{escaped(meaning)}</dd></div>"
        for word, meaning in WORDS.items()
    )
    summary = "<summary>What the words on this page mean</summary>"
    return f'<details class="card words-list">{summary}\n<dl>\n{entries}\n</dl>\n</details>'
