"""The stand-in for a GPU replays as a CUDA graph would, runs no earlier than it must, and refuses what a GPU would."""

from __future__ import annotations

import pytest
import torch

from sagc_fast.rollout.stand_in_device import GraphRuleError, StandInDevice


@pytest.fixture
def device():
    return StandInDevice("late")


def finish(device):
    device.wait(device.record())


# ---- graphs ----------------------------------------------------------------------------------------------------------


def test_a_replay_computes_with_what_stands_in_the_buffers_now(device):
    weight, x, y = torch.tensor([2.0, 3.0]), torch.ones(2), torch.zeros(2)
    graph = device.capture(lambda: y.copy_((x * weight).relu() + 1), [weight, x], [y])
    x.copy_(torch.tensor([5.0, -5.0]))
    weight.mul_(10)  # as an optimizer step does
    device.replay(graph)
    finish(device)
    assert y.tolist() == [101.0, 1.0]
    assert (device.counts.captures, device.counts.replays, device.counts.waits) == (1, 1, 1)


def test_a_replay_does_not_run_python_again(device):
    """A number that the host computed in the capture stays what it was: on a GPU nobody would see it change."""
    step, y = iter(range(10, 20)), torch.zeros(1)

    def add_host_number():
        y.add_(next(step))

    graph = device.capture(add_host_number, [], [y])
    y.zero_()
    for _ in range(3):
        device.replay(graph)
    finish(device)
    assert y.item() == 33.0  # 10 in the run before the capture, 11 in the capture


def test_a_capture_leaves_memory_as_it_was(device):
    y, rows = torch.zeros(3), torch.arange(3)

    def step():
        y.index_add_(0, rows, torch.ones_like(y))

    device.capture(step, [rows], [y])
    assert y.tolist() == [1.0, 1.0, 1.0]  # of the run before, which is the caller's to make harmless


def test_work_outside_torch_is_taped_where_it_is_announced(device):
    x, y = torch.ones(2), torch.zeros(2)

    def kernel(source, target, factor):
        target.numpy()[:] = source.numpy() * factor

    graph = device.capture(lambda: device.launch(kernel, x * 2, y, factor=3.0), [x], [y])
    x.fill_(5.0)
    device.replay(graph)
    finish(device)
    assert y.tolist() == [30.0, 30.0]


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: bool(x.any()),
        lambda x: int(x[0]),
        lambda x: range(x.long()[0]),
        lambda x: 1.0 in x,
        lambda x: torch.nn.functional.one_hot(x.long()),  # reads the largest value, deep inside torch
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: torch.equal(x, x + 1),
        lambda x: torch.unique(x),
        lambda x: x.repeat_interleave(torch.ones_like(x).long()),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
        lambda x: x + torch.from_numpy(__import__("numpy").ones(3)),
    ],
    ids=lambda f: None,
)
def test_a_captured_step_must_not_wait_for_values_or_bring_any(device, forbidden):
    x = torch.ones(3)
    with pytest.raises(GraphRuleError, match="captured step"):
        device.capture(lambda: forbidden(x), [x], [])


def test_a_captured_step_must_not_find_memory_that_nobody_declared(device):
    x, stray = torch.ones(3), torch.ones(3)
    with pytest.raises(GraphRuleError, match=r"shape \[3\] that is neither declared nor made"):
        device.capture(lambda: x.add_(stray), [], [x])


def test_a_graph_whose_memory_has_moved_is_not_replayed(device):
    weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    y = torch.zeros(2)
    graph = device.capture(lambda: y.copy_(weight), [weight], [y])
    weight.data = weight.data.clone()
    with pytest.raises(GraphRuleError, match="memory has moved"):
        device.replay(graph)


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_late_work_sees_a_host_buffer_that_was_written_over_too_early(device):
    target, source = torch.zeros(1), device.host_buffer((1,), torch.float32)
    source.fill_(1.0)
    device.upload(target, source)
    source.fill_(2.0)
    finish(device)
    assert target.item() == 2.0


def test_nothing_runs_before_somebody_waits_for_it(device):
    target, host = torch.zeros(1), device.host_buffer((1,), torch.float32)
    source = device.host_buffer((1,), torch.float32)
    source.fill_(1.0)
    device.upload(target, source)
    done = device.record()
    copied = device.download([(host, target)], after=done)
    device.upload(target, torch.full((1,), 9.0))
    assert host.item() == target.item() == 0.0
    with pytest.raises(GraphRuleError, match="has not come to"):
        device.seconds_between(done, done)
    device.wait(copied)
    assert (host.item(), target.item()) == (1.0, 1.0)  # what lies behind the event has not run
    assert device.seconds_between(done, done) == 0.0


def test_a_copy_back_that_waits_for_too_little_brings_old_values(device):
    target, host = torch.zeros(1), device.host_buffer((1,), torch.float32)
    too_early = device.record()
    device.upload(target, torch.ones(1))
    device.wait(device.download([(host, target)], after=too_early))
    assert host.item() == 0.0


def test_eager_work_comes_behind_what_is_queued(device):
    target = torch.zeros(1)
    device.upload(target, torch.ones(1))
    with device.eager():
        target.mul_(5)
    assert target.item() == 5.0


def test_an_early_device_runs_everything_at_once():
    device, target = StandInDevice("early"), torch.zeros(1)
    device.upload(target, torch.ones(1))
    assert target.item() == 1.0
