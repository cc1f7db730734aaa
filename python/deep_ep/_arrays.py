"""Tensors of torch, numpy and libraries that speak DLPack.

The native module takes a tensor as ``(address, dtype, shape, strides, device)``. For each kind of
tensor there is one object here that makes such descriptions and allocates outputs. *Raw* is what it
works with: the tensor itself for torch and numpy, a DLPack view (inputs) or memory of the library
(outputs) for others.
"""

from __future__ import annotations

import sys
from typing import Any, Optional, Protocol

from . import _native
from ._types import Spec
from .errors import InvalidArgument, Unsupported

#: Element types that the native module knows. Others may be dispatched, as bytes.
KNOWN = frozenset(
    [
        "bfloat16",
        "float16",
        "float32",
        "float8_e4m3fn",
        "uint8",
        "bool",
        "int8",
        "int32",
        "int64",
    ]
)


class Arrays(Protocol):
    """One kind of tensor."""

    #: Whether a tensor may be filled after it was given to the caller.
    mutable: bool

    def take(self, tensor: Any) -> Any:
        """The raw form of an input."""

    def spec(self, raw: Any) -> Spec:
        """The description of a raw tensor."""

    def read_only(self, raw: Any) -> bool:
        """Whether a raw input must not be written."""

    def item(self, raw: Any) -> int:
        """Bytes of an element."""

    def dtype(self, raw: Any) -> Any:
        """Element type, as :meth:`empty` takes it."""

    def named(self, name: str) -> Any:
        """The element type of this name."""

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        like: Any,
        strides: Optional[tuple[int, ...]] = None,
    ) -> Any:
        """A new raw tensor on the device of the raw tensor ``like``."""

    def wrap(self, raw: Any) -> Any:
        """The tensor to give to the caller."""

    def of_memory(self, memory: _native.Memory, boolean: bool = False) -> Any:
        """A tensor to give to the caller, in memory of the library."""

    def rows_of(self, memory: _native.Memory, dtype: Any) -> Any:
        """A tensor to give to the caller, in memory of the library that holds such elements."""

    def copy(self, to: Any, memory: _native.Memory) -> None:
        """Copies memory of the library to a raw output."""

    def fill(self, to: Any, values: list[int]) -> None:
        """Copies numbers to a raw tensor ``[len(values)]``."""


class Names(dict[Any, str]):
    """Names of torch's element types: ``bfloat16`` of ``torch.bfloat16``."""

    def __missing__(self, dtype: Any) -> str:
        name = self[dtype] = str(dtype).rpartition(".")[2]
        return name


class TorchArrays:
    """``torch.Tensor``."""

    mutable = True

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.names = Names()
        self.dtypes = {name: getattr(torch, name) for name in KNOWN if hasattr(torch, name)}
        # What torch.from_dlpack calls when it has looked at devices and streams, of which a host
        # call has none; a handle has six tensors, so it counts.
        self.of_capsule = getattr(torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack)

    def take(self, tensor: Any) -> Any:
        return tensor

    def spec(self, raw: Any) -> Spec:
        ordinal = raw.get_device()
        if raw.is_cuda if ordinal >= 0 else raw.is_cpu:
            return raw.data_ptr(), self.names[raw.dtype], raw.shape, raw.stride(), ordinal
        raise InvalidArgument(
            f"a tensor is on {raw.device}, but it must be on the CPU or on CUDA",
            argument="device",
            value=str(raw.device),
            limit="must be the CPU or CUDA",
        )

    def read_only(self, raw: Any) -> bool:
        return False

    def item(self, raw: Any) -> int:
        return int(raw.element_size())

    def dtype(self, raw: Any) -> Any:
        return raw.dtype

    def named(self, name: str) -> Any:
        return self.dtypes[name]

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        like: Any,
        strides: Optional[tuple[int, ...]] = None,
    ) -> Any:
        if strides is None:
            return self.torch.empty(shape, dtype=dtype, device=like.device)
        return self.torch.empty_strided(shape, strides, dtype=dtype, device=like.device)

    def wrap(self, raw: Any) -> Any:
        return raw

    def of_memory(self, memory: _native.Memory, boolean: bool = False) -> Any:
        tensor = self.of_capsule(memory.__dlpack__())
        return tensor.view(self.torch.bool) if boolean else tensor

    def rows_of(self, memory: _native.Memory, dtype: Any) -> Any:
        tensor = self.of_capsule(memory.__dlpack__())
        return tensor if tensor.dtype == dtype else tensor.view(dtype)

    def copy(self, to: Any, memory: _native.Memory) -> None:
        to.copy_(self.of_memory(memory))

    def fill(self, to: Any, values: list[int]) -> None:
        to.copy_(self.torch.tensor(values, dtype=to.dtype, device="cpu"))


