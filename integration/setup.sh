#!/usr/bin/env bash
# Installs what Sotto needs to be built, run and tested. The one place that lists packages.
set -euo pipefail
# shellcheck source=integration/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'END'
usage: integration/setup.sh [run|test|bench|tidy] [--dry-run] [-h|--help]

Installs missing Debian packages (needs root); a second run installs nothing.
  run        what the library, its tools and the quickstart need
  test       that, and what the tests need (default). From pip's index come, into the virtual environment .venv of this
             checkout, PyTorch's CPU build, JAX's, DeepSpeed, Ray and the trainers that the Python package is tested with (2.7 GB);
             where there are CUDA's headers but not NCCL's, also the wheel that has them (200 MB)
  bench      what run needs, and the libraries that sotto bench net compares with; of these torch comes from pip's index,
             into .venv too (several gigabytes where the index has only its CUDA build)
  tidy       what tests/run.sh --tidy needs
  --dry-run  only says what would be installed
Without root or apt it prints what to install by hand, and fails only if something is really missing.
What comes from pip's index is not needed: without it tests are left out, and counted as skipped. Where the index has no CPU
build of PyTorch, PIP_EXTRA_INDEX_URL may name one that has; or setup.sh bench installs the CUDA build.
END
}

# package | how to see, without a package database, that the thing is there
RUN_PACKAGES='
g++                | command g++
gcc                | command gcc
cmake              | cmake
ninja-build        | ninja
ccache             | command ccache
pkg-config         | command pkg-config
libhwy-dev         | header hwy/highway.h
libboost-dev       | header boost/asio/version.hpp
nlohmann-json3-dev | header nlohmann/json.hpp
libcli11-dev       | header CLI/CLI.hpp
libxxhash-dev      | header xxhash.h
libfmt-dev         | header fmt/format.h
libucx-dev         | header ucp/api/ucp.h
libopenblas-dev    | header cblas.h
python3            | command python3
python3-matplotlib | python matplotlib
python3-numpy      | python numpy
iproute2           | command tc
git                | command git
'
TEST_PACKAGES='
libgtest-dev       | header gtest/gtest.h
libgmock-dev       | header gmock/gmock.h
clang-14           | command clang-14
libclang-rt-14-dev | fuzzer
clang-format-14    | command clang-format-14
abigail-tools      | command abidiff
universal-ctags    | command ctags
shellcheck         | command shellcheck
cargo              | command cargo
libboost-context-dev | header boost/context/detail/fcontext.hpp
python3-pytest     | python pytest
python3-yaml       | python yaml
dpkg-dev           | command dpkg-shlibdeps
openmpi-bin        | command mpiexec.openmpi
mpich              | command mpiexec.mpich
python3-venv       | python ensurepip
'

BENCH_PACKAGES='
openmpi-bin        | command mpiexec.openmpi
libopenmpi-dev     | command mpicc.openmpi
mpich              | command mpiexec.mpich
libmpich-dev       | command mpicc.mpich
python3-venv       | python ensurepip
'
# The tests' sources are in the list of compile commands too.
TIDY_PACKAGES=$TEST_PACKAGES'clang-tidy-14      | command clang-tidy-14
'
TORCH=torch==2.13.0
TORCH_CPU=$TORCH+cpu
# What the Python package is tested with besides: the framework whose programs it runs, and trainers that keep its state.
FRAMEWORKS=(deepspeed==0.18.9 transformers==5.23.0 accelerate==1.15.0 lightning==2.6.6)
TORCHFT=torchft==0.2.0  # its DiLoCo is compared with outer steps
JAX="jax[cpu]==0.10.2"  # 500 MB with what it needs, half a minute from a near index
# Ray Train: 500 MB with what it needs, a quarter of a minute from a near index. Of ray[train] not tensorboardX: Ray
# Train does not import it, and Lightning would log with it.
RAY=(ray==2.60.0 pandas==3.1.1 pyarrow==26.0.1)
# Tools of tests: types, style, the report of training runs, progress bars of compared programs, wheels.
PYTHON_TOOLS=(mypy==2.4.1 ruff==0.17.6 matplotlib==3.11.2 tqdm==4.70.1 scikit-build-core==1.1.2)
PYTEST=pytest==9.2.0  # the tests that need torch run with it (bindings/run_pytest.py)
NUMPY=numpy==2.2.6  # packs bits for the peer of row 15 (sotto bench net)
NCCL=nvidia-nccl-cu13==2.28.9  # its header alone is used, by the NCCL transport and the tests of it
VENV=$SOTTO_ROOT/.venv

