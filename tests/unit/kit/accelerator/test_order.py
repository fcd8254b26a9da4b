"""What is not ordered raises, every time; what is ordered does not."""

from __future__ import annotations

import threading

import pytest
import torch

pytestmark = pytest.mark.usefixtures("accelerator")

DEVICE = "emu:1"


@pytest.fixture
def ready(main):
    """Six numbers that all streams may use."""
    numbers = torch.arange(6.0, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)
    return numbers


@pytest.mark.parametrize("again", range(3))
def test_reading_what_another_stream_wrote_needs_a_wait(side, ready, again):
    with side:
        doubled = ready * 2
    with pytest.raises(RuntimeError, match="race on emu:1") as caught:
        doubled + 1
    message = str(caught.value)
    assert "aten::add.Tensor on the default stream of emu:1 reads" in message
    assert f"used by aten::mul.Tensor on stream {side.stream_id} of emu:1" in message


def test_a_wait_for_the_stream_orders(side, main, ready):
    with side:
        doubled = ready * 2
    main.wait_stream(side)
    assert (doubled + 1).tolist() == [1, 3, 5, 7, 9, 11]


def test_an_event_orders_what_was_before_it_and_nothing_after(side, main, ready):
    with side:
        first = ready * 2
        event = side.record_event()
        second = ready * 3
    main.wait_event(event)
    first + 1
    with pytest.raises(RuntimeError, match="reads what was used by aten::mul"):
        second + 1


def test_events_order_through_a_third_stream(side, main, ready):
    third = torch.Stream(DEVICE)
    with side:
        doubled = ready * 2
    third.wait_stream(side)
    main.wait_event(third.record_event())
    doubled + 1


def test_an_event_that_was_not_recorded_orders_nothing(side, main, ready):
    with side:
        doubled = ready * 2
    main.wait_event(torch.Event(DEVICE))
    with pytest.raises(RuntimeError, match="race"):
        doubled + 1


def test_overwriting_what_another_stream_reads_needs_a_wait(side, main, ready):
    with side:
        ready * 2
    with pytest.raises(RuntimeError, match=r"aten::zero_ on .* writes what was used by aten::mul"):
        ready.zero_()
    main.wait_stream(side)
    ready.zero_()


def test_two_streams_may_read_at_once(side, ready):
    with side:
        ready * 2
    ready * 3


def test_two_streams_may_write_to_different_parts(side, main, ready):
    with side:
        ready[:3].fill_(1)
    ready[3:].fill_(2)
    with pytest.raises(RuntimeError, match="race"):
        ready[2:4].fill_(3)
    main.wait_stream(side)
    assert ready.tolist() == [1, 1, 1, 2, 2, 2]


def test_what_foreach_and_fused_optimizers_write_is_seen(side, ready):
    weights, gradients, averages, squares = (ready.clone() for _ in range(4))
    step = torch.ones((), device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream(DEVICE))
    with side:
        torch._fused_adam_(
            [weights], [gradients], [averages], [squares], [], [step],
            lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        torch._foreach_mul_([gradients], 2.0)
    for written in (weights, averages, squares, gradients):
        with pytest.raises(RuntimeError, match="race"):
            written + 1


def statistics_of_batch_norm(side, ready, training):
    """Mean and variance, which a batch norm on another stream has used."""
    mean, variance = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream(DEVICE))
    with side:
        torch.nn.functional.batch_norm(ready.view(2, 3), mean, variance, training=training)
    return mean, variance


def test_running_statistics_of_a_batch_norm_are_written(side, ready):
    mean, variance = statistics_of_batch_norm(side, ready, training=True)
    for written in (mean, variance):
        with pytest.raises(RuntimeError, match="race"):
            written + 1


def test_in_evaluation_running_statistics_are_read(side, ready):
    mean, variance = statistics_of_batch_norm(side, ready, training=False)
    torch.nn.functional.batch_norm(ready.view(2, 3), mean, variance)
    with pytest.raises(RuntimeError, match="writes what was used by aten::native_batch_norm"):
        mean.zero_()


@pytest.mark.parametrize(
    "wait",
    [
        lambda side, doubled: side.synchronize(),
        lambda side, doubled: side.record_event().synchronize(),
        lambda side, doubled: torch.accelerator.synchronize(DEVICE),
        lambda side, doubled: doubled.cpu(),
        lambda side, doubled: doubled.sum().item(),
    ],
    ids=["stream", "event", "device", "copy", "value"],
)
def test_when_the_host_has_waited_every_stream_is_behind(wait, side, main, ready):
    with side:
        doubled = ready * 2
        wait(side, doubled)
    doubled + 1


