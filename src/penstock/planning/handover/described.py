"""``Described``: what a config of another engine says of a plan; and configs as the fields that
they set, whatever they are written in. Nothing of them is run.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from penstock.base.errors import InputError
from penstock.base.values import expect, is_whole, shown
from penstock.planning.handover.modules import blocks_of

Fields = dict[str, Any]


class Described(NamedTuple):
    """A plan in the words of ``penstock.plan``, as a config of another engine describes it.

    Attributes:
        cuts: the numbers of the layers with which all stages but the first begin.
        ranks: of one copy of the pipeline.
        schedule: the family, its options behind a colon.
        microbatches: of each copy of the pipeline, per step.
        microbatch_size: rows; 0 where the config does not say.
        copies: of the pipeline, by data parallelism.
        tensor_ranks: devices that share every layer.
        is_sharded: whether copies share the optimizer's state.
        recompute: what runs forward twice.
        notes: what the plan leaves out of what the config says, in sentences.
        expert_ranks: copies that divide experts.
    """

    cuts: tuple[int, ...]
    ranks: int
    schedule: str
    microbatches: int
    microbatch_size: int = 0
    copies: int = 1
    tensor_ranks: int = 1
    is_sharded: bool = False
    recompute: Literal["never", "layers", "stage"] = "never"
    notes: tuple[str, ...] = ()
    expert_ranks: int = 1


class Expression(str):
    """Python that a config computes a value with, and that is not run."""


class ConfigFields:
    """The fields that a config sets, with errors that name them.

    Args:
        fields: by name.
        engine: the engine's name for people.
    """

    def __init__(self, fields: Fields, engine: str) -> None:
        self.fields = fields
        self.engine = engine

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number.

        Raises:
            InputError: it is missing and has no default, or is something else.
        """
        value = self.fields.get(name)
        if value is None:
            if default is None:
                raise InputError(f"the config does not set {name}, which {self.engine} needs here")
            return default
        number = (
            int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value) else value
        )
        if not is_whole(number) or number < least:
            raise InputError(f"{name} is {shown(value)}; give its value, a whole number ≥ {least}")
        return int(number)

    def microbatches(self, name: str, default: int, rows: int | None) -> tuple[int, int]:
        """How many microbatches a copy's batch makes, and their rows.

        Args:
            name, default: of the field that has the batch.
            rows: of a microbatch; ``None`` for the whole batch.

        Raises:
            InputError: they do not divide it.
        """
        batch = self.whole(name, default)
        rows = batch if rows is None else rows
        if batch % rows:
            raise InputError(f"{name} {batch} is no multiple of microbatches of {rows} rows")
        return batch // rows, rows

    def flag(self, name: str) -> bool:
        """Whether something is switched on."""
        return self.fields.get(name) in (True, "True", "true", "1")

    def left_out(self, name: str) -> list[str]:
        """A note on a degree for which plans have no word, if it is more than 1."""
        degree = self.whole(name, 1)
        return [f"{name} is {degree}, for which plans have no word; it is left out"] * (degree > 1)

    def text(self, name: str, default: str = "") -> str:
        """A word."""
        value = self.fields.get(name)
        if value is None:
            return default
        if isinstance(value, Expression) or not isinstance(value, str):
            raise InputError(f"{name} is {shown(value)}; give its value, a text")
        return value


def fields_of(config: object, known: Set[str], others: Collection[str] = ()) -> Fields:
    """The fields that a config sets.

    Args:
        config: text of Python, JSON, or a command with ``--name value``; a mapping, also of
            mappings; or an object with such attributes.
        known: their names; nothing else is looked at.
        others: names that look like one of these, and mean something else.

    Raises:
        InputError: it is none of these, or sets none of them; or a name is almost one of them.
    """
    fields = _fields(config, known)
    set_here = {name: value for name, value in fields.items() if name in known}
    _check_names(fields.keys() - set_here.keys() - {*others}, known - set_here.keys())
    if not set_here:
        raise InputError(
            f"the config sets none of {', '.join(sorted(known)[:6])} …; give the text of the file, "
            "or its fields as a dictionary"
        )
    return set_here


_MISTYPED = 0.9
"""How alike two names are, of which one is meant by the other: a config has many others."""


