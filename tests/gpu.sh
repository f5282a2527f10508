#!/usr/bin/env bash
# Builds Sotto with CUDA devices and runs, on a real one, the tests that otherwise run on emulated ones.
set -euo pipefail
# shellcheck source=integration/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../integration/common.sh"

usage() {
  cat <<'END'
usage: tests/gpu.sh [options]

Builds the preset cuda and, if this machine has a CUDA device, runs on it: collectives, codecs and optimizers through the C API,
compared with the CPU bit for bit; the kernels, compared with the CPU's on the same inputs; streams and devices; the conformance
suites in the world "cuda"; two ranks over NCCL, on one device if there is only one; the Python package on tensors of torch, where
that sees the device; the benchmarks of codec and Adam (rows 29 and 30), next to torch, apex and Transformer Engine where they are
installed. What fails or takes too long hides nothing: the rest runs, and the last lines say what failed.
Needs the CUDA toolkit (nvcc in PATH or CUDACXX) and what integration/setup.sh installs, nccl.h among it.
  --build-only     only build
  --arch LIST      CUDA architectures, as CMAKE_CUDA_ARCHITECTURES (native: this machine's)
  --no-bench       tests alone
  --n N            elements of the benchmarks (340000000: 11 GB of device memory)
  --json FILE      append the benchmarks' figures to this file, one JSON object per line
  --python PATH    Python with torch, numpy and pytest, for the tests of the Python package, and for what the benchmarks
                   are compared with (python3; integration/setup.sh bench installs one as .venv/bin/python)
  -h, --help       this text
Two ranks use the NCCL that the variable SOTTO_NCCL_LIBRARY names, the one in .venv, or the system's.
The exit code is 0 if everything passed, 77 if there is no CUDA device.
END
}

# from_here PATH_OR_NAME: a path as one that holds after a change of the folder; links (of virtual environments) stay.
from_here() {
  case $1 in
    */*) realpath -ms "$1" ;;
    *) printf '%s\n' "$1" ;;
  esac
}

parse() {
  build_only=no arch='' bench=yes n=340000000 json='' python=python3
  nccl=$(from_here "${SOTTO_NCCL_LIBRARY:-}")
  while [ $# -gt 0 ]; do
    case $1 in
      --build-only) build_only=yes ;;
      --no-bench) bench=no ;;
      --arch | --n | --json | --python)
        [ $# -ge 2 ] || usage_error "$1 needs a value"
        case $1 in
          --arch) arch=$2 ;;
          --n) n=$2 ;;
          --json) json=$(realpath -m "$2") ;;
          *) python=$(from_here "$2") ;;
        esac
        shift ;;
      -h | --help) usage && exit 0 ;;
      *) usage_error "unknown option '$1'" ;;
    esac
    shift
  done
}

build() {
  local cmake ninja
  cmake=$(find_cmake) || die "no working cmake >= 3.25: run integration/setup.sh"
  ninja=$(find_ninja) || die "no working ninja: run integration/setup.sh"
  local -a configure=(--preset cuda "-DCMAKE_MAKE_PROGRAM=$ninja")
  [ -z "$arch" ] || configure+=("-DSOTTO_CUDA_ARCHITECTURES=$arch")
  "$cmake" "${configure[@]}" || die "configuring failed: integration/setup.sh installs what is missing, but the CUDA toolkit"
  "$cmake" --build --preset cuda --target sotto sotto-cli sotto-test-cuda_device sotto-test-kernels_cuda sotto-test-cuda \
    sotto-test-conformance sotto-test-nccl_ranks sotto-perf-gpu sotto-run -j "$(cores)" || die "building failed"
}

passed=() failed=() skipped=()

# suite NAME MINUTES COMMAND...: whatever it ends with is counted, and the next one runs. Exit code 77: it had nothing to do.
suite() {
  local name=$1 minutes=$2 code=0
  shift 2
  say "== $name ($(elapsed))"
  timeout --kill-after=30 "${minutes}m" "$@" || code=$?
  case $code in
    0) passed+=("$name") ;;
    77) skipped+=("$name") ;;
    124) failed+=("$name: ended after $minutes minutes") ;;
    137) failed+=("$name: killed, after $minutes minutes or for its memory") ;;
    *) failed+=("$name: exit code $code") ;;
  esac
}

# skip NAME REASON
skip() {
  say "SKIPPED: $1, since $2"
  skipped+=("$1")
}

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
  local library=$nccl version name="two ranks over NCCL"
  local wheel=(.venv/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2)
  [ -n "$library" ] || { [ -e "${wheel[0]}" ] && library=$PWD/${wheel[0]}; } || library=libnccl.so.2
  if ! version=$(nccl_version "$library" 2>/dev/null); then
    skip "$name" "$library cannot be opened (SOTTO_NCCL_LIBRARY)"
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
  suite "$name" 10 env "${settings[@]}" "$bin/sotto-run" -n 2 -- sh -c "$rank" "$bin/sotto-test-nccl_ranks"
}

# Why the Python package cannot be tested on the device; nothing if it can.
why_no_python() {
  "$python" - <<'END' || say "$python cannot be run"
import importlib

def reason():
    for name in ("numpy", "pytest", "torch"):
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"{name} cannot be imported: {error}"
    import torch
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"

print(reason())
END
}

python_package() {
  local reason name="the Python package"
  reason=$(why_no_python)
  if [ -n "$reason" ]; then
    skip "$name" "$reason"
    return
  fi
  suite "$name" 20 env SOTTO_LIBRARY="$PWD/build/cuda/lib/libsotto.so" PYTHON_TESTS_SOTTO_RUN="$PWD/$bin/sotto-run" \
    "$python" -B -m pytest -p no:cacheprovider -rs -k on_a_gpu bindings/python/tests/test_cuda.py
}

benchmarks() {
  local lines=$json
  [ -n "$lines" ] || lines=$(mktemp)
  suite "benchmarks" 30 "$bin/sotto-perf-gpu" --n "$n" --json "$lines"
  suite "benchmarks next to other libraries" 60 \
    "$python" -B tests/perf/peers_gpu.py --sotto-perf-gpu "$bin/sotto-perf-gpu" --n "$n" --json "$lines"
  [ -n "$json" ] || rm -f "$lines"
}

summary() {
  local name
  say "== summary ($(elapsed))"
  for name in "${skipped[@]}"; do say "skipped: $name"; done
  for name in "${failed[@]}"; do say "FAILED: $name"; done
  say "${#passed[@]} suites passed, ${#failed[@]} failed, ${#skipped[@]} skipped"
  [ ${#failed[@]} -eq 0 ]
}

main() {
  parse "$@"
  cd "$SOTTO_ROOT"
  build
  [ "$build_only" = no ] || exit 0
  bin=build/cuda/bin
  devices=$("$bin/sotto" info | sed -n 's/^other devices *//p') || die "$bin/sotto info failed"
  say "$devices"
  case $devices in
    cuda:*) ;;
    *)
      say "SKIPPED: nothing was run, since this machine has no CUDA device"
      exit 77
      ;;
  esac
  suite "the CUDA device" 10 "$bin/sotto-test-cuda_device"
  suite "kernels" 30 "$bin/sotto-test-kernels_cuda"
  suite "the C API" 30 "$bin/sotto-test-cuda"
  suite "conformance" 60 "$bin/sotto-test-conformance" --gtest_filter='*cuda*'
  nccl_ranks
  python_package
  [ "$bench" = no ] || benchmarks
  summary
}

main "$@"