class NumpyArrays:
    """``numpy.ndarray``, with ``ml_dtypes`` for bf16 and FP8."""

    mutable = True

    def __init__(self) -> None:
        import numpy

        self.numpy = numpy

    def take(self, tensor: Any) -> Any:
        return tensor

    def spec(self, raw: Any) -> Spec:
        # The array interface has the address of every dtype, also of those that DLPack and the
        # buffer protocol refuse; its type is not needed, the dtype has a name.
        address = raw.__array_interface__["data"][0]
        item = raw.dtype.itemsize
        for stride in raw.strides:
            if stride % item:
                raise InvalidArgument(
                    f"an array has strides of {raw.strides} bytes, but they must be multiples "
                    f"of its elements' {item} bytes",
                    argument="strides",
                    value=str(raw.strides),
                    limit=f"must be multiples of {item} bytes",
                )
        strides = tuple(stride // item for stride in raw.strides)
        return address, raw.dtype.name, raw.shape, strides, -1

    def read_only(self, raw: Any) -> bool:
        return not raw.flags.writeable

    def item(self, raw: Any) -> int:
        return int(raw.dtype.itemsize)

    def dtype(self, raw: Any) -> Any:
        return raw.dtype

    def named(self, name: str) -> Any:
        if name in ("bfloat16", "float8_e4m3fn"):
            try:
                import ml_dtypes
            except ImportError as error:
                raise Unsupported(f"numpy has no {name}: install ml_dtypes", argument=name) from error
            return self.numpy.dtype(getattr(ml_dtypes, name))
        return self.numpy.dtype(name)

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        like: Any,
        strides: Optional[tuple[int, ...]] = None,
    ) -> Any:
        if strides is None:
            return self.numpy.empty(shape, dtype)
        item = self.numpy.dtype(dtype).itemsize
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))
        flat = self.numpy.empty(0 if 0 in shape else span, dtype)
        steps = tuple(stride * item for stride in strides)
        return self.numpy.lib.stride_tricks.as_strided(flat, shape, steps)

    def wrap(self, raw: Any) -> Any:
        return raw

    def of_memory(self, memory: _native.Memory, boolean: bool = False) -> Any:
        array = self.numpy.asarray(memory)
        if boolean:
            return array.view(self.numpy.bool_)
        name = memory.spec[1]
        return array if array.dtype.name == name else array.view(self.named(name))

    def rows_of(self, memory: _native.Memory, dtype: Any) -> Any:
        array = self.numpy.asarray(memory)
        return array if array.dtype == dtype else array.view(dtype)

    def copy(self, to: Any, memory: _native.Memory) -> None:
        to[...] = self.of_memory(memory)

    def fill(self, to: Any, values: list[int]) -> None:
        to[...] = values


class ForeignArrays:
    """Tensors of a library that speaks DLPack and has an array API namespace."""

    mutable = False

    def __init__(self, example: Any) -> None:
        namespace = getattr(example, "__array_namespace__", None)
        if namespace is not None:
            self.module = namespace()
        else:
            self.module = sys.modules[type(example).__module__.partition(".")[0]]

    def take(self, tensor: Any) -> Any:
        return _native.from_dlpack(tensor)

    def spec(self, raw: Any) -> Spec:
        spec: Spec = raw.spec
        return spec

    def read_only(self, raw: Any) -> bool:
        return bool(raw.read_only)

    def item(self, raw: Any) -> int:
        raise Unsupported(f"{self.dtype(raw)} is an element type that is not known", argument="x")

    def dtype(self, raw: Any) -> Any:
        return raw.spec[1]

    def named(self, name: str) -> Any:
        return name

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        like: Any,
        strides: Optional[tuple[int, ...]] = None,
    ) -> Any:
        if like.spec[4] >= 0:
            raise Unsupported(
                "outputs on a GPU are allocated by torch: pass torch tensors", argument="x"
            )
        return _native.empty(dtype, shape, strides)

    def wrap(self, raw: Any) -> Any:
        return self.module.from_dlpack(raw)

    def of_memory(self, memory: _native.Memory, boolean: bool = False) -> Any:
        array = self.module.from_dlpack(memory)
        return array != 0 if boolean else array

    def rows_of(self, memory: _native.Memory, dtype: Any) -> Any:
        return self.module.from_dlpack(memory)

    def copy(self, to: Any, memory: _native.Memory) -> None:
        raise Unsupported("hooks need tensors of torch or numpy", argument="return_recv_hook")

    def fill(self, to: Any, values: list[int]) -> None:
        raise Unsupported("masks are written to tensors of torch or numpy", argument="mask_status")


#: The kinds that were met, by type of tensor.
KINDS: dict[type, Arrays] = {}


def of(tensor: Any, argument: str) -> Arrays:
    """The kind of ``tensor``, which was passed as ``argument``."""
    found = KINDS.get(type(tensor))
    if found is None:
        found = KINDS[type(tensor)] = _kind(tensor, argument)
    return found


def _kind(tensor: Any, argument: str) -> Arrays:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return TorchArrays()
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return NumpyArrays()
    if hasattr(tensor, "__dlpack__"):
        return ForeignArrays(tensor)
    kind = type(tensor).__name__
    raise InvalidArgument(
        f"{argument} is a {kind}, but it must be a tensor of torch, numpy or DLPack",
        argument=argument,
        value=kind,
        limit="must be a tensor of torch, numpy or DLPack",
    )


def of_dtype(dtype: Any) -> Arrays:
    """The kind of tensors whose element type ``dtype`` is."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return of(torch.empty(0), "dtype")
    import numpy

    return of(numpy.empty(0), "dtype")
