"""The order of a call's work: current stream, communication stream, events.

On the CPU engine a call is over when it returns; :class:`HostTimeline` has only the checks. On CUDA,
work goes to one communication stream of the buffer, which waits for what the caller says.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Optional, Protocol

from . import _native
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

    def lend(self, loan: Any) -> None:
        """Lets the current stream use memory of the library, behind those who did before."""


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
        # Calls have no state here.
        self.call, self.async_call = HostCall(False), HostCall(True)

    def begin(self, previous: Optional[EventHandle], async_: bool, on_comm: bool) -> Call:
        return self.async_call if async_ else self.call

    def begin_here(self) -> Call:
        return self.call

    def lend(self, loan: Any) -> None:
        pass


class CudaCall:
    """A call on the communication stream."""

    def __init__(self, timeline: CudaTimeline, compute: Any, async_: bool, on_comm: bool) -> None:
        self.timeline, self.compute = timeline, compute
        self.async_, self.on_comm = async_, on_comm
        self.stream = timeline.comm_handle
        self.joined = False

    def end(self, tensors: tuple[Any, ...]) -> EventOverlap:
        if not self.async_:
            self._join()
            return EventOverlap(None)
        comm = self.timeline.comm_stream
        event = EventHandle._of(comm)
        for tensor in tensors:
            if tensor is None or not getattr(tensor, "is_cuda", False):
                continue
            tensor.record_stream(comm)
            if self.on_comm:
                tensor.record_stream(self.compute)
        self.joined = True
        return EventOverlap(event)

    def _join(self) -> None:
        """Lets the current stream wait for all that the communication stream was given."""
        self.joined = True
        self.timeline.join.record(self.timeline.comm_stream)
        self.timeline.join.wait(self.compute)

    def leave(self) -> None:
        if self.on_comm:
            self.timeline.cuda.set_stream(self.compute)
        if not self.joined:
            # It failed. What it was given may be in use, and the caller is about to let it go; and a
            # graph that is recorded cannot end with the streams apart.
            self._join()


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

    def __init__(self, device: int, native: _native.Buffer) -> None:
        import torch

        self.cuda: Any = torch.cuda
        self.device, self.native = device, native
        # Torch deals out 32 streams by turns. Those of high priority are rarely a caller's own, whose
        # work would then be before or behind ours instead of beside it.
        self.comm_stream: Any = self.cuda.Stream(device, priority=-1)
        self.comm_handle = int(self.comm_stream.cuda_stream)
        #: Points at which the streams part and meet, used again by every call.
        self.fork, self.join = self.cuda.Event(), self.cuda.Event()
        #: Dropped memory of the library, and what its users were given before.
        self.dropped: deque[tuple[Any, _native.Dropped]] = deque()
        #: What graphs that were recorded use.
        self.recorded: list[Any] = []

    def begin(self, previous: Optional[EventHandle], async_: bool, on_comm: bool) -> Call:
        compute, comm = self.cuda.current_stream(self.device), self.comm_stream
        if previous is None or previous._event is None:
            self.fork.record(compute)
            self.fork.wait(comm)
            self._reclaim(None)
        else:
            comm.wait_event(previous._event)
            self._reclaim(compute)
        call = CudaCall(self, compute, async_, on_comm)
        if on_comm:
            self.cuda.set_stream(comm)
        return call

    def begin_here(self) -> Call:
        self._reclaim(None)
        return CudaCallHere(self.cuda.current_stream(self.device))

    def lend(self, loan: Any) -> None:
        if self.cuda.is_current_stream_capturing():
            # The graph uses it whenever it is replayed.
            self.recorded.append(loan)
            return
        self.join.record(self.comm_stream)
        self.join.wait(self.cuda.current_stream(self.device))

    def _reclaim(self, compute: Any) -> None:
        """Lets the library use dropped memory again that its callers do not use any more.

        ``compute`` is a stream that the call does not wait for; it may have been given work that uses
        what was dropped.
        """
        dropped = self.native.dropped()
        if dropped is None and not self.dropped:
            return
        if self.cuda.is_current_stream_capturing():
            # Nobody may ask an event now.
            if dropped is not None:
                self.dropped.append((None, dropped))
            return
        if dropped is not None and compute is not None:
            self.dropped.append((compute.record_event(), dropped))
        while self.dropped and (self.dropped[0][0] is None or self.dropped[0][0].query()):
            self.dropped.popleft()


def current_device() -> Optional[int]:
    """The current CUDA device of a program that uses torch with CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return int(torch.cuda.current_device())
