#!/usr/bin/env bash
# Tests and measures the CUDA engine on this machine. Needs what `cargo xtask dist` puts beside this
# script, GPUs, their driver and NVRTC, but no Rust. See --help.
set -uo pipefail

usage() {
    cat <<'END'
usage: gpu-test [options]

Runs every test of the CUDA engine in a process of its own, then the benchmarks, and prints a summary.
Exit status: 0 if everything that ran passed, 1 if not, 2 if the options make no sense.

  --quick          leave out the random cases, the large ones and most benchmarks; shorter limits
  --only PATTERN   only what matches this extended regular expression; names are as --list prints them
  --sanitize       also compute-sanitizer: memcheck, racecheck and initcheck of small calls of every kind,
                   and of a kernel with a planted fault, which each must find
  --limit SECONDS  time limit of a test (300; with --quick 60)
  --out FOLDER     where everything is written (results/<date> beside this script)
  --list           print the names of what would run
  --help           print this

DEEP_EP_TIMEOUT_SECS (20), DEEP_EP_CACHE_DIR (cache beside this script), DEEP_EP_NVRTC and
COMPUTE_SANITIZER (the tool's file) are used as they are set.
END
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
quick='' sanitize='' list='' only=. limit='' out=''

fail_usage() {
    echo "gpu-test: $1 (--help says what there is)" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
    --only | --limit | --out) [ $# -ge 2 ] || fail_usage "$1 needs a value" ;;
    esac
    case $1 in
    --quick) quick=1 ;;
    --sanitize) sanitize=1 ;;
    --list) list=1 ;;
    --only) only=$2 && shift ;;
    --limit) limit=$2 && shift ;;
    --out) out=$2 && shift ;;
    --help) usage && exit 0 ;;
    *) fail_usage "there is no option $1" ;;
    esac
    shift
done

if [ -z "$limit" ]; then
    limit=300
    [ -z "$quick" ] || limit=60
fi
[[ $limit =~ ^[1-9][0-9]*$ ]] || fail_usage "--limit is $limit, but it must be a number of seconds"
grep -E -e "$only" </dev/null >/dev/null 2>&1
[ $? -le 1 ] || fail_usage "--only is $only, which is not a regular expression"

export CUDA_DEVICE_MAX_CONNECTIONS=32 DEEP_EP_ENGINE=cuda RUST_BACKTRACE=0
export DEEP_EP_TIMEOUT_SECS=${DEEP_EP_TIMEOUT_SECS:-20}
export DEEP_EP_CACHE_DIR=${DEEP_EP_CACHE_DIR:-$here/cache}

# Names of a suite's tests, without those that others start as their child processes, which do nothing
# when they are run alone.
tests_of() { # suite pattern
    "$here/$1" --list 2>/dev/null | sed -n 's/: test$//p' | sort >"$scratch/all"
    "$here/$1" --list --ignored 2>/dev/null | sed -n 's/: test$//p' | sort >"$scratch/ignored"
    comm -23 "$scratch/all" "$scratch/ignored" | grep -vE '::(child|child_entry|entry)$' |
        grep -E -e "$2" | sed "s/^/$1::/"
}

# Cases for compute-sanitizer. They are slow there, and kernels must not wait for each other. All ranks
# are threads and share one GPU.
sanitized=(
    named::sanitized::
    named::masks::calls_are_made_without_a_masked_rank
)

# Tests of planted faults are ignored elsewhere; each tool's own fault, and what it says of it.
planted=engine::cuda::gpu_tests::planted
declare -A fault_of=([memcheck]=out_of_bounds [racecheck]=race [initcheck]=uninitialised)
declare -A report_of=(
    [memcheck]='Invalid __global__ write'
    [racecheck]='Race reported between|RACECHECK SUMMARY: [1-9]'
    [initcheck]='Uninitialized __global__ memory read'
)
# What the tool ends with if it has found something.
found_status=9

