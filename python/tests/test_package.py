"""The package itself: exports, purity of the import, conflicts, DLPack."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deep_ep
import reference
from conftest import HAVE_TORCH
from deep_ep import Buffer, Config, Group, _native, run_local
from test_high_throughput import layout


def test_exports() -> None:
    for name in ["Buffer", "Config", "EventOverlap", "EventHandle", "topk_idx_t", "__version__"]:
        assert hasattr(deep_ep, name), name
    from deep_ep.utils import EventHandle, EventOverlap

    assert (EventHandle, EventOverlap) == (deep_ep.EventHandle, deep_ep.EventOverlap)
    if HAVE_TORCH:
        assert callable(deep_ep.nn.dispatch)
    # Frameworks probe for these by name.
    assert not hasattr(deep_ep, "ElasticBuffer") and not hasattr(deep_ep, "HybridEPBuffer")


def test_importing_imports_no_tensor_library() -> None:
    program = (
        "import sys, deep_ep; print([m for m in ('torch', 'numpy', 'ml_dtypes') if m in sys.modules])"
    )
    environment = {**os.environ, "DEEP_EP_ENGINE": "nonsense", "DEEP_EP_TIMEOUT_SECS": "x"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_other_distribution_in_the_same_place_is_named(tmp_path: Path) -> None:
    here = Path(deep_ep.__file__).parent
    site = tmp_path / "site"
    info = site / "deep_ep-1.2.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deep_ep\nVersion: 1.2.1\n")
    for where, fails in (("same", True), ("elsewhere", False)):
        target = site / "deep_ep"
        if where == "same":
            target.symlink_to(here)
        else:
            target.unlink()
            target.mkdir()
        environment = {**os.environ, "PYTHONPATH": f"{here.parent}{os.pathsep}{site}"}
        done = subprocess.run(
            [sys.executable, "-c", "import deep_ep"], capture_output=True, text=True, env=environment
        )
        assert (done.returncode != 0) == fails, done.stderr
        assert ("pip uninstall" in done.stderr) == fails


SIGNATURES = {
    "dispatch": "x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
    "num_tokens_per_expert topk_idx topk_weights expert_alignment num_worst_tokens config "
    "previous_event async_finish allocate_on_comm_stream",
    "combine": "x handle topk_weights bias config previous_event async_finish allocate_on_comm_stream",
    "get_dispatch_layout": "topk_idx num_experts previous_event async_finish allocate_on_comm_stream",
    "low_latency_dispatch": "x topk_idx num_max_dispatch_tokens_per_rank num_experts "
    "cumulative_local_expert_recv_stats dispatch_wait_recv_cost_stats use_fp8 round_scale use_ue8m0 "
    "async_finish return_recv_hook",
    "low_latency_combine": "x topk_idx topk_weights handle use_logfmt zero_copy async_finish "
    "return_recv_hook out combine_wait_recv_cost_stats",
    "clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank hidden num_experts",
    "get_local_buffer_tensor": "dtype size offset use_rdma_buffer",
    "low_latency_update_mask_buffer": "rank_to_mask mask",
    "__init__": "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
    "allow_nvlink_for_low_latency_mode allow_mnnvl explicitly_destroy enable_shrink comm use_fabric",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_deepeps_names_and_order(name: str) -> None:
    parameters = list(inspect.signature(getattr(Buffer, name)).parameters)[1:]
    assert parameters == SIGNATURES[name].split()


def test_attributes_and_class_methods() -> None:
    def rank(group: Group) -> None:
        buffer = Buffer(group, 1 << 20, low_latency_mode=False)
        assert (buffer.rank, buffer.group_size, buffer.group) == (0, 1, group)
        assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.low_latency_mode) == (
            1 << 20,
            0,
            False,
        )
        runtime: Any = buffer.runtime
        assert runtime.is_available() and runtime.get_num_rdma_ranks() == 1
        assert runtime.get_rdma_rank() == 0 and runtime.get_root_rdma_rank(True) == 0
        assert runtime.get_local_device_id() == 0
        stream = buffer.get_comm_stream()
        assert stream is buffer.get_comm_stream()
        capture = buffer.capture
        assert isinstance(capture(), deep_ep.EventOverlap)
        buffer.barrier()
        assert buffer.statistics()["calls"] == 1

    run_local(rank, 1)
    assert Buffer.num_sms == 20 and Buffer.is_sm90_compiled()
    Buffer.set_num_sms(24)
    assert Buffer.get_dispatch_config(7).num_sms == 24 == Buffer.get_combine_config(1).num_sms
    Buffer.set_num_sms(20)
    with pytest.raises(deep_ep.InvalidArgument):
        Buffer.set_num_sms(3)
    config = Config(24, 8, num_max_nvl_chunked_recv_tokens=128)
    assert config.get_nvl_buffer_size_hint(7168 * 2, 5) > 0
    assert config.get_rdma_buffer_size_hint(7168 * 2, 5) == 0
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) > 2 * 8 * 128 * 7168 * 2
    with pytest.raises(deep_ep.InvalidArgument):
        Buffer.get_low_latency_rdma_size_hint(1 << 40, 1 << 40, 8, 256)


def test_the_readmes_example_does_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    program = text.split("```python\n")[1].split("```")[0]
    assert len(program.splitlines()) <= 20
    exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip() == "[4.0, 4.0, 4.0, 4.0]"


class Other:
    """A tensor of a library that only speaks DLPack and the array API."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array_namespace__(self) -> Any:
        return np

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_tensors_of_other_libraries_enter_and_leave_by_dlpack() -> None:
    world = reference.make(71, 2)
    x = [one.astype(np.float32) for one in world.x]

    class OtherKit:
        name = "other"

        def tensor(self, array: np.ndarray) -> Any:
            return Other(array)

        def array(self, tensor: Any) -> np.ndarray:
            assert isinstance(tensor, np.ndarray)
            return tensor

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        arguments = layout(buffer, OtherKit(), world)
        recv, idx, _weights, _, handle, _ = buffer.dispatch(Other(x[me]), **arguments)
        rows = [x[s][t].tolist() for s, t in world.arrivals(me)]
        assert recv.tolist() == rows
        assert idx.tolist() == [world.local_idx(me, *at) for at in world.arrivals(me)]
        combined, _, _ = buffer.combine(Other(np.array(recv)), handle)
        with pytest.raises(deep_ep.InvalidArgument):
            buffer.low_latency_dispatch(Other(x[me]), Other(world.idx[me]), 9, 4, return_recv_hook=True)
        outputs = [np.stack([x[s][t] for s, t in world.arrivals(r)]) for r in range(2)]
        assert combined.tobytes() == reference.combine(world, me, outputs, []).tobytes()

    run_local(rank, 2)


def test_dlpack_keeps_and_frees_memory() -> None:
    memory = _native.empty("float32", (2, 3), (1, 2))
    assert memory.spec[1:] == ("float32", (2, 3), (1, 2), -1) or memory.spec[2] == [2, 3]
    array = np.from_dlpack(memory)
    assert array.strides == (4, 8)
    other = np.asarray(memory)
    other[:] = 3
    del memory, other
    assert (array == 3).all()
    for _ in range(3):
        capsule = _native.empty("int64", (4,)).__dlpack__()
        del capsule
    foreign = _native.from_dlpack(np.arange(6, dtype=np.int32).reshape(2, 3).T)
    assert list(foreign.spec[2]) == [3, 2] and list(foreign.spec[3]) == [1, 3]
    with pytest.raises(AttributeError):
        _ = _native.empty("int64", (4,)).__cuda_array_interface__
    with pytest.raises(BufferError):
        _native.empty("int64", (4,)).__dlpack__(dl_device=(2, 0))
