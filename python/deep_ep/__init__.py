"""Expert-parallel dispatch and combine for Mixture-of-Experts models.

The interface is DeepEP's: :class:`Buffer` with :class:`Config` and :class:`EventOverlap`. Tensors are
torch's, on the CPU or on CUDA; numpy's (with ``ml_dtypes`` for bf16 and FP8); or those of a library
that speaks DLPack. Importing needs none of them, and no GPU.
"""

from __future__ import annotations

from typing import Any

from ._conflict import check as _check

_check()

from ._buffer import Buffer  # noqa: E402
from ._config import Config  # noqa: E402
from ._local import run_local  # noqa: E402
from ._native import Group, __version__  # noqa: E402
from .errors import (  # noqa: E402
    Abandoned,
    Aborted,
    BootstrapError,
    CudaError,
    Error,
    InvalidArgument,
    OutOfMemory,
    PeerLost,
    PeerRejected,
    SettingsDiffer,
    Timeout,
    Unsupported,
)
from .utils import EventHandle, EventOverlap  # noqa: E402

__all__ = [
    "Abandoned",
    "Aborted",
    "BootstrapError",
    "Buffer",
    "Config",
    "CudaError",
    "Error",
    "EventHandle",
    "EventOverlap",
    "Group",
    "InvalidArgument",
    "OutOfMemory",
    "PeerLost",
    "PeerRejected",
    "SettingsDiffer",
    "Timeout",
    "Unsupported",
    "__version__",
    "run_local",
    "topk_idx_t",
]

#: Element type of chosen experts: ``torch.int64``, or numpy's where there is no torch.
topk_idx_t: Any


def __getattr__(name: str) -> Any:
    # Looked up when it is used: importing this package must not import torch.
    if name == "topk_idx_t":
        try:
            import torch

            return torch.int64
        except ImportError:
            import numpy

            return numpy.dtype("int64")
    if name == "nn":
        import importlib

        return importlib.import_module(".nn", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
