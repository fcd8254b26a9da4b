"""One rank's worker, with a transport that only notes what passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

from penstock.base.errors import DeadlineError, ModelError, StageError
from penstock.core.schedule import Schedule
from penstock.core.schedule.op import Kind
from penstock.core.schedule.rounds import Segment
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.run.minibatch import Minibatch, StreamPosition
from penstock.engine.run.rank.compiler import KINDS, RankExtras
from penstock.engine.run.rank.updater import StageParameters, Updater
from penstock.engine.run.rank.worker import Worker
from penstock.engine.run.recipe import Recipe
from penstock.engine.run.replicas import SharedState, SharedTensor
from penstock.engine.stage.stage import Stage
from penstock.engine.transport import Edge, Transport
from penstock.engine.transport.base import FIRST_EXCHANGE
from tests.kit.helpers import make_mlp


class Notebook(Transport):
    """Keeps what is sent; gives what a test has put there."""

    def __init__(self, incoming=()):
        self.sent = []
        self.numbers = []
        self.discarded = []
        self.incoming = dict(incoming)
        self.waiting = []

    def send(self, edge, number, value):
        self.numbers.append(number)
        self.sent.append((edge, number % 2**19, value))  # of all runs, there is only one

    def recv(self, edge, number, waiting):
        self.waiting.append(waiting)
        if (edge, number % 2**19) not in self.incoming:
            raise DeadlineError(waiting)
        return self.incoming.pop((edge, number % 2**19))

    def fail(self, reason, edges):
        raise AssertionError("telling the peers is the driver's part")

    def flush(self):
        """Nothing is under way."""

    def discard(self, before):
        self.discarded.append(before)

    def close(self, reason):
        raise AssertionError("closing is the driver's part")


def worker_of(rank, stages, num_stages, transport, model=None, shared=None, **options):
    """A worker with some of the stages of a model of ``num_stages`` layers."""
    layers = spine_of(model or nn.Sequential(*[nn.Linear(3, 3) for _ in range(num_stages)]))
    built = {index: Stage(index, [layers[index]], index, LayerStreams(0)) for index in stages}
    recipe = Recipe(**{"loss": F.mse_loss, "optimizer": None, **options})
    holdings = {
        index: StageParameters(
            {str(at): one for at, one in enumerate(stage.parameters())},
            {100 * index + at: one for at, one in enumerate(stage.parameters())},
        )
        for index, stage in built.items()
    }
    updater = Updater(rank, 1, holdings, transport, recipe)  # which agrees with nobody else
    return Worker(rank, built, transport, recipe, updater, RankExtras(shared=shared))


def segment(text):
    return Segment.whole(Schedule.parse(text))


TWO_RANKS = segment("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
FORWARD, BACKWARD = Edge(0, 1, 0), Edge(1, 0, 3)


def minibatch(rows=2):
    return Minibatch(4, [torch.ones(rows, 3)], [torch.zeros(rows, 3)], [1.0])


class OverwritesItsGradient(torch.autograd.Function):
    """Doubles what comes back, in the memory in which it comes."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)


def test_every_microbatch_gets_its_own_seed_even_if_a_backward_overwrites_it():
    gradients = []
    for loss in F.mse_loss, lambda *given: OverwritesItsGradient.apply(F.mse_loss(*given)):
        torch.manual_seed(1)
        worker = worker_of(0, [0], 1, Notebook(), loss=loss)
        microbatches = [torch.full((2, 3), float(k)) for k in range(3)]
        worker.run(
            segment("0F0,0B0,0F1,0B1,0F2,0B2\n"),
            Minibatch(4, microbatches, [torch.zeros(2, 3)] * 3, [0.25, 0.25, 0.5]),
        )
        gradients.append([parameter.grad for parameter in worker.stages[0].parameters()])
    for plain, doubled in zip(*gradients, strict=True):
        assert torch.equal(doubled, 2 * plain)


