#!/usr/bin/env bash
# Builds Sotto with CUDA devices and runs, on a real one, the tests that otherwise run on emulated ones.
set -euo pipefail
# shellcheck source=integration/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../integration/common.sh"

usage() {
  cat <<'END'
usage: tests/gpu.sh [options]

Builds the preset cuda (needs the CUDA toolkit) and, if this machine has a CUDA device, runs on it: collectives, codecs and
optimizers through the C API, compared with the CPU bit for bit; the kernels, compared with the CPU's on the same inputs; streams and
devices; the conformance suites in the world "cuda"; two ranks over NCCL, on one device if there is only one; the benchmarks of
codec and Adam (rows 29 and 30), next to torch, apex and Transformer Engine where they are installed.
  --build-only     only build
  --arch LIST      CUDA architectures, as CMAKE_CUDA_ARCHITECTURES (native: this machine's)
  --no-bench       tests alone
  --n N            elements of the benchmarks (340000000: 11 GB of device memory)
  --json FILE      append the benchmarks' figures to this file, one JSON object per line
  --python PATH    Python with torch, for what the benchmarks are compared with (python3)
  -h, --help       this text
The exit code is 0 if everything passed, 77 if there is no CUDA device.
END
}

build_only=no arch='' bench=yes n=340000000 json='' python=python3
while [ $# -gt 0 ]; do
  case $1 in
    --build-only) build_only=yes ;;
    --arch)
      [ $# -ge 2 ] || usage_error "--arch needs a list"
      arch=$2 && shift ;;
    --no-bench) bench=no ;;
    --n | --json | --python)
      [ $# -ge 2 ] || usage_error "$1 needs a value"
      case $1 in
        --n) n=$2 ;;
        --json) json=$(realpath -m "$2") ;;
        *) python=$2 ;;
      esac
      shift ;;
    -h | --help) usage && exit 0 ;;
    *) usage_error "unknown option '$1'" ;;
  esac
  shift
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
configure=(--preset cuda)
[ -z "$arch" ] || configure+=("-DSOTTO_CUDA_ARCHITECTURES=$arch")
cmake "${configure[@]}"
cmake --build --preset cuda --target sotto sotto-cli sotto-test-cuda_device sotto-test-kernels_cuda sotto-test-cuda \
  sotto-test-conformance sotto-test-nccl_ranks sotto-perf-gpu sotto-run -j "$(cores)"
[ "$build_only" = no ] || exit 0

devices=$(build/cuda/bin/sotto info | sed -n 's/^other devices *//p')
say "$devices"
case $devices in
  cuda:*) ;;
  *)
    say "SKIPPED: nothing was run, since this machine has no CUDA device"
    exit 77
    ;;
esac
bin=build/cuda/bin
"$bin/sotto-test-cuda_device"
"$bin/sotto-test-kernels_cuda"
"$bin/sotto-test-cuda"
"$bin/sotto-test-conformance" --gtest_filter='*cuda*'

# The library at the path, or the one that the system finds; its version as NCCL counts.
nccl_version() {
  python3 - "$1" <<'END'
import ctypes, sys
version = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version))
print(version.value)
END
}

# Two ranks over NCCL give the bits that they give over TCP. On one device NCCL refuses two ranks of one host: since 2.30 a
# switch allows them, before that they say that they are on different hosts, and then talk through sockets.
nccl_ranks() {
  local library=${SOTTO_NCCL_LIBRARY:-} version
  local wheel=(.venv/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2)
  [ -n "$library" ] || { [ -e "${wheel[0]}" ] && library=$PWD/${wheel[0]}; } || library=libnccl.so.2
  if ! version=$(nccl_version "$library" 2>/dev/null); then
    say "SKIPPED: two ranks over NCCL, since $library cannot be opened (SOTTO_NCCL_LIBRARY)"
    return
  fi
  say "NCCL $version from $library"
  # shellcheck disable=SC2016  # the rank's shell knows its rank
  local rank='exec "$0"'
  local settings=(SOTTO_NCCL_LIBRARY="$library")
  if [ "$(grep -o 'cuda:' <<<"$devices" | wc -l)" -lt 2 ]; then
    if [ "$version" -ge 23000 ]; then
      settings+=(NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4)
    else
      settings+=(NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_MAX_CTAS=1)
      # shellcheck disable=SC2016
      rank='NCCL_HOSTID=rank$SOTTO_RANK exec "$0"'
    fi
  fi
  env "${settings[@]}" "$bin/sotto-run" -n 2 -- sh -c "$rank" "$bin/sotto-test-nccl_ranks"
}
nccl_ranks

[ "$bench" = yes ] || exit 0
lines=${json:-$(mktemp)}
"$bin/sotto-perf-gpu" --n "$n" --json "$lines"
"$python" -B tests/perf/peers_gpu.py --sotto-perf-gpu "$bin/sotto-perf-gpu" --n "$n" --json "$lines"
[ -n "$json" ] || rm -f "$lines"