# Benchmarks, as docs/measurements.md lists them: a name, then options of `deep-ep bench`.
benchmarks=(
    "verified           --engine cuda --iters 1 --sms 24 --tokens 4096"
    "limit              --limit"
    "bf16_4096          --engine cuda --no-verify --iters 7 --sms 24,16,8,64 --tokens 4096"
    "bf16_4096_caller   --engine cuda --no-verify --iters 7 --sms 24 --tokens 4096 --outputs caller"
    "bf16_4096_exact    --engine cuda --no-verify --iters 7 --sms 24 --tokens 4096 --counts exact"
    "fp8_4096           --engine cuda --no-verify --iters 7 --sms 24 --tokens 4096 --dtype fp8"
    "fp8_4096_caller    --engine cuda --no-verify --iters 7 --sms 24 --tokens 4096 --dtype fp8 --outputs caller"
    "bf16_128           --engine cuda --no-verify --iters 7 --sms 24 --tokens 128"
    "low_latency_128    --engine cuda --no-verify --iters 7 --mode low-latency --dtype fp8 --tokens 128 --experts 288"
)
quick_benchmarks='^(bf16_4096|low_latency_128)$'

everything() {
    tests_of unit gpu
    tests_of cuda .
    tests_of conformance .
    tests_of failure .
    if [ -n "$sanitize" ]; then
        local tool case
        for tool in memcheck racecheck initcheck; do
            for case in "${sanitized[@]}"; do
                tests_of conformance "^$case" | sed "s/^conformance/$tool/"
            done
            # Nothing is found where nothing is, and the fault where it is.
            printf '%s\n' "$tool::planted::nothing" "$tool::planted::${fault_of[$tool]}"
        done
    fi
    printf 'bench::%s\n' "${benchmarks[@]%% *}"
}

wanted() {
    everything | grep -E -e "$only" | while read -r name; do
        if [ -n "$quick" ]; then
            case $name in
            *::properties::* | *::large::*) continue ;;
            bench::*) [[ ${name#bench::} =~ $quick_benchmarks ]] || continue ;;
            esac
        fi
        echo "$name"
    done
}

sanitizer() {
    if [ -n "${COMPUTE_SANITIZER:-}" ]; then
        echo "$COMPUTE_SANITIZER"
    else
        command -v compute-sanitizer ||
            ls {/usr/local,/opt}/cuda*/{bin,compute-sanitizer}/compute-sanitizer \
                /usr/lib/nvidia-cuda-toolkit/compute-sanitizer/compute-sanitizer \
                /opt/nvidia/*/{,*/}compute-sanitizer 2>/dev/null | head -n 1
    fi
}

options_of() { # benchmark
    printf '%s\n' "${benchmarks[@]}" | sed -n "s/^$1  *//p"
}

# Runs a test under a tool, on one GPU.
sanitize() { # tool test
    local options=(--tool "$1" --target-processes all --error-exitcode "$found_status")
    # Every answer of the driver is looked at by the library, and some it expects to be refusals.
    [ "$1" != memcheck ] || options+=(--report-api-errors no)
    local program=(conformance --exact "$2")
    [[ $2 != planted::* ]] || program=(unit --exact "$planted::${2#planted::}" --ignored)
    local gpus=${CUDA_VISIBLE_DEVICES:-0}
    CUDA_VISIBLE_DEVICES=${gpus%%,*} DEEP_EP_TIMEOUT_SECS=120 DEEP_EP_SPLIT_LAUNCHES=1 \
        timeout -k 5 "$((4 * limit))" "$tool" "${options[@]}" \
        "$here/${program[0]}" "${program[@]:1}" --test-threads=1 --nocapture
}

# Whether a tool was to find a fault.
is_fault() { # name
    [[ $1 == *::planted::* && $1 != *::planted::nothing ]]
}

# Runs one item; its output goes to the file.
run() { # name file
    local suite=${1%%::*} test=${1#*::} words
    case $suite in
    bench)
        read -r -a words <<<"$(options_of "$test")"
        timeout -k 5 "$limit" "$here/deep-ep" bench "${words[@]}" --json "${2%.txt}.json"
        ;;
    memcheck | racecheck | initcheck)
        sanitize "$suite" "$test"
        ;;
    *)
        timeout -k 5 "$limit" "$here/$suite" --exact "$test" --test-threads=1 --nocapture
        ;;
    esac >"$2" 2>&1 </dev/null
}

