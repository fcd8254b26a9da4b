"""Families describe themselves: what ``about`` reads from a docstring is written nowhere else.

It begins with the idea, and the law comes next. Paragraphs that begin with ``Wins:`` and ``Loses:``
say when to take the family and when not, and ``Source:`` names the papers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from penstock.core.schedule.families import family
from penstock.core.schedule.families.side_by_side import MEANING
from penstock.core.schedule.schedule import Schedule

_ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
_CITATION = re.compile(
    r'(?P<author>[A-Z][^,."();]*?)(?P<others> et al\.)?, "(?P<title>[^"]+),?",?'
    r"(?:,? (?P<venue>[A-Z][\w ]*? (?:19|20)\d\d))?(?:,? arXiv (?P<arxiv>\d{4}\.\d{4,5}))?"
)


@dataclass(frozen=True)
class Paper:
    """A publication.

    Attributes:
        author: the first one, or all of two.
        others: whether there are more.
        title: in full.
        venue: where it was published, with the year; may be empty.
        arxiv: its number there; may be empty.
        year: of publication, or of the preprint.
    """

    author: str
    others: bool
    title: str
    venue: str
    arxiv: str
    year: int

    def bibtex(self) -> str:
        """An entry for a bibliography."""
        surname = re.sub(r"\W", "", self.author.split(" and ")[0].split()[-1]).lower()
        word = next(word for word in re.findall(r"\w+", self.title.lower()) if len(word) > 3)
        author = f"{self.author} and others" if self.others else self.author
        fields = {
            "title": f"{{{self.title}}}",
            "author": author,
            "year": str(self.year),
            **({"booktitle": _without_year(self.venue)} if self.venue else {}),
            **({"eprint": self.arxiv, "archivePrefix": "arXiv"} if self.arxiv else {}),
            **({"url": f"https://arxiv.org/abs/{self.arxiv}"} if self.arxiv else {}),
        }
        rows = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items())
        kind = "inproceedings" if self.venue else "misc"
        return f"@{kind}{{{surname}{self.year}{word},\n{rows}}}"


@dataclass(frozen=True)
class Option:
    """An option that a family takes besides ranks and microbatches."""

    name: str
    default: str
    meaning: str


@dataclass(frozen=True)
class About:
    """A family, as its docstring describes it.

    Attributes:
        name: as ``schedules.build`` takes it.
        idea: what it does, in a sentence.
        law: its bubble and its memory.
        details: what else there is to know, paragraph by paragraph.
        wins, loses: when to take it, and when another one.
        options: what it takes besides ranks and microbatches.
        citation: who published it.
        drawing: a small one, as text.
    """

    name: str
    idea: str
    law: str
    details: tuple[str, ...]
    wins: str
    loses: str
    options: tuple[Option, ...]
    citation: str
    drawing: str

    @property
    def title(self) -> str:
        """The name by which people call the family."""
        return self.idea.partition(": ")[0] if ": " in self.idea else self.name

    @property
    def summary(self) -> str:
        """The idea without the title."""
        said = self.idea.partition(": ")[2] or self.idea
        return said[:1].upper() + said[1:]

    @property
    def arxiv(self) -> tuple[str, ...]:
        """The numbers of the papers, in the order in which they are named."""
        return tuple(dict.fromkeys(_ARXIV.findall(self.citation)))

    @property
    def papers(self) -> tuple[Paper, ...]:
        """The papers that are cited with their title."""
        return tuple(
            Paper(
                author=match["author"].strip(),
                others=bool(match["others"]),
                title=match["title"].rstrip(","),
                venue=match["venue"] or "",
                arxiv=match["arxiv"] or "",
                year=_year(match["venue"] or "", match["arxiv"]),
            )
            for match in _CITATION.finditer(self.citation)
            if match["venue"] or match["arxiv"]
        )

    def facts(self) -> dict[str, object]:
        """Everything as plain values."""
        return {
            "name": self.name,
            "idea": self.idea,
            "law": self.law,
            "details": self.details,
            "wins": self.wins,
            "loses": self.loses,
            "options": [asdict(option) for option in self.options],
            "paper": self.citation,
            "arxiv": self.arxiv,
            "bibtex": [paper.bibtex() for paper in self.papers],
        }


def about(name: str) -> About:
    """Read what the family called ``name`` says about itself.

    Raises:
        InputError: no family has this name.
    """
    function = family(name)
    idea, law, *said = _paragraphs(function.__doc__)
    return About(
        name=name,
        idea=idea,
        law=law,
        details=tuple(paragraph for paragraph in said if not _is_marked(paragraph)),
        wins=_marked(said, "Wins:"),
        loses=_marked(said, "Loses:"),
        options=tuple(_options(function, _marked(said, "Args:"))),
        citation=_marked(said, "Source:"),
        drawing=_drawing(function.__doc__),
    )


def _options(function: Callable[..., Schedule], meanings: str) -> Iterator[Option]:
    parameters = list(inspect.signature(function).parameters.values())[2:]
    border = "|".join(parameter.name for parameter in parameters)
    parts = re.split(rf"\b({border}): ", meanings) if border else []
    explained = {"replicas": MEANING, **dict(zip(parts[1::2], parts[2::2], strict=True))}
    for parameter in parameters:
        default = "" if parameter.default is parameter.empty else repr(parameter.default)
        yield Option(parameter.name, default, explained.get(parameter.name, "").strip())


def _paragraphs(docstring: str | None) -> list[str]:
    """Each on one line, with code as in Markdown."""
    text = inspect.cleandoc(docstring or "").replace("``", "`")
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def _drawing(docstring: str | None) -> str:
    """The output of the last example of a docstring."""
    examples = [
        paragraph
        for paragraph in inspect.cleandoc(docstring or "").split("\n\n")
        if paragraph.startswith(">>> ")
    ]
    shown = examples[-1].splitlines() if examples else []
    return "\n".join(line for line in shown if not line.startswith((">>>", "...")))


def _marked(paragraphs: list[str], mark: str) -> str:
    marked = (text.removeprefix(mark).strip() for text in paragraphs if text.startswith(mark))
    return next(marked, "")


def _is_marked(paragraph: str) -> bool:
    # The drawing and the sections for readers of the code are not prose about the schedule.
    return paragraph.startswith(("Wins:", "Loses:", "Source:", ">>>", "Args:", "Raises:"))


def _year(venue: str, arxiv: str | None) -> int:
    match = re.search(r"\b(?:19|20)\d\d\b", venue)
    # A venue has its year; where there is none, there is a preprint, whose number begins with it.
    return int(match[0]) if match else 2000 + int((arxiv or "")[:2])


def _without_year(venue: str) -> str:
    return re.sub(r" (?:19|20)\d\d$", "", venue)
