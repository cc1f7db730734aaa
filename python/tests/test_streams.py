"""The order of work on CUDA streams, on streams that only write down what they are told."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from conftest import HAVE_TORCH
from deep_ep import EventHandle, EventOverlap, _streams

pytestmark = pytest.mark.skipif(not HAVE_TORCH, reason="torch is not installed")


class Stream:
    """A stream, and what happened on all of them."""

    current: Stream
    log: list[str]

    def __init__(self, name: Any, handle: int = 7, priority: int = 0) -> None:
        self.name = name if isinstance(name, str) else "comm"
        self.cuda_stream = handle

    def wait_event(self, event: Event) -> None:
        Stream.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        Stream.log.append(f"event on {self.name}")
        event = Event()
        event.name = f"event of {self.name}"
        return event


class Event:
    """A point in a stream, by the stream's name."""

    name = ""
    #: Whether the points of all streams have come.
    past = False

    def record(self, stream: Stream) -> None:
        self.name = stream.name

    def wait(self, stream: Stream) -> None:
        Stream.log.append(f"{stream.name} waits for {self.name}")

    def query(self) -> bool:
        return Event.past


class Native:
    """A native buffer that is asked for dropped memory."""

    def __init__(self) -> None:
        self.lot: list[Any] = []

    def dropped(self) -> Any:
        return self.lot.pop() if self.lot else None


class Block:
    """Dropped memory."""


class Tensor:
    """A tensor that is kept for streams."""

    is_cuda = True

    def record_stream(self, stream: Stream) -> None:
        Stream.log.append(f"kept for {stream.name}")


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> _streams.CudaTimeline:
    import torch

    Stream.current, Stream.log, Event.past = Stream("compute", 3), [], False
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(Stream, "current", stream))
    return _streams.CudaTimeline(0, Native())  # type: ignore[arg-type]


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


def test_the_current_stream_is_put_back_and_joined_when_a_call_fails(
    timeline: _streams.CudaTimeline,
) -> None:
    begun = timeline.begin(EventHandle(), True, True)
    assert Stream.current.name == "comm"
    Stream.log.clear()
    begun.leave()
    assert Stream.current.name == "compute"
    assert Stream.log == ["compute waits for comm"]


def test_a_call_whose_beginning_fails_leaves_the_current_stream(
    timeline: _streams.CudaTimeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(event: Event) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(timeline.comm_stream, "wait_event", fail)
    with pytest.raises(RuntimeError):
        timeline.begin(EventHandle(), True, True)
    assert Stream.current.name == "compute"


def test_dropped_memory_waits_for_streams_that_the_call_does_not_wait_for(
    timeline: _streams.CudaTimeline,
) -> None:
    lot: list[Any] = timeline.native.lot  # type: ignore[attr-defined]
    first = Block()
    gone = weakref.ref(first)
    lot.append(first)
    del first
    previous = EventHandle()
    for past in (False, False, True):
        Event.past = past
        assert gone() is not None
        call(timeline, previous, True, False)
    assert gone() is None
    # A call that waits for the current stream comes behind all uses.
    Event.past, second = False, Block()
    gone = weakref.ref(second)
    lot.append(second)
    del second
    call(timeline, None, False, False)
    assert gone() is None


def test_dropped_memory_and_loans_are_kept_while_a_graph_is_recorded(
    timeline: _streams.CudaTimeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    lot: list[Any] = timeline.native.lot  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    block, loan = Block(), Block()
    gone, lent = weakref.ref(block), weakref.ref(loan)
    lot.append(block)
    timeline.lend(loan)
    del block, loan
    call(timeline, None, False, False)
    assert gone() is not None and lent() is not None
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call(timeline, None, False, False)
    assert gone() is None and lent() is not None


def test_memory_is_lent_behind_those_who_used_it_before(timeline: _streams.CudaTimeline) -> None:
    timeline.lend(Block())
    assert Stream.log == ["compute waits for comm"]
