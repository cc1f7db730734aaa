#!/bin/sh
# What this machine's GPUs are and what they can do at most, in under two minutes. Needs the program
# (the first argument, else target/release/deep-ep) and NVRTC, but neither Rust nor a CUDA toolkit.
# JSON goes to the folder $OUT, if it is set, else to the current one.
set -u
program=${1:-target/release/deep-ep}
out=${OUT:-.}
"$program" doctor || exit
"$program" doctor --json >"$out/doctor.json" || exit
echo
DEEP_EP_LOG=${DEEP_EP_LOG:-deep_ep=debug} "$program" bench --limit --json "$out/limit.json"
