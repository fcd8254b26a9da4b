"""Code that is said to treat positions alike gives each member what it gives for all of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.engine.context.leaves import through
from penstock.engine.context.zigzag import PositionDim, shares, taken
from penstock.engine.following.dims import ShardedDim
from penstock.engine.tensor.layouts import SEQUENCE, WHOLE
from penstock.engine.tensor.recorded import for_member
from penstock.engine.tensor.recorded_writer import RecordedLayouts
from tests.kit.groups import together

ROWS, LENGTH, WIDTH, SIZE = 2, 6, 4, 3


def halves(value, dim):
    first, second = value.chunk(2, dim)
    return first * second


def own_mean(value, dim):
    return value - value.mean(dim, keepdim=True)


STEPS = {
    **{f"transpose {a} {b}": lambda x, a=a, b=b: x.transpose(a, b)
       for a, b in ((0, 1), (1, 2), (0, 2), (-1, -2))},
    **{f"softmax {d}": lambda x, d=d: x.softmax(d) for d in range(-1, 3)},
    **{f"cumsum {d}": lambda x, d=d: x.cumsum(d) for d in range(3)},
    **{f"flip {d}": lambda x, d=d: x.flip(d) for d in range(3)},
    **{f"roll {d}": lambda x, d=d: x.roll(1, d) for d in range(3)},
    **{f"mean {d}": lambda x, d=d: own_mean(x, d) for d in range(3)},
    **{f"amax {d}": lambda x, d=d: x.amax(d).unsqueeze(d) + x for d in range(3)},
    **{f"slice {d}": lambda x, d=d: x.narrow(d, 0, 2) for d in range(3)},
    **{f"halves {d}": lambda x, d=d: halves(x, d) for d in range(3)},
    **{f"select {d}": lambda x, d=d: x.select(d, 0).unsqueeze(d) + x for d in range(3)},
    **{f"stack {d}": lambda x, d=d: torch.stack([x, x.sin()], d).flatten(d, d + 1)
       for d in range(2)},
    **{f"twice {d}": lambda x, d=d: x.repeat_interleave(2, d) for d in range(3)},
    **{f"cat {d}": lambda x, d=d: torch.cat([x, x.exp()], d) for d in range(3)},
    "merge 0": lambda x: x.flatten(0, 1).unsqueeze(0),
    "merge 1": lambda x: x.flatten(1, 2).unsqueeze(1),
    "apart": lambda x: x.reshape(x.shape[0], -1, 2, x.shape[2]).permute(0, 2, 1, 3).flatten(0, 1),
    "heads": lambda x: x.unflatten(-1, (2, -1)).transpose(1, 2).flatten(0, 1),
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "norm of two": lambda x: F.layer_norm(x, x.shape[-2:]),
    "times": lambda x: x @ torch.ones(4, 4, dtype=x.dtype).tril(),
    "scores": lambda x: x @ x.transpose(-1, -2),
    "sin": torch.sin,
    "by length": lambda x: x / x.shape[1],
    "by root": lambda x: x * torch.tensor(float(x.shape[1]), dtype=x.dtype),
    "norms": lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).add(1),
}  # fmt: skip


class Code(nn.Module):
    """A module whose code is some steps."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def forward(self, value):
        for name in self.names:
            value = STEPS[name](value)
        return value


def followed(code):
    """What is said of a call with a value that is divided along its second dimension."""
    graph = fx.Graph()
    value = graph.placeholder("value")
    value.meta["val"] = torch.empty(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    node = graph.call_module("code", (value,))
    return through(code, node, {value: ShardedDim(1, LENGTH, 1, shares(LENGTH, SIZE))})


@given(st.lists(st.sampled_from([*STEPS]), min_size=1, max_size=5))
def test_what_goes_by_positions_gives_each_member_its_own(names):
    code = Code(names)
    whole = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    try:
        expected = code(whole)
    except (RuntimeError, IndexError, ValueError):
        return  # such steps do not follow one another
    said = followed(code)
    if said.trouble or said.divided is None:
        return
    place = PositionDim(*said.divided[:3])
    for index in range(SIZE):
        part = taken(whole, PositionDim(1, LENGTH), SIZE, index)
        torch.testing.assert_close(code(part), taken(expected, place, SIZE, index))


def test_each_step_alone_is_told_rightly():
    """Of the steps above, those that mix positions of [rows, positions, width] are refused."""
    mixing = {
        "softmax 1", "cumsum 1", "flip 1", "roll 1", "mean 1", "amax 1", "slice 1", "halves 1",
        "select 1", "cat 1", "norm of two", "scores", "apart", "by length",
        "by root",
    }  # fmt: skip
    assert {name for name in STEPS if followed(Code([name])).trouble} == mixing


def recorded_graph(function):
    def call(value):
        return [function(value)]

    with FakeTensorMode(allow_non_fake_inputs=True):
        sample = torch.empty(ROWS, LENGTH, WIDTH, dtype=torch.float64)
        return make_fx(call, _allow_non_fake_inputs=True)(sample)


def test_tensor_ranks_give_what_the_whole_gives_whatever_the_step():
    """By the same rules; where none helps, values are made whole."""
    whole = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, WIDTH, dtype=torch.float64, requires_grad=True)
    functions = {
        **STEPS,
        "linear": lambda x: F.linear(x, weight),
        "mean": lambda x: x.mean(-1).mean(0),
        "unbound": lambda x: x.unbind(-1)[1] * x.unbind(0)[0].t().sum(),
        "squeezed": lambda x: x.unsqueeze(1).squeeze(),
    }
    for name, function in functions.items():
        recorded = recorded_graph(function)
        expected = function(whole)
        gradient = torch.autograd.grad(expected.sin().sum(), whole)[0]

        def member(group, recorded=recorded):
            by_positions = RecordedLayouts((SEQUENCE,), WHOLE, True)
            graph = for_member(recorded.graph, recorded.get_submodule, {}, group, by_positions)
            root = nn.Module()
            vars(root).update(vars(recorded), sharers=group)
            part = whole.detach().chunk(2, SEQUENCE)[group.index].contiguous().requires_grad_()
            (made,) = fx.Interpreter(root, graph=graph).run(part)
            return made.detach(), torch.autograd.grad(made.sin().sum(), part)[0]

        members = together(2, member)
        for made, _ in members:
            torch.testing.assert_close(made, expected.detach(), msg=name)
        joined = torch.cat([back for _, back in members], SEQUENCE)
        torch.testing.assert_close(joined, gradient, msg=name)
