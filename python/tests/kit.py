"""What the tests need of a tensor library, once for numpy and once for torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


class NumpyKit:
    """numpy arrays."""

    name = "numpy"

    def tensor(self, array: np.ndarray) -> Any:
        """A tensor of this library with the bits of ``array``, strides kept."""
        return array

    def array(self, tensor: Any) -> np.ndarray:
        """The bits of a tensor, as numpy array."""
        assert isinstance(tensor, np.ndarray)
        return tensor

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.zeros(shape, dtype)

    def dtype(self, dtype: str) -> Any:
        return BF16 if dtype == "bfloat16" else np.dtype(dtype)

    def fill(self, tensor: Any, array: np.ndarray) -> None:
        """Copies ``array`` into ``tensor``."""
        tensor[...] = array


class TorchKit:
    """torch tensors on the CPU."""

    name = "torch"

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
        return self.torch.zeros(shape, dtype=getattr(self.torch, dtype))

    def dtype(self, dtype: str) -> Any:
        return getattr(self.torch, dtype)

    def fill(self, tensor: Any, array: np.ndarray) -> None:
        tensor.copy_(self.tensor(array))
