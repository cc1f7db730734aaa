"""What all calls share: describing arguments, and telling peers when one is not usable."""

from __future__ import annotations

import operator
from typing import Any, Callable, NoReturn, Optional, TypeVar

from . import _arrays, _native, _streams
from ._arrays import Arrays
from ._types import Spec
from .errors import InvalidArgument
from .utils import EventHandle, EventOverlap

T = TypeVar("T")


class Calls:
    """State that :class:`deep_ep.Buffer` shares with its families of calls."""

    rank: int
    group_size: int
    enable_shrink: bool

    @property
    def _core(self) -> _native.Buffer:
        """The native buffer."""
        raise NotImplementedError

    @property
    def _lends(self) -> bool:
        """Whether outputs are memory of the library."""
        raise NotImplementedError

    def _timeline(self, x: Spec) -> _streams.Timeline:
        """Where a call on ``x`` is ordered."""
        raise NotImplementedError

    #: Default bound on SMs.
    num_sms: int


class Arguments:
    """Tensors of one call, described for the native module and kept alive for it."""

    def __init__(self, native: _native.Buffer, call: Optional[str]) -> None:
        """``call`` is ``None`` for a call that has no peers."""
        self.native, self.call = native, call
        #: Raw inputs.
        self.kept: list[Any] = []

    def _tell(self, argument: str, value: Any, limit: str) -> None:
        if self.call is not None:
            self.native.refuse(self.call, argument, str(value), limit)

    def told(self, step: Callable[..., T], *values: Any) -> T:
        """What a step before the call returns, of whose failure (no memory) the peers are told."""
        try:
            return step(*values)
        except InvalidArgument:
            raise
        except Exception as error:
            self._tell("an output", f"not to be had ({error})", "must be had on every rank")
            raise

    def reject(self, argument: str, value: Any, limit: str) -> NoReturn:
        """Tells the peers, which would wait for this rank, and raises."""
        self._tell(argument, value, limit)
        raise InvalidArgument(
            f"{argument} is {value}, but it {limit}", argument=argument, value=value, limit=limit
        )

    def _rejected(self, error: InvalidArgument) -> NoReturn:
        self._tell(str(error.argument), error.value, str(error.limit))
        raise error

    def kind(self, argument: str, tensor: Any) -> Arrays:
        """The kind of a tensor."""
        try:
            return _arrays.of(tensor, argument)
        except InvalidArgument as error:
            self._rejected(error)

    def take(self, argument: str, tensor: Any) -> tuple[Arrays, Any, Spec]:
        """Kind, raw form and description of a tensor."""
        arrays = _arrays.KINDS.get(type(tensor)) or self.kind(argument, tensor)
        try:
            raw = arrays.take(tensor)
            spec = arrays.spec(raw)
        except InvalidArgument as error:
            self._rejected(error)
        except Exception as error:
            # Sparse tensors, arrays of objects, what a library does not export.
            self._tell(argument, type(error).__name__, "must be a plain tensor")
            raise
        self.kept.append(raw)
        return arrays, raw, spec

    def specs(self, arguments: tuple[str, ...], tensors: tuple[Any, ...]) -> list[Spec]:
        """The descriptions of several tensors."""
        kind = type(tensors[0])
        arrays = _arrays.KINDS.get(kind)
        if arrays is not None and arrays.mutable and all(type(each) is kind for each in tensors):
            # Usually all are of one kind and in order, and this is the shortest way.
            try:
                found = list(map(arrays.spec, tensors))
            except Exception:
                pass  # Found again below, by name.
            else:
                self.kept.extend(tensors)
                return found
        return [self.spec(*each) for each in zip(arguments, tensors)]

    def spec(self, argument: str, tensor: Any) -> Spec:
        """The description of a tensor."""
        return self.take(argument, tensor)[2]

    def optional(self, argument: str, tensor: Any) -> Optional[Spec]:
        """The description of a tensor that may be missing."""
        return None if tensor is None else self.take(argument, tensor)[2]

    def output(self, argument: str, tensor: Any) -> Spec:
        """The description of a tensor that is written."""
        arrays, raw, spec = self.take(argument, tensor)
        if arrays.read_only(raw):
            self.reject(argument, "read-only", "must be writable")
        return spec

    def optional_output(self, argument: str, tensor: Any) -> Optional[Spec]:
        """The description of a tensor that is written and may be missing."""
        return None if tensor is None else self.output(argument, tensor)

    def count(self, argument: str, value: Any) -> int:
        """A number that is not negative."""
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if not 0 <= number < 1 << 62:
            self.reject(argument, repr(value), "must be an integer from 0 to 2^62")
        return number

    def previous(
        self, event: Optional[EventOverlap], async_finish: bool, on_comm: bool
    ) -> Optional[EventHandle]:
        """The event to wait for, if the combination of arguments is allowed."""
        previous = None if event is None else event.event
        if on_comm and (previous is None or not async_finish):
            limit = "must come with async_finish and a previous_event that has an event"
            self.reject("allocate_on_comm_stream", True, limit)
        return previous

    def handle(self, handle: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
        """A handle with as many elements as there are ``names``."""
        if not isinstance(handle, tuple) or len(handle) != len(names):
            found = f"a {type(handle).__name__}"
            if isinstance(handle, tuple):
                found = f"a tuple of {len(handle)}"
            self.reject("handle", found, f"must be a tuple ({', '.join(names)})")
        return handle


def as_bytes(arrays: _arrays.Arrays, raw: Any, spec: Spec) -> Spec:
    """Rows of elements that the native module does not know, as rows of bytes."""
    address, name, shape, strides, device = spec
    if name in _arrays.KNOWN:
        return spec
    item = arrays.item(raw)
    if item == 1 or len(shape) != 2:
        return address, "uint8", shape, strides, device
    rows, width = shape
    apart, step = strides
    # A step other than 1 stays visible, so that rows that are not dense are found.
    return address, "uint8", (rows, width * item), (apart * item, step), device
