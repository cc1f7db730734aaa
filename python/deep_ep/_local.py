"""Ranks that are threads of this process."""

from __future__ import annotations

import gc
import threading
from typing import Callable, Optional, TypeVar

from ._native import Group

T = TypeVar("T")


def run_local(fn: Callable[[Group], T], n: int) -> list[T]:
    """Runs ``fn(group)`` on ``n`` ranks that are threads of this process.

    Args:
        fn: the program of one rank; ``group.rank()`` says which.
        n: the number of ranks.

    Returns:
        What the ranks returned, by rank.

    Raises:
        Exception: what the first rank that failed raised. The others are told to stop waiting.
    """
    # A buffer that is only garbage is given back now. In the middle of a call, on a GPU, that waits for
    # the kernels of all ranks there, of which one may wait for the rank whose thread collects.
    gc.collect()
    groups = Group.local(n)
    results: list[Optional[T]] = [None] * n
    failures: list[BaseException] = []

    def rank(group: Group) -> None:
        try:
            results[group.rank()] = fn(group)
        except BaseException as error:
            failures.append(error)
            group.cancel()

    threads = [
        threading.Thread(target=rank, args=(group,), name=f"rank {group.rank()}", daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        # Ctrl-C: the ranks' waits end within a moment, and with them the threads.
        groups[0].cancel()
        for thread in threads:
            thread.join(timeout=1.0)
        raise
    if failures:
        raise failures[0]
    return results  # type: ignore[return-value]