# Sbin directories are where ip and tc live, and are not on every user's PATH.
PATH=$PATH:/usr/sbin:/sbin

# probe KIND [NAME]: is it installed, by any means?
probe() {
  case $1 in
    command) command -v "$2" >/dev/null 2>&1 ;;
    header) printf '#include <%s>\n' "$2" | g++ -std=c++20 -M -x c++ - >/dev/null 2>&1 ;;
    python) /usr/bin/python3 -c "import $2" >/dev/null 2>&1 || python3 -c "import $2" >/dev/null 2>&1 ;;
    cmake) find_cmake >/dev/null ;;
    ninja) find_ninja >/dev/null ;;
    fuzzer) printf 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n' |
      clang++-14 -fsanitize=fuzzer -x c++ - -o /dev/null >/dev/null 2>&1 ;;
  esac
}

installed_by_dpkg() {
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# missing_packages LIST CHECK: CHECK is dpkg (what apt would install) or probe (what is really not there).
missing_packages() {
  local package how
  while IFS='|' read -r package how; do
    package=${package// /}
    [ -n "$package" ] || continue
    if command -v dpkg-query >/dev/null 2>&1 && installed_by_dpkg "$package"; then continue; fi
    # shellcheck disable=SC2086  # KIND and NAME are two words
    if [ "$2" = probe ] && probe $how; then continue; fi
    printf '%s\n' "$package"
  done <<<"$1"
}

can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }

why_not_install() {
  if ! command -v apt-get >/dev/null 2>&1; then echo "there is no apt here"; else echo "this is not root"; fi
}

# An index that knows every package spares the slow apt-get update.
index_knows() {
  local package
  for package in "$@"; do
    apt-cache show --no-all-versions "$package" >/dev/null 2>&1 || return 1
  done
}

apt_install() {
  local -a options=(-y -q -o DPkg::Lock::Timeout=300 --no-install-recommends)
  export DEBIAN_FRONTEND=noninteractive
  if index_knows "$@" && apt-get install "${options[@]}" "$@"; then return 0; fi
  say "setup: refreshing the package index"
  apt-get update -q
  apt-get install "${options[@]}" "$@"
}

# by_hand PACKAGE...: for those who cannot install from here.
by_hand() {
  say "setup: cannot install ($(why_not_install)). On Debian 12 or later, as root:"
  say "    apt-get install $*"
  say "Elsewhere install what these packages hold (compiler, cmake >= 3.25, ninja, headers, Python modules)."
}

parse() {
  group=test dry_run=no
  local argument
  for argument in "$@"; do
    case $argument in
      run | test | bench | tidy) group=$argument ;;
      --dry-run) dry_run=yes ;;
      -h | --help) usage && exit 0 ;;
      *) usage_error "unknown argument '$argument'" ;;
    esac
  done
}

# Of the Julia package's tests. Debian 11 has one, Debian 12 has none.
install_julia() {
  if command -v julia >/dev/null 2>&1 || ! index_knows julia; then return 0; fi
  say "setup: julia to install"
  if [ "$dry_run" = yes ] || ! can_install || apt_install julia; then return 0; fi
  say "setup: julia cannot be installed; its tests are left out, and counted as skipped"
}