# What a failure says first: lines that explain it.
excerpt() { # file
    grep -vE '^$|RUST_BACKTRACE|^running 1|^failures:|^test result' "$1" | cut -c1-300 | tail -n 4 | sed 's/^/       /'
}

scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
wanted >"$scratch/wanted"
if [ ! -s "$scratch/wanted" ]; then
    fail_usage "nothing is named like $only"
fi
if [ -n "$list" ]; then
    cat "$scratch/wanted"
    exit 0
fi

tool=''
if [ -n "$sanitize" ]; then
    tool=$(sanitizer)
    [ -x "$tool" ] || fail_usage "compute-sanitizer is not here; set COMPUTE_SANITIZER to its file"
fi
out=${out:-$here/results/$(date +%Y%m%d-%H%M%S)}
mkdir -p "$out" || exit 1

{
    date
    uname -a
    nvidia-smi -L
    nvidia-smi topo -m
    "$here/deep-ep" doctor
} >"$out/machine.txt" 2>&1
"$here/deep-ep" doctor --json >"$out/doctor.json" 2>&1

# Without a GPU or a compiler nothing works. The benchmarks' kernels are compiled on the way.
if ! "$here/deep-ep" warmup --hidden 7168 --experts 288 --top-k 8 --ranks 2 >"$out/warmup.txt" 2>&1; then
    tail -n 3 "$out/warmup.txt" >&2
    echo "gpu-test: the CUDA engine cannot be used here" >&2
    exit 1
fi
tail -n 2 "$out/warmup.txt"

passed=0 left_out=() failed=() found=()
total=$(wc -l <"$scratch/wanted")
number=0
while read -r name <&3; do
    number=$((number + 1))
    file=$out/${name//::/.}.txt
    start=$(date +%s%N)
    run "$name" "$file"
    status=$?
    took=$((($(date +%s%N) - start) / 1000000))
    verdict=passed
    if is_fault "$name"; then
        # The tool's report is what is tested.
        if [ $status -eq $found_status ] && grep -qE "${report_of[${name%%::*}]}" "$file"; then
            found+=("${name%%::*} ${name##*::}")
            status=0
        elif [ $status -eq 0 ] || [ $status -eq $found_status ]; then
            status=fault
        fi
    fi
    if [ $status = fault ]; then
        verdict='fault not found'
    elif [ $status -eq 124 ] || [ $status -eq 137 ]; then
        verdict='out of time'
    elif [ $status -ne 0 ]; then
        verdict="failed ($status)"
    elif [[ $name != bench::* ]] && grep -qE '(^|\.\.\. )(no GPU: skipped|left out: )' "$file"; then
        verdict='left out'
    elif [[ $name != bench::* ]] && ! is_fault "$name" && ! grep -q '^test result: ok. 1 passed' "$file"; then
        verdict='did not run'
    fi
    printf '[%d/%d] %-12s %7d ms  %s\n' "$number" "$total" "$verdict" "$took" "$name" | tee -a "$out/tests.txt"
    case $verdict in
    passed) passed=$((passed + 1)) ;;
    'left out') left_out+=("$name") ;;
    *)
        failed+=("$name: $verdict")
        excerpt "$file"
        ;;
    esac
done 3<"$scratch/wanted"

summary() {
    local name
    echo
    for name in "${benchmarks[@]%% *}"; do
        if [ -s "$out/bench.$name.txt" ]; then
            echo "=== deep-ep bench $(options_of "$name")"
            cat "$out/bench.$name.txt"
            echo
        fi
    done
    echo "=== $passed passed, ${#failed[@]} failed, ${#left_out[@]} left out"
    [ ${#found[@]} -eq 0 ] || printf 'planted fault found: %s\n' "${found[@]}"
    [ ${#left_out[@]} -eq 0 ] || printf 'left out: %s\n' "${left_out[@]}"
    [ ${#failed[@]} -eq 0 ] || printf 'failed: %s\n' "${failed[@]}"
    echo "results: $out"
}
summary | tee "$out/summary.txt"
[ ${#failed[@]} -eq 0 ] && [ "$passed" -gt 0 ]
