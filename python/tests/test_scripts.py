"""The scripts that users run, small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_life import free_port

SCRIPTS = Path(__file__).parents[2] / "tests"
SMALL = ["--engine", "cpu", "--num-tokens", "12", "--hidden", "512", "--repeats", "2"]


def environment(**more: str) -> dict[str, str]:
    """The environment without a job in it."""
    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    return {**{k: v for k, v in os.environ.items() if k not in job}, **more}


@pytest.mark.parametrize(
    "name,ranks",
    [("test_intranode", "3"), ("test_low_latency", "3"), ("test_inference", "2"), ("test_fp8", "2")],
)
def test_a_script_finds_everything_right(name: str, ranks: str) -> None:
    options = [*SMALL, "--num-processes", ranks, "--num-topk", "4", "--num-experts", "24"]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py"), *options],
        capture_output=True, text=True, env=environment(), timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ranks} ranks, 12 tokens, hidden 512, top-4 of 24 experts, engine cpu" in done.stdout
    assert "all are right" in done.stdout


def test_ranks_may_be_threads_of_one_process() -> None:
    options = [*SMALL, "--num-processes", "3", "--ranks-as", "threads", "--num-experts", "24"]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "test_low_latency.py"), *options],
        capture_output=True, text=True, env=environment(), timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all are right") == 1 and "3 ranks" in done.stdout


BREAK = """
import runpy, sys
import deep_ep
right = deep_ep.Buffer.{method}
def wrong(self, *args, **kwargs):
    result = right(self, *args, **kwargs)
    first = result[0][0] if isinstance(result[0], tuple) else result[0]
    if result[-1] is not None and callable(result[-1]):
        result[-1]()
        result = (*result[:-1], lambda: None)
    first[0] = 3 if first.ndim == 2 else first[0] * 0 + 1
    return result
deep_ep.Buffer.{method} = wrong
sys.path.insert(0, {folder!r})
sys.argv[1:] = {options!r}
runpy.run_path({folder!r} + "/{name}.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    "name,method",
    [
        ("test_intranode", "dispatch"),
        ("test_intranode", "combine"),
        ("test_low_latency", "low_latency_dispatch"),
        ("test_low_latency", "low_latency_combine"),
        ("test_inference", "low_latency_combine"),
        ("test_fp8", "dispatch"),
    ],
)
def test_a_script_notices_a_wrong_result(name: str, method: str) -> None:
    program = BREAK.format(
        name=name, method=method, folder=str(SCRIPTS), options=[*SMALL, "--num-experts", "8"]
    )
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment(**job),
        timeout=120,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG" in done.stderr or "nearest" in done.stderr, done.stderr