has_torch() { [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c 'import numpy, pytest, torch' >/dev/null 2>&1; }

install_torch() {
  if has_torch; then return 0; fi
  say "setup: $TORCH, $NUMPY and $PYTEST to install from pip's index into .venv"
  [ "$dry_run" = no ] || return 0
  make_venv || die "no Python here can make a virtual environment"
  "$VENV/bin/pip" install -q "$TORCH" "$NUMPY" "$PYTEST"
  has_torch || die "torch, numpy or pytest cannot be imported after the installation"
}

has_frameworks() {
  has_torch && "$VENV/bin/python" -c 'import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, ("deepspeed", "jax", "ray", "torchft", "pandas", "pyarrow", "transformers", "accelerate", "lightning", "mypy", "ruff", "matplotlib", "tqdm", "scikit_build_core"))))'
}

# What the tests of the Python package want. Only PyTorch's CPU build: the other one has gigabytes that no test uses.
install_frameworks() {
  if has_frameworks; then return 0; fi
  say "setup: $TORCH_CPU, $JAX, ${FRAMEWORKS[*]}, $TORCHFT, ${RAY[*]}, ${PYTHON_TOOLS[*]} to install from pip's index into .venv (two to ten minutes)"
  [ "$dry_run" = no ] || return 0
  local why="tests that need what is missing are left out, and counted as skipped"
  make_venv || { say "setup: $why" && return 0; }
  if ! has_torch && ! pip_install "$TORCH_CPU" "$NUMPY" "$PYTEST"; then
    say "setup: PyTorch's CPU build cannot be installed (setup.sh --help says what helps); $why"
    return 0
  fi
  # DeepSpeed's own set-up imports torch.
  pip_install "${FRAMEWORKS[@]}" "$NUMPY" || say "setup: ${FRAMEWORKS[*]} cannot be installed; $why"
  pip_install "$TORCHFT" "$NUMPY" || say "setup: $TORCHFT cannot be installed; $why"
  pip_install "$JAX" "$NUMPY" || say "setup: $JAX cannot be installed; $why"
  pip_install "${RAY[@]}" "$NUMPY" || say "setup: ${RAY[*]} cannot be installed; $why"
  pip_install "${PYTHON_TOOLS[@]}" || say "setup: ${PYTHON_TOOLS[*]} cannot be installed; $why"
}

# DeepSpeed is only found, not built: none of its own operators is used.
pip_install() { DS_BUILD_OPS=0 "$VENV/bin/pip" install -q --disable-pip-version-check "$@"; }

has_cuda_headers() {
  local place
  for place in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda /usr; do
    [ -n "$place" ] && [ -f "$place/include/cuda_runtime_api.h" ] && return 0
  done
  command -v nvcc >/dev/null 2>&1
}

has_nccl_header() {
  local place
  for place in "$VENV"/lib/python3*/site-packages/nvidia/nccl/include /usr/include /usr/local/cuda/include; do
    [ -f "$place/nccl.h" ] && return 0
  done
  return 1
}

install_nccl_header() {
  if ! has_cuda_headers || has_nccl_header; then return 0; fi
  say "setup: $NCCL to install from PyPI into .venv"
  [ "$dry_run" = no ] || return 0
  make_venv || { say "setup: the tests of the NCCL transport are left out" && return 0; }
  if pip_install --no-deps "$NCCL"; then return 0; fi
  say "setup: $NCCL cannot be installed; the tests of the NCCL transport are left out"
}

make_venv() {
  [ ! -x "$VENV/bin/pip" ] || return 0
  local python
  for python in /usr/bin/python3 python3; do
    if "$python" -c 'import ensurepip' >/dev/null 2>&1 && "$python" -m venv "$VENV"; then return 0; fi
  done
  say "setup: no Python here can make a virtual environment"
  return 1
}

main() {
  parse "$@"
  install_packages
  [ "$group" != test ] || install_julia
  [ "$group" = run ] || install_nccl_header
  [ "$group" != bench ] || install_torch
  [ "$group" != test ] || install_frameworks
}

install_packages() {
  local list=$RUN_PACKAGES
  [ "$group" != test ] || list+=$TEST_PACKAGES
  [ "$group" != bench ] || list+=$BENCH_PACKAGES
  [ "$group" != tidy ] || list+=$TIDY_PACKAGES
  local -a missing
  mapfile -t missing < <(missing_packages "$list" dpkg)
  if [ ${#missing[@]} -gt 0 ] && ! can_install; then
    mapfile -t missing < <(missing_packages "$list" probe)
    [ ${#missing[@]} -eq 0 ] || { by_hand "${missing[@]}" && exit 1; }
  fi
  if [ ${#missing[@]} -eq 0 ]; then
    say "setup: all Debian packages for '$group' are installed"
    return
  fi
  say "setup: ${#missing[@]} Debian packages to install (one to six minutes, as the network is): ${missing[*]}"
  [ "$dry_run" = no ] || return 0
  apt_install "${missing[@]}"
  mapfile -t missing < <(missing_packages "$list" dpkg)
  [ ${#missing[@]} -eq 0 ] || die "still missing after the installation: ${missing[*]}"
  say "setup: done"
}

main "$@"
