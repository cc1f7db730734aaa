"""Fixtures: each test runs with numpy, and with torch where it is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("DEEP_EP_ENGINE", "cpu")
# A test that waits for a rank that does not come must not wait for minutes.
os.environ.setdefault("DEEP_EP_TIMEOUT_SECS", "60")
sys.path.insert(0, str(Path(__file__).parent))

HAVE_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAVE_TORCH, reason="torch is not installed")


@pytest.fixture(params=["numpy", "torch"])
def kit(request: pytest.FixtureRequest) -> Any:
    """The library whose tensors are passed."""
    import kit as kits

    if request.param == "numpy":
        return kits.NumpyKit()
    if not HAVE_TORCH:
        pytest.skip("torch is not installed")
    return kits.TorchKit()
