"""The rules of all operations of which it is known what becomes of a divided dimension."""

from __future__ import annotations

import torch
from torch import fx

from penstock.engine.following.arithmetic import ARITHMETIC, pointwise
from penstock.engine.following.dims import Known
from penstock.engine.following.moves import MOVES
from penstock.engine.following.rule import Rule, name_of

RULES = MOVES | ARITHMETIC


def rule_of(node: fx.Node, known: Known, member: int) -> Rule | None:
    """The rule of an operation on what is divided; ``None`` if it must be given whole values.

    Args:
        known: how values are divided that are.
        member: for whom arguments with sizes are.
    """
    find = RULES.get(name_of(node))
    if find is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        find = pointwise
    return None if find is None else find(node, known, member)


def position_rule(node: fx.Node, known: Known, member: int) -> Rule | None:
    """As ``rule_of``, where each member has positions from several places: a view must not cut what
    is divided in two, since then those of a member are no part of it. ``None`` also of what
    gives nothing that is divided."""
    rule = rule_of(node, known, member)
    lengths = {known[value].length for value in node.all_input_nodes if value in known}
    divided = None if rule is None else rule.divided
    return rule if divided is not None and divided.length in lengths else None
