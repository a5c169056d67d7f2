"""CudaDevice's capture against a stand-in of torch.cuda with torch's rules of memory pools and current streams."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sagc_fast.rollout.device import CudaDevice


class Pools:
    """``torch.cuda`` as far as a capture goes: a pool is refused once all its graphs are gone (CUDACachingAllocator),
    and a capture that breaks off leaves its stream current."""

    def __init__(self) -> None:
        self.current = self.Stream()
        self.users: dict[int, int] = {}
        owner = self

        class CUDAGraph:
            number: int | None = None

            def pool(self) -> int:
                return self.number

            def __del__(self) -> None:
                if self.number is not None:
                    owner.users[self.number] -= 1

        class Capture:
            def __init__(self, graph, pool, stream, capture_error_mode) -> None:
                assert capture_error_mode == "thread_local"
                self.graph, self.pool, self.stream = graph, pool, stream

            def __enter__(self) -> None:
                self.before, owner.current = owner.current, self.stream
                number = len(owner.users) if self.pool is None else self.pool
                if self.pool is not None and not owner.users[number]:
                    raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
                owner.users[number] = owner.users.get(number, 0) + 1
                self.graph.number = number

            def __exit__(self, kind, *_: object) -> None:
                if kind is None:
                    owner.current = self.before

        self.CUDAGraph, self.graph = CUDAGraph, Capture

    class Stream:
        def __init__(self, *_: object) -> None:
            pass

        def wait_stream(self, other: object) -> None:
            pass

    def current_stream(self, *_: object) -> object:
        return self.current

    def set_stream(self, stream: object) -> None:
        self.current = stream

    def stream(self, stream: object) -> object:
        owner, before = self, self.current

        class Within:
            def __enter__(self) -> None:
                owner.current = stream

            def __exit__(self, *_: object) -> None:
                owner.current = before

        return Within()


@pytest.fixture
def pools(monkeypatch) -> Pools:
    pools = Pools()
    names = ("CUDAGraph", "graph", "Stream", "current_stream", "set_stream", "stream")
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**{name: getattr(pools, name) for name in names}))
    return pools


def test_graphs_share_a_pool_while_one_is_held_and_a_new_one_comes_after_the_last_is_dropped(pools: Pools) -> None:
    device = CudaDevice(torch.device("cuda"))
    first = device.capture(lambda: None, [], [])
    second = device.capture(lambda: None, [], [], beside=first)
    assert first.pool() == second.pool()
    del first, second
    assert device.capture(lambda: None, [], []).pool() == 1
    assert device.counts.captures == 3


def test_a_capture_that_breaks_off_leaves_the_current_stream_as_it_was(pools: Pools) -> None:
    device, before = CudaDevice(torch.device("cuda")), pools.current
    steps = iter((lambda: None, lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        device.capture(lambda: next(steps)(), [], [])
    assert pools.current is before
