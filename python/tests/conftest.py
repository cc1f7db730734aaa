"""Fixtures: each test runs with numpy, and with torch where it is installed.

``pytest --engine cuda`` works on GPUs, also with tensors of torch that are there (``torch-cuda``); ranks
are then threads that share the GPUs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

# A test that waits for a rank that does not come must not wait for minutes.
os.environ.setdefault("DEEP_EP_TIMEOUT_SECS", "60")
# Ranks that share a GPU need queues of their own; CUDA reads this once.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
sys.path.insert(0, str(Path(__file__).parent))

HAVE_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAVE_TORCH, reason="torch is not installed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--engine``."""
    parser.addoption(
        "--engine",
        choices=["cpu", "cuda"],
        default=os.environ.get("DEEP_EP_ENGINE", "cpu"),
        help="what moves the rows (default: DEEP_EP_ENGINE, else cpu)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the engine before anything makes a buffer."""
    os.environ["DEEP_EP_ENGINE"] = config.getoption("--engine")


def make_kit(name: str) -> Any:
    """The kit of this name, or the test is skipped."""
    import kit as kits

    if name == "numpy":
        return kits.NumpyKit()
    if not HAVE_TORCH:
        pytest.skip("torch is not installed")
    if name == "torch":
        return kits.TorchKit()
    if os.environ["DEEP_EP_ENGINE"] != "cuda":
        pytest.skip("the engine is not cuda")
    if not kits.have_gpu():
        pytest.skip("torch has no GPU")
    return kits.TorchCudaKit()


@pytest.fixture(params=["numpy", "torch", "torch-cuda"])
def kit(request: pytest.FixtureRequest) -> Any:
    """The library whose tensors are passed."""
    return make_kit(request.param)


@pytest.fixture(params=["torch", "torch-cuda"])
def torch_kit(request: pytest.FixtureRequest) -> Any:
    """The device of torch's tensors that are passed."""
    return make_kit(request.param)


@pytest.fixture
def cuda() -> Any:
    """Torch's tensors on a GPU."""
    return make_kit("torch-cuda")
