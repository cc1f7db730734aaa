"""Events: what a call returns to wait for, and what it waits for.

On the CPU engine a call is over when it returns, and events are always past.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Optional

__all__ = ["EventHandle", "EventOverlap"]


def _cuda() -> Any:
    """``torch.cuda`` if the program uses it."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


class EventHandle:
    """A point in the current stream."""

    def __init__(self) -> None:
        """Records the current stream."""
        self._event: Any = None
        cuda = _cuda()
        if cuda is not None:
            self._record(cuda.current_stream())

    def _record(self, stream: Any) -> None:
        self._event = stream.record_event()

    @classmethod
    def _of(cls, stream: Any) -> EventHandle:
        """A point in ``stream``, which may be the host's."""
        handle = cls.__new__(cls)
        handle._event = stream.record_event()
        return handle

    def current_stream_wait(self) -> None:
        """Work enqueued on the current stream from now on waits for this point."""
        cuda = _cuda()
        if cuda is not None and self._event is not None:
            cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event of a call, usable as a context: leaving it waits.

    Attributes:
        event: the event, or ``None`` if there is nothing to wait for.
        extra_tensors: tensors kept alive with it.
    """

    def __init__(
        self,
        event: Optional[EventHandle] = None,
        extra_tensors: Optional[tuple[Any, ...]] = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event, which must be there."""
        assert self.event is not None, "there is no event: the call was not async_finish"
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
