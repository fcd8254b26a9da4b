"""Changes of source code: what is changed, into what, and how a change is named."""

from __future__ import annotations

from textwrap import indent

import pytest

from tests.kit.mutating import mutations_of
from tests.soak import test_mutations
from tests.soak.mutations import EQUIVALENT, ROOMS, ROOT, drawn, equivalents, places

CHANGES = [
    ("a < b", ["a <= b", "a >= b"]),
    ("a == b is c", ["a != b is c", "a == b is not c"]),
    ("a in b", ["a not in b"]),
    ("a and b or c", ["(a and b) and c", "a or b"]),
    ("not a", ["a"]),
    ("-a", ["a"]),
    ("a + b * c", ["a - b * c", "b + c"]),
    ("a | b", ["a & b"]),
    ("x[3]", ["4", "2"]),
    ("x[40]", ["80"]),
    ("x[0.5]", ["1.0"]),
    ("x[True]", ["False"]),
    ("x['text']", []),
    ("f'{a + 1}'", []),
    ("b if a else c", ["c if a else b", "not a"]),
    ("x[f(a, b, c)]", ["f(b, a, c)", "f(a, c, b)"]),
    ("x[f(a, a)]", []),
    ("x[isinstance(a, b)]", []),
    ("x[min(a)]", ["max(a)"]),
    ("x[zip(a, strict=True)]", []),
    ("f(a)", ["pass"]),
    ("a.b = c", ["pass"]),
    ("a = c", []),
    ("a += c", ["pass"]),
    ("raise f(1, 2)", ["pass"]),
    ("assert a < 1, f(2, 3)", []),
    ("if TYPE_CHECKING:\n    f(a)", []),
    ("@f(True)\ndef g(a: f[1] = 2) -> f[3]:\n    pass", ["3", "1"]),
]


@pytest.mark.parametrize(("source", "expected"), CHANGES)
def test_what_a_piece_of_code_is_changed_into(source, expected):
    assert [one.after for one in mutations_of(f"def s():\n{indent(source, '  ')}\n")] == expected


SOURCE = '''"""Ä: bytes and letters differ."""
class A:
    def b(self):
        ä = (1
             + c)
        return ä + c  # ö

    def d(self): return [1, 1]
'''


def test_a_change_is_made_where_it_was_found_and_nowhere_else():
    changes = {
        (one.scope, one.line, one.change): one.applied(SOURCE) for one in mutations_of(SOURCE)
    }
    assert changes["A.b", 6, "ä + c → ä - c"] == SOURCE.replace("ä + c ", "(ä - c) ")
    assert changes["A.b", 4, "1 + c → 1 - c"] == SOURCE.replace("1\n             + c", "(1 - c)")
    assert changes["A.d", 8, "1 → 2 (#2)"] == SOURCE.replace("1, 1", "1, (2)")
    for changed in changes.values():
        compile(changed, "changed", "exec")


def test_names_of_changes_survive_moves_and_are_unique():
    def keys(source):
        return [(one.scope, one.change) for one in mutations_of(source)]

    assert keys(SOURCE) == keys("\n\n" + SOURCE)
    assert len(set(keys(SOURCE))) == len(keys(SOURCE))


def missing(paths):
    """Those of some tests that are not, or no longer, where a table says."""
    return [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_mutated_and_has_tests(room):
    unit, whole = ROOMS[room]
    assert missing([unit, *whole]) == []
    assert drawn(1, 9, [room]) == drawn(1, 9, [room]) != drawn(2, 9, [room])


def test_what_is_listed_as_equivalent_is_still_there_with_a_reason():
    listed = equivalents(EQUIVALENT.read_text())
    there = {place.key for room in ROOMS for place in places(room)}
    assert listed.keys() <= there, f"no such place any more: {sorted(listed.keys() - there)}"
    assert all(listed.values())


def test_the_files_and_the_place_that_the_soak_itself_is_tried_on_are_there():
    assert missing(test_mutations.TESTS) == []
    assert test_mutations.noticed().key == test_mutations.NOTICED
