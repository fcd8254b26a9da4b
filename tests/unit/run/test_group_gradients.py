"""Members of a group complete their gradients, and know together what none knows alone."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from penstock.engine.reduce.agreement import Share
from penstock.engine.run.rank.updater import GroupGradients
from tests.kit.groups import together


def parameter(gradient):
    made = nn.Parameter(torch.zeros_like(gradient))
    made.grad = gradient
    return made


def holding(*, terms=(), parts=()):
    return SimpleNamespace(terms=terms, parts=parts)


def test_terms_are_summed_once_in_a_round_and_stage_by_stage():
    def summed(group):
        first, second = (parameter(torch.full((2,), float(group.index + 1))) for _ in range(2))
        gradients = GroupGradients(
            group, {0: holding(terms=[first]), 1: holding(terms=[second, nn.Parameter(first.data)])}
        )
        gradients.begin()
        gradients.complete(1)
        seen = [first.grad.clone(), second.grad.clone()]
        gradients.complete()
        gradients.complete()
        return [*seen, first.grad, second.grad]

    one, three, also_three, still_three = together(2, summed)[0]
    assert torch.equal(one, torch.ones(2))
    for summed_up in (three, also_three, still_three):
        assert torch.equal(summed_up, torch.full((2,), 3.0))


def test_norms_of_parts_are_those_of_the_whole_and_others_stay():
    whole = torch.tensor([3.0, 4.0, 12.0])

    def known(group):
        part, repeated = parameter(whole.tensor_split(2)[group.index]), parameter(torch.ones(4))
        gradients = GroupGradients(group, {0: holding(parts=[part])})
        parameters = {7: part, 9: repeated}
        return gradients.share(Share.of(parameters), parameters).norms

    for norms in together(2, known):
        assert norms[7] == 13.0 and norms[9] == 2.0


def test_an_overflow_of_one_member_is_everybodys():
    def told(group):
        overflow = torch.tensor([float(group.index == 1)])
        return float(GroupGradients(group, {}).share(Share({}, overflow), {}).overflow)

    assert together(3, told) == [1.0, 1.0, 1.0]
