"""Names that verbs take, in upper or lower case, and that a shell completes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.input import take

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class ScheduleName(click.ParamType[str]):
    """A schedule's name, with its options behind a colon: ``1F1B`` is ``1f1b``. What is none is
    left to whoever reads it."""

    name = "schedule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name as families have it."""
        from penstock.core.schedule.families import FAMILIES

        family, colon, options = str(value).partition(":")
        lower = family.lower()
        return f"{lower}{colon}{options}" if lower in FAMILIES else value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The families whose names begin so."""
        from penstock.core.schedule import families

        return _beginning_with(incomplete, families.names())


class Source(ScheduleName):
    """What can be drawn: a schedule's name, a file, or ``-``, such a file on standard input."""

    name = "source"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name as families have it, or that of a file."""
        take(str(value), ctx)
        return super().convert(value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The families whose names begin so, and files, which the shell knows."""
        from click.shell_completion import CompletionItem

        named = super().shell_complete(ctx, param, incomplete)
        return [*named, CompletionItem(incomplete, type="file")]


class PolicyName(click.ParamType[str]):
    """A weight-version policy's name, with its fields behind a colon."""

    name = "policy"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The policies whose names begin so."""
        from penstock.core.versions import POLICIES

        return _beginning_with(incomplete, POLICIES)


def _beginning_with(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(name) for name in names if name.startswith(incomplete.lower())]