def test_whoever_asks_an_event_hears_no_first(side, ready):
    with side:
        doubled = ready * 2
        event = side.record_event()
    assert [event.query(), event.query(), event.query()] == [False, True, True]
    doubled + 1  # the host knows that it is done
    with side:
        ready * 3
    assert [side.query(), side.query()] == [False, True]


def test_a_new_tensor_is_ordered_behind_the_stream_that_gave_the_memory(side, ready):
    ready * 2  # work that the memory's last owner may have been part of
    empty = torch.empty(6, device=DEVICE)
    with side, pytest.raises(RuntimeError, match="used by the allocation on the default stream"):
        empty.fill_(1)


def test_a_copy_between_devices_waits_for_both_streams_and_makes_both_wait(ready):
    there = ready.to("emu:2")
    assert (there + 1).device == torch.device("emu:2")
    there.fill_(5)
    ready.copy_(there)
    assert ready.tolist() == [5] * 6


def test_a_copy_between_devices_waits_for_what_the_destination_was_used_for(ready):
    there = torch.zeros(6, device="emu:2")
    there.copy_(ready)
    assert there.tolist() == ready.tolist()


def test_a_copy_between_devices_runs_on_the_source_s_stream(side, ready):
    with side:
        doubled = ready * 2
    with pytest.raises(RuntimeError, match="copy on the default stream of emu:1 reads"):
        doubled.to("emu:2")
    with side:
        there = doubled.to("emu:2") + ready.to("emu:2")
    assert there.tolist() == [0, 3, 6, 9, 12, 15]


def test_the_source_of_a_copy_between_devices_is_read(side, ready):
    with side:
        ready.to("emu:2")
    with pytest.raises(
        RuntimeError, match=r"aten::zero_ .* writes what was used by copy on stream"
    ):
        ready.zero_()


def test_backward_runs_on_the_streams_of_forward(side, main, ready):
    weight = ready.clone().requires_grad_()
    side.wait_stream(main)
    with side:
        hidden = weight * 2
    main.wait_stream(side)
    (hidden * 3).sum().backward()
    assert weight.grad.tolist() == [6.0] * 6


def test_backward_across_devices(ready):
    weights = [
        torch.full((6,), 2.0, device=f"emu:{index}", requires_grad=True) for index in range(4)
    ]
    value = ready
    for index, weight in enumerate(weights):
        value = value.to(f"emu:{index}") * weight
    value.sum().backward()
    assert weights[0].grad.tolist() == [8.0 * number for number in range(6)]
    assert [weight.grad.device.index for weight in weights] == [0, 1, 2, 3]


def test_devices_and_streams_are_each_thread_s_own(ready):
    there, seen = torch.Stream("emu:3"), []

    def other_thread():
        torch.accelerator.set_stream(there)
        seen.append((torch.accelerator.current_device_index(), torch.accelerator.current_stream()))

    before = torch.accelerator.current_device_index(), torch.accelerator.current_stream()
    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert seen == [(3, there)]
    assert (torch.accelerator.current_device_index(), torch.accelerator.current_stream()) == before


def test_a_race_between_threads_is_seen(ready):
    results, stream = [], torch.Stream(DEVICE)

    def other_thread():
        with stream:
            results.append(ready * 2)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="race"):
        results[0] + 1


def test_ranks_in_threads_train_on_devices_of_their_own(accelerator):
    def train(device, gradients):
        torch.accelerator.set_device_index(device.index)
        with torch.Stream(device):
            weight = torch.ones(4, device=device, requires_grad=True)
            for _ in range(20):
                (weight * weight).sum().backward()
            gradients[device.index] = weight.grad.tolist()

    gradients = {}
    threads = [
        threading.Thread(target=train, args=(torch.device("emu", index), gradients))
        for index in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gradients == {index: [40.0] * 4 for index in range(4)}


def test_a_gradient_that_autograd_shares_between_streams_is_a_race_of_torch_s_own(main, ready):
    """Its sum's gradient goes to both streams; one adds to it in place while the other reads it."""
    weight = ready.clone().requires_grad_()
    first, second = torch.Stream(DEVICE), torch.Stream(DEVICE)
    for stream in (first, second):
        stream.wait_stream(main)
    with first:
        once = weight.exp()
        again = once * 3
    with second:
        other = weight.exp()
    for stream in (first, second):
        main.wait_stream(stream)
    loss = ((once + other) * 2).sum() + again.sum()
    with pytest.raises(RuntimeError, match=r"aten::add_.* writes what was used by aten::mul"):
        loss.backward()
