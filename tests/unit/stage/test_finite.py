"""What is not finite is found before weights learn from it, and nothing else is taken for it."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.stage.microbatch_graph import NotFinite, check_finite

NAN, INF = float("nan"), float("inf")
SPARSE = torch.sparse_coo_tensor([[1]], [[NAN, 1.0]], (3, 2), check_invariants=True)


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.tensor([1.0, NAN]), "nan"),
        (torch.tensor([[1.0], [-INF]], dtype=torch.float64), "-inf"),
        (torch.tensor([INF, -INF], dtype=torch.bfloat16), "inf"),
        (torch.tensor([complex(1, NAN)]), "nan"),
        (torch.nn.Parameter(torch.tensor(INF)), "inf"),
        (SPARSE, "nan"),
    ],
)
def test_it_is_told_by_its_value(tensor, told):
    with pytest.raises(NotFinite, match=rf"the gradient is \(?.*{told}.*; nothing") as caught:
        check_finite(7, "the gradient", [None, torch.ones(2), tensor])
    assert caught.value.microbatch == 7


def test_large_numbers_whose_sum_is_infinite_and_what_has_no_fractions_are_finite():
    large = torch.full((9,), torch.finfo(torch.float32).max)
    half = torch.full((9,), 6e4, dtype=torch.float16)
    check_finite(0, "", [large, half, torch.tensor([1]), torch.tensor([True]), torch.empty(0)])
