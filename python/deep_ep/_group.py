"""Groups of other libraries: torch.distributed, MPI."""

from __future__ import annotations

from typing import Any, Callable

from ._native import Group
from .errors import InvalidArgument


def adapt(group: Any, comm: Any) -> tuple[Group, Any]:
    """The library's group for what a caller passes, and the caller's object."""
    if isinstance(group, Group):
        return group, group
    if group is not None:
        if hasattr(group, "Get_rank"):
            return _of_mpi(group), group
        if callable(getattr(group, "rank", None)) and callable(getattr(group, "size", None)):
            return _of_torch(group), group
    elif comm is not None:
        return _of_mpi(comm), comm
    value = repr(group)
    limit = (
        "must be a torch.distributed ProcessGroup, an mpi4py communicator or a deep_ep.Group; "
        "or comm must be given"
    )
    raise InvalidArgument(
        f"group is {value}, but it {limit}", argument="group", value=value, limit=limit
    )


def _of_torch(group: Any) -> Group:
    import torch.distributed as dist

    def all_gather(data: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, data, group)
        return gathered

    return _custom(group.rank(), group.size(), all_gather)


def _of_mpi(comm: Any) -> Group:
    def all_gather(data: bytes) -> list[bytes]:
        return list(comm.allgather(data))

    return _custom(comm.Get_rank(), comm.Get_size(), all_gather)


def _custom(rank: int, size: int, all_gather: Callable[[bytes], list[bytes]]) -> Group:
    return Group.from_all_gather(rank, size, all_gather)