def test_the_last_rank_receives_computes_and_sends_back():
    transport = Notebook({(FORWARD, 0): torch.ones(2, 3, requires_grad=True)})
    worker = worker_of(1, [1], 2, transport)
    result = worker.run(TWO_RANKS, minibatch())
    assert len(result.starts) == len(result.ends) == 4
    assert list(result.losses) == [0]
    assert result.outputs == {}
    ((edge, microbatch, (gradient,)),) = transport.sent
    assert (edge, microbatch, gradient.shape) == (BACKWARD, 0, (2, 3))
    assert transport.waiting == ["rank 1, waiting at 1RECV_F0 for 0SEND_F0 of rank 0"]


def test_a_rank_sends_back_that_there_is_no_gradient():
    transport = Notebook({(FORWARD, 0): torch.ones(2, 3)})
    worker_of(1, [1], 2, transport).run(TWO_RANKS, minibatch())
    assert transport.sent == [(BACKWARD, 0, [None])]


def test_the_first_rank_sends_and_waits_for_the_gradient():
    transport = Notebook({(BACKWARD, 0): [torch.ones(2, 3)]})
    worker = worker_of(0, [0], 2, transport)
    result = worker.run(TWO_RANKS, minibatch())
    assert result.losses == {}
    assert [(edge, microbatch) for edge, microbatch, _ in transport.sent] == [(FORWARD, 0)]
    assert transport.waiting == ["rank 0, waiting at 0RECV_B0 for 1SEND_B0 of rank 1"]


def test_neighbouring_stages_on_one_rank_need_no_message():
    transport = Notebook()
    worker = worker_of(0, [0, 1], 2, transport)
    result = worker.run(segment("0F0,1F0,1B0,0B0\n"), minibatch())
    assert list(result.losses) == [0]
    assert transport.sent == transport.waiting == []
    assert all(parameter.grad is not None for parameter in worker.stages[0].parameters())


def test_forward_and_backward_messages_have_channels_of_their_own():
    worker = worker_of(0, [0], 2, Notebook())
    assert worker.outgoing(TWO_RANKS) == {FORWARD}
    assert worker_of(1, [1], 2, Notebook()).outgoing(TWO_RANKS) == {BACKWARD}
    assert FORWARD.tag != BACKWARD.tag


def test_without_targets_there_are_outputs_and_no_gradients():
    worker = worker_of(0, [0, 1], 2, Notebook())
    result = worker.run(segment("0F0,1F0\n"), Minibatch(0, [torch.ones(2, 3)], trains=False))
    assert not result.outputs[0].requires_grad
    assert result.losses == {}


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_gradients_do_not_depend_on_the_callers_mode(around):
    # In a process of its own a worker runs in the caller's thread.
    worker, data = worker_of(0, [0], 1, Notebook()), minibatch()
    with around():
        worker.run(segment("0F0,0B0\n"), data)
    assert next(worker.stages[0].parameters()).grad is not None


def test_every_kind_of_op_has_a_step():
    assert set(Kind) == KINDS


def test_steps_are_bound_once_per_segment():
    worker, once = worker_of(0, [0], 1, Notebook()), segment("0F0,0B0\n")
    bound = worker._compiler.steps(once, True)
    worker.run(once, minibatch())
    assert worker._compiler.steps(once, True) is bound
    assert [step.op for step in bound] == [*once.ranks[0]]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def test_an_update_is_counted_and_clears_the_gradients():
    worker = worker_of(0, [0], 1, Notebook(), optimizer=sgd)
    (weight, _) = worker.stages[0].parameters()
    before = weight.detach().clone()
    worker.run(segment("0F0,0B0,0UPDATE0\n"), minibatch())
    assert worker.updater.num_updates == 1
    assert weight.grad is None
    assert not torch.equal(weight, before)


