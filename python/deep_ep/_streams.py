"""The order of a call's work: current stream, communication stream, events.

On the CPU engine a call is over when it returns; :class:`HostTimeline` has only the checks. On CUDA,
work goes to one communication stream of the buffer, which waits for what the caller says.
"""

from __future__ import annotations

import sys
from typing import Any, Optional, Protocol

from .utils import EventHandle, EventOverlap


class Call(Protocol):
    """A call between its start and its end."""

    #: Driver handle of the stream that the native module works on.
    stream: int

    def end(self, tensors: tuple[Any, ...]) -> EventOverlap:
        """The call's work is enqueued; ``tensors`` are its inputs and outputs."""

    def leave(self) -> None:
        """Puts the current stream back, also when the call failed."""


class Timeline(Protocol):
    """Makes calls."""

    #: The communication stream.
    comm_stream: Any

    def begin(self, previous: Optional[EventHandle], async_: bool, on_comm: bool) -> Call:
        """Starts a call, after ``previous`` or after the current stream's work."""

    def begin_here(self) -> Call:
        """Starts a call on the current stream: the halves of a low-latency call with a hook."""


class HostStream:
    """The stream of the CPU engine: everything on it is over."""

    cuda_stream = 0

    def wait_stream(self, stream: Any) -> None:
        """Returns: what was enqueued is over, or is of a device that this stream has not."""

    def wait_event(self, event: Any) -> None:
        """Returns."""

    def record_event(self, event: Any = None) -> None:
        """Nothing is left to wait for."""

    def synchronize(self) -> None:
        """Returns."""

    def query(self) -> bool:
        """Whether all work is over, which it is."""
        return True


class HostCall:
    """A call of the CPU engine."""

    stream = 0

    def __init__(self, async_: bool) -> None:
        self.async_ = async_

    def end(self, tensors: tuple[Any, ...]) -> EventOverlap:
        return EventOverlap(EventHandle() if self.async_ else None)

    def leave(self) -> None:
        pass


class HostTimeline:
    """Calls of the CPU engine."""

    def __init__(self) -> None:
        self.comm_stream: Any = HostStream()

    def begin(self, previous: Optional[EventHandle], async_: bool, on_comm: bool) -> Call:
        return HostCall(async_)

    def begin_here(self) -> Call:
        return HostCall(False)


class CudaCall:
    """A call on the communication stream."""

    def __init__(self, timeline: CudaTimeline, async_: bool, on_comm: bool) -> None:
        self.timeline, self.async_, self.on_comm = timeline, async_, on_comm
        self.compute = timeline.cuda.current_stream(timeline.device)
        self.stream = int(timeline.comm_stream.cuda_stream)
        if on_comm:
            timeline.cuda.set_stream(timeline.comm_stream)

    def end(self, tensors: tuple[Any, ...]) -> EventOverlap:
        comm = self.timeline.comm_stream
        event = None
        if self.async_:
            event = EventHandle._of(comm)
            for tensor in tensors:
                if tensor is None or not getattr(tensor, "is_cuda", False):
                    continue
                tensor.record_stream(comm)
                if self.on_comm:
                    tensor.record_stream(self.compute)
        else:
            self.compute.wait_stream(comm)
        return EventOverlap(event)

    def leave(self) -> None:
        if self.on_comm:
            self.timeline.cuda.set_stream(self.compute)


class CudaCallHere:
    """A call on the stream that was current when it began."""

    def __init__(self, stream: Any) -> None:
        self.stream = int(stream.cuda_stream)

    def end(self, tensors: tuple[Any, ...]) -> EventOverlap:
        return EventOverlap(None)

    def leave(self) -> None:
        pass


class CudaTimeline:
    """Calls on CUDA, with torch's streams."""

    def __init__(self, device: int) -> None:
        import torch

        self.cuda: Any = torch.cuda
        self.device = device
        self.comm_stream: Any = self.cuda.Stream(device)

    def begin(self, previous: Optional[EventHandle], async_: bool, on_comm: bool) -> Call:
        call = CudaCall(self, async_, on_comm)
        if previous is None or previous._event is None:
            self.comm_stream.wait_stream(call.compute)
        else:
            self.comm_stream.wait_event(previous._event)
        return call

    def begin_here(self) -> Call:
        return CudaCallHere(self.cuda.current_stream(self.device))


def current_device() -> Optional[int]:
    """The current CUDA device of a program that uses torch with CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return int(torch.cuda.current_device())
