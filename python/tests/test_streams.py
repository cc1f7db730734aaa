"""The order of work on CUDA streams, on streams that only write down what they are told."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import HAVE_TORCH
from deep_ep import EventHandle, EventOverlap, _streams

pytestmark = pytest.mark.skipif(not HAVE_TORCH, reason="torch is not installed")


class Stream:
    """A stream, and what happened on all of them."""

    current: Stream
    log: list[str]

    def __init__(self, name: Any, handle: int = 7) -> None:
        self.name = name if isinstance(name, str) else "comm"
        self.cuda_stream = handle

    def wait_stream(self, other: Stream) -> None:
        Stream.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        Stream.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        Stream.log.append(f"event on {self.name}")
        return f"event of {self.name}"


class Tensor:
    """A tensor that is kept for streams."""

    is_cuda = True

    def record_stream(self, stream: Stream) -> None:
        Stream.log.append(f"kept for {stream.name}")


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> _streams.CudaTimeline:
    import torch

    Stream.current, Stream.log = Stream("compute", 3), []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(Stream, "current", stream))
    return _streams.CudaTimeline(0)


def call(timeline: _streams.CudaTimeline, previous: Any, async_: bool, on_comm: bool) -> EventOverlap:
    """A call with one tensor."""
    begun = timeline.begin(previous, async_, on_comm)
    assert begun.stream == 7
    Stream.log.append(f"allocates on {Stream.current.name}")
    event = begun.end((Tensor(), None))
    begun.leave()
    assert Stream.current.name == "compute"
    return event


def test_a_plain_call_is_between_the_work_of_the_current_stream(timeline: _streams.CudaTimeline) -> None:
    event = call(timeline, None, False, False)
    assert event.event is None
    assert Stream.log == ["comm waits for compute", "allocates on compute", "compute waits for comm"]


def test_an_async_call_leaves_the_current_stream_alone_and_keeps_tensors(
    timeline: _streams.CudaTimeline,
) -> None:
    event = call(timeline, None, True, False)
    expected = ["comm waits for compute", "allocates on compute", "event on comm", "kept for comm"]
    assert Stream.log == expected
    with event:
        pass
    assert Stream.log[4:] == ["compute waits for event of comm"]


def test_a_previous_event_is_all_that_is_waited_for(timeline: _streams.CudaTimeline) -> None:
    previous = EventHandle()
    call(timeline, previous, True, True)
    assert Stream.log == [
        "event on compute",
        "comm waits for event of compute",
        "allocates on comm",
        "event on comm",
        "kept for comm",
        "kept for compute",
    ]


def test_halves_with_a_hook_are_on_the_stream_of_the_send(timeline: _streams.CudaTimeline) -> None:
    begun = timeline.begin_here()
    assert begun.stream == 3
    begun.end(())
    begun.leave()
    assert Stream.log == []


def test_the_current_stream_is_put_back_when_a_call_fails(timeline: _streams.CudaTimeline) -> None:
    begun = timeline.begin(EventHandle(), True, True)
    assert Stream.current.name == "comm"
    begun.leave()
    assert Stream.current.name == "compute"
