"""Graphs cut into parts: together they do what the whole does, each what it alone must."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from penstock.engine.tracing.graph_parts import as_function, parts_of
from penstock.engine.tracing.joint import joint_graph


def function(weight, value):
    first = torch.tanh(value @ weight.permute(1, 0))
    return [torch.tanh(first @ weight.permute(1, 0)).sum(dim=1)]


@pytest.fixture
def joint():
    given = [torch.randn(3, 3), torch.randn(2, 3)]
    return joint_graph(function, given, [True, True], None, lambda: [True]), given


def performed(parts, values):
    """The results of all parts, from the values of what the whole is given."""
    results = []
    for part in parts:
        made = as_function(part.module)([values[node] for node in part.takes])
        results += made[: len(part.ends)]
        values = {**values, **dict(zip(part.hands_on, made[len(part.ends) :], strict=True))}
    return results


def expected(given):
    weight, value = (tensor.clone().requires_grad_() for tensor in given)
    (output,) = function(weight, value)
    return [output.detach(), *torch.autograd.grad(output.sum(), [value, weight])]


def cut(joint, kept=None):
    weight, value = joint.gradients
    return parts_of(joint.module, [joint.outputs, [value], [weight]], lambda node: 0, kept)


def values_of(joint, given):
    (tangent,) = joint.tangents.values()
    return {**dict(zip(joint.given, given, strict=True)), tangent: torch.ones(2)}


def test_parts_together_do_what_the_whole_does(joint):
    graph, given = joint
    made = performed(cut(graph), values_of(graph, given))
    for ours, theirs in zip(made, expected(given), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_is_not_kept_is_made_again_by_the_part_that_first_needs_it(joint):
    graph, given = joint
    forward, inputs, weights = cut(graph, kept=set())
    assert forward.hands_on == []
    assert inputs.hands_on  # what the weights need, too
    for ours, theirs in zip(
        performed([forward, inputs, weights], values_of(graph, given)), expected(given), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_weights_are_read_by_each_part_and_no_view_of_them_is_handed_on(joint):
    graph, _ = joint
    weight = graph.given[0]
    forward, inputs, _ = cut(graph)
    assert weight in forward.takes
    assert weight in inputs.takes
    assert not any(weight in node.all_input_nodes for node in forward.hands_on)


def test_a_function_of_a_part_empties_what_it_is_given(joint):
    graph, given = joint
    forward = cut(graph)[0]
    values = [values_of(graph, given)[node] for node in forward.takes]
    as_function(forward.module)(values)
    assert values == []
    assert isinstance(forward.module, fx.GraphModule)
