import pytest

from penstock import schedules
from penstock.core.schedule import families
from penstock.core.schedule.about import about


@pytest.mark.parametrize("name", schedules.names())
def test_every_family_says_what_there_is_to_know(name):
    told = about(name)
    assert told.law and told.idea and told.arxiv
    assert told.wins and told.loses, "say in the docstring when it wins and when it loses"
    assert told.papers, 'cite as: Somebody et al., "Title", where and when, arXiv number'
    assert "rank 0 │" in told.drawing
    assert all(option.meaning for option in told.options)
    for paragraph in told.details:
        assert not paragraph.startswith((">>>", "Args:", "Raises:", "Wins:", "Loses:"))


@pytest.mark.parametrize("name", schedules.names())
def test_every_paper_that_a_family_names_has_an_entry(name):
    told = about(name)
    entries = [paper.bibtex() for paper in told.papers]
    assert {paper.arxiv for paper in told.papers} >= set(told.arxiv), "cite each with its title"
    # A title in quotes is a paper.
    assert len(entries) == told.citation.count('"') // 2 - told.citation.count('("')
    for entry in entries:
        for field in ("title", "author", "year"):
            assert f"  {field} = {{" in entry
        assert "booktitle" in entry or "eprint" in entry
        assert entry.count("{") == entry.count("}")
    assert len({entry.partition(",")[0] for entry in entries}) == len(entries)


def test_reading_a_family(monkeypatch):
    def made_up(num_ranks, num_microbatches, depth=3, *, other=None):
        """Made up: an idea.

        A law
        in two lines.

        A detail.

        Wins: Here,
        and there.

        Loses: Elsewhere.

        Source: One and Two,
        "Fast Pipes", SC 2021,
        arXiv 2107.00001; also Three et al., "The
        Slow Pipe", arXiv
        2208.00002, section 3.

        >>> draw()
        rank 0 │F0│

        Args:
            depth: how
                deep.
            other: something.
        """

    monkeypatch.setitem(families.FAMILIES, "made-up", made_up)
    told = about("made-up")
    assert (told.law, told.details) == ("A law in two lines.", ("A detail.",))
    assert (told.wins, told.loses) == ("Here, and there.", "Elsewhere.")
    assert [(one.name, one.default, one.meaning) for one in told.options] == [
        ("depth", "3", "how deep."),
        ("other", "None", "something."),
    ]
    assert told.drawing == "rank 0 │F0│"
    assert told.arxiv == ("2107.00001", "2208.00002")
    first, second = told.papers
    assert (first.author, first.others, first.venue, first.year) == (
        "One and Two",
        False,
        "SC 2021",
        2021,
    )
    assert (second.title, second.others, second.venue, second.year) == (
        "The Slow Pipe",
        True,
        "",
        2022,
    )
    assert first.bibtex().startswith("@inproceedings{one2021fast,\n")
    assert "booktitle = {SC}" in first.bibtex()
    assert second.bibtex().startswith("@misc{three2022slow,\n")
    assert "author = {Three and others}" in second.bibtex()
    assert "eprint = {2208.00002}" in second.bibtex()
