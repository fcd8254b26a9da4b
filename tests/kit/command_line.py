"""The command line, called as people do and without starting a process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from penstock.base.errors import PenstockError
from penstock.cli import penstock


def succeed(*arguments) -> Result:
    """The result of a verb that succeeds."""
    result = CliRunner().invoke(penstock, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def run(*arguments) -> str:
    """Standard output of a verb that succeeds."""
    return succeed(*arguments).stdout


def refused(*arguments) -> str:
    """What a verb says that is refused, or whose arguments are wrong."""
    result = CliRunner().invoke(penstock, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, PenstockError), result.exception
        return str(result.exception)
    assert result.exit_code == 2
    return result.output
