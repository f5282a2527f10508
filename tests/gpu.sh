#!/usr/bin/env bash
# Builds Sotto with CUDA devices and runs, on a real one, the tests that otherwise run on emulated ones.
set -euo pipefail
# shellcheck source=integration/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../integration/common.sh"

usage() {
  cat <<'END'
usage: tests/gpu.sh [options]

Builds the preset cuda (needs the CUDA toolkit) and, if this machine has a CUDA device, runs on it: collectives, codecs and
optimizers through the C API, compared with the CPU bit for bit; streams and devices; the conformance suites in the world "cuda".
  --build-only     only build
  --arch LIST      CUDA architectures, as CMAKE_CUDA_ARCHITECTURES (native: this machine's)
  -h, --help       this text
The exit code is 0 if everything passed, 77 if there is no CUDA device.
END
}

build_only=no arch=''
while [ $# -gt 0 ]; do
  case $1 in
    --build-only) build_only=yes ;;
    --arch)
      [ $# -ge 2 ] || usage_error "--arch needs a list"
      arch=$2 && shift ;;
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
  sotto-test-conformance -j "$(cores)"
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
build/cuda/bin/sotto-test-cuda_device
build/cuda/bin/sotto-test-kernels_cuda
build/cuda/bin/sotto-test-cuda
build/cuda/bin/sotto-test-conformance --gtest_filter='*cuda*'