def _check_names(unknown: Collection[str], missing: Collection[str]) -> None:
    """Raise ``InputError`` for a name that is almost one of those which the config does not set."""
    for name in sorted(unknown):
        for meant in difflib.get_close_matches(name, sorted(missing), 1, _MISTYPED):
            raise InputError(
                f"the config sets {shown(name)}, which is no field that is known here; write "
                f"{meant}, if that is meant"
            )


def _fields(config: object, known: Collection[str]) -> Fields:
    if isinstance(config, Mapping):
        return _of_mapping(config)
    if not isinstance(config, str):
        return _of_object(config, known)
    text = config.strip()
    if text.startswith("{"):
        return _of_mapping(_json(text))
    if re.search(r"(^|\s)--\w", text):
        return _of_arguments(text)
    return _of_python(text)


def _json(text: str) -> Mapping[str, Any]:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the config is no JSON: {error}") from None
    expect(tree, dict, "the config", "give an object with its fields")
    fields: Mapping[str, Any] = tree
    return fields


def _of_mapping(config: Mapping[str, Any]) -> Fields:
    """The fields of all mappings in each other, of each once: YAML may name one many times."""
    fields: Fields = {}
    groups, known = [config], {id(config)}
    for group in groups:
        for name, value in group.items():
            if not isinstance(value, Mapping):
                fields[str(name)] = value
            elif id(value) not in known:
                known.add(id(value))
                groups.append(value)
    return fields


def _of_object(config: object, known: Collection[str]) -> Fields:
    """The attributes of an object, and of those of its attributes that group others."""
    places = [config, *(getattr(config, name, None) for name in ("parallelism", "training"))]
    return {
        name: getattr(place, name)
        for place in places
        for name in (*known, *getattr(place, "__dict__", ()))
        if place is not None and hasattr(place, name)
    }


def _of_arguments(text: str) -> Fields:
    """``--name value``, as in a command or a shell script; ``--a.b-c`` is ``b_c``."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"the arguments cannot be read: {error}") from None
    fields: Fields = {}
    for word, following in pairwise([*words, "--"]):
        if not word.startswith("--"):
            continue
        name, has_value, value = word[2:].partition("=")
        key = name.rpartition(".")[2].replace("-", "_")
        fields[key] = value if has_value else True if following.startswith("--") else following
    return fields


def _of_python(text: str) -> Fields:
    """Keywords of calls, and what is assigned to attributes; nothing of it is run."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"the config is no Python: {error}") from None
    fields: Fields = {}
    for node in ast.walk(tree):
        pairs: list[tuple[str | None, ast.expr]] = []
        if isinstance(node, ast.Call):
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
        elif isinstance(node, ast.Assign):
            pairs = [(t.attr, node.value) for t in node.targets if isinstance(t, ast.Attribute)]
        fields |= {name: _literal(value) for name, value in pairs if name}
    return fields


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Expression(ast.unparse(node))


def copies_of(num_devices: int | None, size: int, engine: str) -> int:
    """How many copies of a pipeline all devices of a job make.

    Args:
        num_devices: ``None`` where nobody says.
        size: devices of one copy. A job with fewer is the caller's to refuse.
        engine: the engine's name for people.

    Raises:
        InputError: some devices would be left over.
    """
    if num_devices is None or num_devices < size:
        return 1
    if num_devices % size:
        raise InputError(
            f"the config makes groups of {size} devices, and {num_devices} are no multiple of "
            f"that, which {engine} refuses; give a cluster of the devices that the job has"
        )
    return num_devices // size


def cuts_between_blocks(names: Sequence[str], counts: Sequence[int]) -> tuple[int, ...]:
    """Where stages begin that have so many blocks each: modules before the blocks are the first
    stage's, those behind the last one's.

    Raises:
        InputError: the model has another number of blocks, or a stage would have no layers.
    """
    blocks = blocks_of(names)
    if sum(counts) != len(blocks.starts):
        raise InputError(
            f"the config has stages of {' + '.join(map(str, counts))} blocks, but {blocks.name!r} "
            f"of the model has {len(blocks.starts)}"
        )
    places = [*blocks.starts, blocks.behind]
    cuts, reached = [], 0
    for count in counts[:-1]:
        reached += count
        cuts.append(places[reached])
    for stage, (start, stop) in enumerate(pairwise([0, *cuts, len(names)])):
        if start >= stop:
            raise InputError(f"stage {stage} of the config has no layers, which no plan here has")
    return tuple(cuts)
