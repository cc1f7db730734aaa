"""Exceptions of the library.

Every class is an :class:`Error`. Fields that do not apply are ``None``:

========== =====================================================================
argument   the argument or setting that is not usable
value      its value
limit      what it must be
ranks      the ranks that are missing, gone, or that rejected
operation  the operation that waited, for example ``dispatch``
stage      the stage in it, for example ``counts``
by         the rank that gave up first (:class:`Aborted`)
waited     seconds (:class:`Timeout`)
========== =====================================================================
"""

from __future__ import annotations

from typing import Any, Optional

__all__ = [
    "Abandoned",
    "Aborted",
    "BootstrapError",
    "CudaError",
    "Error",
    "InvalidArgument",
    "OutOfMemory",
    "PeerLost",
    "PeerRejected",
    "SettingsDiffer",
    "Timeout",
    "Unsupported",
]


class Error(RuntimeError):
    """What every error of this library is."""

    argument: Optional[str]
    value: Any
    limit: Any
    ranks: Optional[list[int]]
    operation: Optional[str]
    stage: Optional[str]
    by: Optional[int]
    waited: Optional[float]

    def __init__(
        self,
        message: str = "",
        *,
        argument: Optional[str] = None,
        value: Any = None,
        limit: Any = None,
        ranks: Optional[list[int]] = None,
        operation: Optional[str] = None,
        stage: Optional[str] = None,
        by: Optional[int] = None,
        waited: Optional[float] = None,
    ) -> None:
        super().__init__(message)
        self.argument = argument
        self.value = value
        self.limit = limit
        self.ranks = ranks
        self.operation = operation
        self.stage = stage
        self.by = by
        self.waited = waited


class InvalidArgument(Error, ValueError):
    """An argument of this rank is not usable. The peers were told; the buffer stays usable."""


class PeerRejected(Error):
    """Another rank rejected the call, so no rows moved. The buffer stays usable."""


class SettingsDiffer(Error, ValueError):
    """Ranks passed different values where they must agree."""


class Timeout(Error, TimeoutError):
    """A wait reached its deadline. The group is aborted: make the buffer anew."""


class Aborted(Error):
    """A rank gave up (its deadline passed, or it was interrupted), so all did."""


class PeerLost(Error, ConnectionError):
    """Ranks are gone before they did their part."""


class Abandoned(Error):
    """Another call was begun before this one was finished."""


class Unsupported(Error):
    """What was asked for exists, but not here."""


class OutOfMemory(Error, MemoryError):
    """Memory could not be had."""


class BootstrapError(Error):
    """The ranks could not find each other."""


class CudaError(Error):
    """CUDA refused."""
