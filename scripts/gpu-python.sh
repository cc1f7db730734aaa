#!/usr/bin/env bash
# Tests and measures the Python package with torch's tensors on this machine's GPUs. See --help.
set -uo pipefail

usage() {
    cat <<'EOF'
usage: gpu-python.sh WHEEL_FOLDER [OUT_FOLDER]

Needs python3 with torch and numpy, GPUs and NVRTC, but no network and no Rust. WHEEL_FOLDER has the wheel
of deep-ep-rs (cargo xtask wheel), and those of pytest, iniconfig, pluggy, packaging, pygments and ml_dtypes
as far as python3 lacks them. They are unpacked into a folder that only this script uses.

Runs a first look, the tests with --engine cuda, the scripts in tests/, the host's time of each call and the
example, each under a limit and all within 9 minutes, and prints what failed and a summary. Whole outputs
are in OUT_FOLDER (default: a new folder under /tmp). Exit status: 0 if everything passed.

DEEP_EP_TIMEOUT_SECS (20), DEEP_EP_CACHE_DIR (in OUT_FOLDER) and PYTHON (python3) are used as they are set;
ONLY is a regular expression of stages to run.
EOF
}

case ${1:-} in
'' | -h | --help)
    usage
    [ $# -gt 0 ]
    exit
    ;;
esac
wheels=$(cd "$1" && pwd) || exit 2
out=${2:-$(mktemp -d /tmp/gpu-python.XXXXXX)}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
python=${PYTHON:-python3}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
deadline=530 failed=()

export CUDA_DEVICE_MAX_CONNECTIONS=32 DEEP_EP_ENGINE=cuda PYTHONFAULTHANDLER=1
export DEEP_EP_TIMEOUT_SECS=${DEEP_EP_TIMEOUT_SECS:-20} DEEP_EP_CACHE_DIR=${DEEP_EP_CACHE_DIR:-$out/cache}
export PYTHONPATH=$out/site PYTHONDONTWRITEBYTECODE=1

install() {
    "$python" -m pip install --quiet --no-index --no-deps --no-warn-script-location --target "$out/site" \
        "$wheels"/*.whl 2>"$out/pip.txt" && return
    # Without pip: a wheel is an archive of what belongs there.
    local wheel
    for wheel in "$wheels"/*.whl; do
        "$python" -m zipfile -e "$wheel" "$out/site" || return
    done
}

# Runs a stage; prints at most so many of the last lines that match.
stage() { # name seconds lines pattern command...
    local name=$1 limit=$2 lines=$3 pattern=$4 began=$SECONDS status verdict
    shift 4
    [[ $name =~ ${ONLY:-.} ]] || return 0
    local left=$((deadline - SECONDS))
    if [ "$left" -lt 10 ]; then
        failed+=("$name: no time left")
        return
    fi
    [ "$limit" -le "$left" ] || limit=$left
    # Ctrl-C first: pytest then says how far it came.
    timeout -s INT -k 5 "$limit" "$@" >"$out/$name.txt" 2>&1 </dev/null
    status=$?
    case $status in
    0) verdict=passed ;;
    124 | 137) verdict="out of time ($limit s)" ;;
    *) verdict="failed ($status)" ;;
    esac
    echo "=== $name: $verdict, $((SECONDS - began)) s"
    grep -aE "$pattern" "$out/$name.txt" | tail -n "$lines" | cut -c1-170
    if [ $status -ne 0 ]; then
        failed+=("$name: $verdict")
        grep -aE '^(E  |[A-Za-z_.]*(Error|Exception|Timeout|Aborted|PeerLost)\b)' "$out/$name.txt" |
            sort | uniq -c | sort -rn | head -n 5 | cut -c1-200
    fi
}

tests() { # name seconds arguments...
    local name=$1 limit=$2
    shift 2
    stage "$name" "$limit" 16 '^(FAILED|ERROR)|^[0-9.]+s call|passed|failed|skipped|no tests ran' \
        "$python" -m pytest -q -p no:cacheprovider --durations=3 --tb=short -rfE "$@" --engine=cuda
}

script() { # name seconds options...
    local name=$1 limit=$2
    shift 2
    stage "$name" "$limit" 9 '.' "$python" "tests/${name%%-*}.py" --engine cuda "$@"
}

if ! install; then
    cat "$out/pip.txt"
    echo "gpu-python: the wheels in $wheels cannot be unpacked"
    exit 1
fi
"$python" - <<'EOF'
import importlib.util, torch, deep_ep
missing = [n for n in ("pytest", "ml_dtypes", "numpy") if importlib.util.find_spec(n) is None]
print("torch", torch.__version__, "CUDA", torch.version.cuda, "deep_ep", deep_ep.__version__, "missing:", missing)
print([torch.cuda.get_device_name(d) for d in range(torch.cuda.device_count())])
EOF

stage look-1 60 12 . "$python" scripts/gpu-python-look.py 1
stage look-2 60 12 . "$python" scripts/gpu-python-look.py 2
tests cuda 130 -k 'torch-cuda or not torch' python/tests/test_cuda.py
tests kit 150 -k torch-cuda python/tests --ignore python/tests/test_cuda.py
stage host_overhead 30 14 . "$python" tests/host_overhead.py --engine cuda
small=(--num-processes 2 --num-tokens 64 --hidden 512 --num-experts 16 --repeats 5)
high=(--num-processes 1 --num-tokens 4096 --hidden 7168 --repeats 10)
low=(--num-processes 1 --num-tokens 128 --hidden 7168 --repeats 20)
script test_intranode-small 40 "${small[@]}"
script test_low_latency-small 40 "${small[@]}"
script test_inference-small 40 "${small[@]}"
script test_fp8-small 40 "${small[@]}"
script test_intranode-large 60 "${high[@]}"
script test_low_latency-large 60 "${low[@]}"
script test_inference-large 40 "${low[@]}"
script test_fp8-large 50 "${low[@]}"
stage train_moe 40 3 . "$python" examples/train_moe.py --steps 5 --device cuda
# Host tensors on the CUDA engine, with what is left.
tests host_tensors 100 -k '(numpy or torch) and not torch-cuda' python/tests/test_high_throughput.py \
    python/tests/test_low_latency.py

echo "=== ${#failed[@]} stages failed, $SECONDS s, outputs in $out"
[ ${#failed[@]} -eq 0 ] || printf '%s\n' "${failed[@]}"
[ ${#failed[@]} -eq 0 ]
