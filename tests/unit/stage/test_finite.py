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


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[1.0, 2.0], [-INF, 3.0]]),
        torch.tensor([[1.0, -INF], [2.0, 3.0]]).t(),
        torch.tensor([1.0, -INF, 2.0], dtype=torch.float16),
        torch.tensor(-INF).expand(4),
        torch.sparse_coo_tensor([[1]], [[-INF, 1.0]], (3, 2), check_invariants=True),
    ],
)
def test_among_gradients_of_weights_it_is_told_too(tensor):
    others = [torch.ones(2), torch.ones(3, dtype=torch.float64)]
    with pytest.raises(NotFinite, match="the gradient is -inf"):
        check_finite(7, "the gradient", [], [*others, tensor])
    with pytest.raises(NotFinite, match="the gradient is nan"):
        check_finite(7, "the gradient", [torch.tensor(NAN)], others)


def test_looking_at_gradients_leaves_their_numbers_as_they_are():
    numbers = torch.tensor([-0.0, 1e-44, 3e38, 1 / 3])
    gradients = [numbers.to(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    before = [gradient.clone() for gradient in gradients]
    check_finite(0, "", [], gradients)
    for gradient, then in zip(gradients, before, strict=True):
        assert torch.equal(gradient.view(torch.uint8), then.view(torch.uint8))


def test_large_numbers_whose_sum_is_infinite_and_what_has_no_fractions_are_finite():
    large = torch.full((9,), torch.finfo(torch.float32).max)
    half = torch.full((9,), 6e4, dtype=torch.float16)
    finite = [large, half, torch.tensor([1]), torch.tensor([True]), torch.empty(0)]
    check_finite(0, "", finite)
    check_finite(0, "", [], finite)
    check_finite(0, "", [], [large, half])