def test_a_failed_step_leaves_neither_gradients_nor_messages():
    transport = Notebook({(FORWARD, 0): torch.ones(2, 3)})
    worker = worker_of(1, [1], 2, transport, optimizer=sgd)
    schedule = segment("0F0,0SEND_F0,0F1,0SEND_F1,0B0,0B1\n1RECV_F0,1F0,1B0,1RECV_F1,1F1,1B1\n")
    data = Minibatch(0, [torch.ones(2, 3)] * 2, [torch.zeros(2, 3)] * 2, [0.5, 0.5])
    with pytest.raises(DeadlineError, match="rank 1, waiting at 1RECV_F1"):
        worker.run(schedule, data)
    assert worker.updater.num_updates == 0
    assert all(parameter.grad is None for parameter in worker.stages[1].parameters())
    assert not worker._stream.pending.values  # which held what had come and not been used
    assert not worker.stages[1].in_flight


def test_microbatches_without_any_term_do_not_flow_back():
    worker = worker_of(0, [0], 1, Notebook())
    nothing = torch.zeros(0, 3)  # the mean over no rows is NaN, and so is its gradient
    data = Minibatch(0, [nothing, torch.ones(2, 3)], [nothing, torch.zeros(2, 3)], [0.0, 1.0])
    result = worker.run(segment("0F0,0F1,0B0,0B1\n"), data)
    assert result.losses[0].isnan()
    assert all(parameter.grad.isfinite().all() for parameter in worker.stages[0].parameters())


def test_autocast_holds_for_the_forward_and_not_for_backward_or_update():
    seen = {}

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            seen["forward"] = torch.is_autocast_enabled("cpu")
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen["backward"] = torch.is_autocast_enabled("cpu")
            return gradient

    class Optimizer(torch.optim.SGD):
        def step(self):
            seen["update"] = torch.is_autocast_enabled("cpu")

    class Layer(nn.Linear):
        def forward(self, value):
            seen["dtype"] = super().forward(value).dtype
            return Spy.apply(super().forward(value))

    model = nn.Sequential(Layer(3, 3))
    worker = worker_of(0, [0], 1, Notebook(), model, optimizer=lambda p: Optimizer(p, lr=1.0))
    data = replace(minibatch(), autocast={"cpu": torch.bfloat16})
    with torch.autocast("cpu", torch.float16):  # of the thread, which does not count
        worker.run(segment("0F0,0B0,0UPDATE0\n"), data)
        assert torch.get_autocast_dtype("cpu") is torch.float16
    assert seen == {
        "forward": True,
        "dtype": torch.bfloat16,
        "backward": False,
        "update": False,
    }


def test_the_worker_of_a_stage_without_parameters_needs_no_optimizer():
    worker = worker_of(0, [0, 1], 2, Notebook(), make_mlp()[:2])
    data = Minibatch(0, [torch.ones(2, 16)], [torch.zeros(2, 32)], [1.0])
    worker.run(segment("0F0,1F0,1B0,1UPDATE0,0B0,0UPDATE0\n"), data)
    assert worker.updater.num_updates == 0


class Remembers(nn.Linear):
    """Counts its forwards and keeps their mean, in buffers of which it hands something on.

    Args:
        traceless: write where neither a version nor another tensor tells of it.
    """

    def __init__(self, traceless=False):
        super().__init__(3, 3)
        self.traceless = traceless
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, value):
        mean = 0.5 * self.mean + 0.5 * value.detach().mean(0)
        if self.traceless:
            self.mean.data.copy_(mean)
            return super().forward(value)
        self.count += 1
        self.mean = mean
        return super().forward(value) * self.count + self.mean


ON_TRUST = segment(
    "0F0,0SEND_F0,0AGREE0,0RECV_B0,0B0,0UPDATE0\n1RECV_F0,1F0,1AGREE0,1B0,1SEND_B0,1UPDATE0\n"
)
"""Each minibatch begins before the verdict on the steps of the one before."""
AGREED = segment(
    "0F0,0SEND_F0,0RECV_B0,0B0,0AGREE0,0UPDATE0\n1RECV_F0,1F0,1B0,1SEND_B0,1AGREE0,1UPDATE0\n"
)


