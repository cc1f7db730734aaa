"""What the tests need of a tensor library: numpy, torch on the CPU, torch on a GPU."""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

import ml_dtypes
import numpy as np

from deep_ep import Buffer, Group, run_local

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)

T = TypeVar("T")


class Kit:
    """What is the same for tensors on the host."""

    name: str

    def run(self, fn: Callable[[Group], T], ranks: int) -> list[T]:
        """Runs ``fn`` on ranks that are threads."""
        return run_local(fn, ranks)

    def settle(self, buffer: Buffer) -> None:
        """Waits until this rank's work is done, and raises what went wrong in it."""
        buffer.check()


class NumpyKit(Kit):
    """numpy arrays."""

    name = "numpy"

    def tensor(self, array: np.ndarray) -> Any:
        """A tensor of this library with the bits of ``array``, strides kept."""
        return array

    def array(self, tensor: Any) -> np.ndarray:
        """The bits of a tensor, as numpy array, strides kept."""
        assert isinstance(tensor, np.ndarray)
        return tensor

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.zeros(shape, dtype)

    def dtype(self, dtype: str) -> Any:
        return BF16 if dtype == "bfloat16" else np.dtype(dtype)

    def fill(self, tensor: Any, array: np.ndarray) -> None:
        """Copies ``array`` into ``tensor``."""
        tensor[...] = array

    def expand(self, row: Any, rows: int) -> Any:
        """A tensor whose rows all are ``row`` ``[1, H]``, in the same memory."""
        return np.broadcast_to(row, (rows, row.shape[1]))


class TorchKit(Kit):
    """torch tensors on the CPU."""

    name = "torch"
    device = "cpu"

    def __init__(self) -> None:
        import torch

        self.torch = torch

    def tensor(self, array: np.ndarray) -> Any:
        torch = self.torch
        views = {BF16: (np.int16, torch.bfloat16), FP8: (np.uint8, torch.float8_e4m3fn)}
        if array.dtype in views:
            plain, dtype = views[array.dtype]
            return torch.from_numpy(array.view(plain)).view(dtype)
        return torch.from_numpy(array)

    def array(self, tensor: Any) -> np.ndarray:
        torch = self.torch
        assert isinstance(tensor, torch.Tensor)
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(BF16)
        if tensor.dtype == torch.float8_e4m3fn:
            return tensor.view(torch.uint8).numpy().view(FP8)
        return tensor.numpy()

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.torch.zeros(shape, dtype=getattr(self.torch, dtype), device=self.device)

    def dtype(self, dtype: str) -> Any:
        return getattr(self.torch, dtype)

    def fill(self, tensor: Any, array: np.ndarray) -> None:
        tensor.copy_(self.tensor(array))

    def expand(self, row: Any, rows: int) -> Any:
        return row.expand(rows, row.shape[1])


class TorchCudaKit(TorchKit):
    """torch tensors on the GPUs: rank ``r`` uses number ``r % device_count``.

    Kernels of ranks that share a GPU wait for each other, so nothing else may keep them from running.
    Each rank has a stream of its own, nobody waits for a whole device or uses the legacy default
    stream, and kernels of torch are loaded before the ranks begin.
    """

    name = "torch-cuda"
    device = "cuda"

    def run(self, fn: Callable[[Group], T], ranks: int) -> list[T]:
        cuda = self.torch.cuda
        load_kernels()

        def rank(group: Group) -> T:
            cuda.set_device(group.rank() % cuda.device_count())
            with cuda.stream(cuda.Stream()):
                # A thread's first product makes a handle of cuBLAS.
                some = self.torch.ones(8, 8, device=self.device)
                (some @ some).sum().item()
                group.barrier()
                result = fn(group)
                cuda.current_stream().synchronize()
            return result

        return run_local(rank, ranks)

    def settle(self, buffer: Buffer) -> None:
        self.torch.cuda.current_stream().synchronize()
        buffer.check()

    def tensor(self, array: np.ndarray) -> Any:
        return self._move(super().tensor(array), self.device)

    def array(self, tensor: Any) -> np.ndarray:
        assert tensor.is_cuda
        return super().array(self._move(tensor, "cpu"))

    def _move(self, tensor: Any, device: str) -> Any:
        """A copy with the same strides, by one copy of the memory that the tensor spans."""
        torch = self.torch
        if 0 in tensor.shape:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        bytes_ = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        flat = bytes_.as_strided((span,), (1,)).to(device).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())


def have_gpu() -> bool:
    """Whether torch has a GPU."""
    import torch

    return bool(torch.cuda.is_available())


@functools.lru_cache(None)
def load_kernels() -> None:
    """Lets CUDA load the kernels of torch that tests use.

    It does so at the first use, which may wait until kernels that run have ended: a deadlock if those
    wait for the rank that loads.
    """
    import torch

    for device in range(torch.cuda.device_count()):
        with torch.cuda.device(device):
            a = torch.ones(64, 64, device="cuda")
            for dtype in (torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8):
                b = torch.zeros(64, 64, device="cuda").to(dtype)
                b += 1
                b[:, :32].copy_(b[:, 32:])
                b.fill_(2)
                (b.float() * a).to(dtype)
                b.sum()
            (a.bfloat16() @ a.bfloat16()).float().sum().item()
            (a @ a).sum().item()
            (torch.arange(64, device="cuda") < 3).any().item()
            torch.cuda._sleep(1000)
            torch.cuda.synchronize()