def after_two_minibatches(clip_norm, *, post_validate):
    """The state of a stage that has made two steps, and what went out meanwhile."""
    torch.manual_seed(0)
    transport = Notebook()
    worker = worker_of(
        0, [0], 2, transport, nn.Sequential(Remembers(), nn.Identity()),
        optimizer=sgd, clip_norm=clip_norm, post_validate=post_validate,
    )  # fmt: skip
    for more_follow in (True, False):
        transport.incoming[BACKWARD, 0] = [torch.ones(2, 3)]
        position = StreamPosition(more_follow=more_follow)
        worker.run(ON_TRUST if post_validate else AGREED, minibatch(), position)
    assert not worker.on_trust
    return worker.stages[0].state_dict(), transport


@pytest.mark.parametrize(("clip_norm", "stands"), [(1e6, True), (1e-3, False)])
def test_an_attempt_with_weights_that_do_not_stand_leaves_nothing(clip_norm, stands):
    expected, agreed = after_two_minibatches(clip_norm, post_validate=False)
    state, transport = after_two_minibatches(clip_norm, post_validate=True)
    assert state["0.count"] == 2
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    outputs = [value for _, _, value in transport.sent]
    assert torch.equal(outputs[-1], agreed.sent[-1][-1])
    assert len(outputs) == (2 if stands else 3)
    if stands:
        assert not transport.discarded
        return
    first, void, last = transport.numbers
    # What is discarded is the void attempt; the next one, and all that is no attempt's, stays.
    (before,) = transport.discarded
    assert first < void < before <= last < FIRST_EXCHANGE


@pytest.mark.parametrize(
    ("ops", "options"),
    [
        ("0F0", {}),  # nothing but the minibatch's end is behind the last forward
        ("0F0,0B0", {}),
        ("0F0,0B0,0UPDATE0", {"optimizer": sgd}),
    ],
)
@pytest.mark.parametrize("traceless", [False, True])
def test_a_forward_that_writes_what_others_hold_is_told_whatever_follows(ops, options, traceless):
    module = Remembers(traceless)
    before = module.weight.detach().clone()
    tensors = [SharedTensor("buffer 'mean'", "ranks 0 and 1", module, "mean")]
    worker = worker_of(
        0, [0], 1, Notebook(), nn.Sequential(module), SharedState({0: tensors}), **options
    )
    with pytest.raises((ModelError, StageError), match="has written buffer 'mean', which ranks 0"):
        worker.run(segment(ops), minibatch())
    assert torch.equal(module.weight, before)


def test_the_most_that_a_minibatch_held_is_its_own():
    worker = worker_of(0, [0], 1, Notebook(), count_memory=True)
    ops = segment("0F0,0F1,0B0,0B1\n")

    def peak(rows):
        microbatch = torch.ones(rows, 3)
        data = Minibatch(0, [microbatch] * 2, [torch.zeros(rows, 3)] * 2, [0.5, 0.5])
        return worker.run(ops, data).peak

    small, large, again = (peak(rows) for rows in (2, 50, 2))
    assert small.activation_bytes == again.activation_bytes < large.activation_bytes
    assert [one.microbatches for one in (small, large, again)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        (torch.ones(2), r"the metric 'm' gave a tensor of shape \(2,\); it must return one number"),
        ("much", "the metric 'm' gave 'much'; it must return one number, as a float or a tensor"),
        (torch.ones(1, 1), None),
        (3, None),
    ],
)
def test_a_metric_is_one_number(measured, told):
    worker = worker_of(0, [0], 1, Notebook(), metrics={"m": lambda outputs, targets: measured})
    if told is None:
        (values,) = worker.run(segment("0F0,0B0\n"), minibatch()).metrics.values()
        assert float(values[0]) == float(measured)
        return
    with pytest.raises(StageError, match=told):
        worker.run(segment("0F0,0B0\n"), minibatch())
