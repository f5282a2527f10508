#!/usr/bin/env bash
# Builds Sotto with CUDA devices, into a folder that other machines can take, and runs on a real device the tests that otherwise
# run on emulated ones.
set -euo pipefail
# shellcheck source=integration/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../integration/common.sh"

programs=(sotto sotto-run sotto-perf-gpu sotto-test-cuda_device sotto-test-kernels_cuda sotto-test-cuda sotto-test-conformance
  sotto-test-nccl_ranks)

# Name, time limit in minutes, shards, environments, what it is. The limit is that of one environment; one of N shards has its share
# of it, and at least that of so many shards as are named here: 8 minutes, all environments together. A suite with one shard has no
# cases to divide.
suites=(
  'device       4 1 eager,default            memory, copies, events and streams of the device'
  'kernels     24 3 default                  kernels, compared with the CPU on the same inputs'
  'memcheck    16 2 default                  accesses to memory, by compute-sanitizer, in a part of capi'
  'kernelcheck 16 2 default                  accesses to memory, by compute-sanitizer, in a part of kernels'
  'racecheck   16 2 default                  hazards in shared memory, by compute-sanitizer, in a part of kernels'
  'capi         8 2 eager,default            collectives, codecs, optimizers, graphs, compared with the CPU bit for bit'
  'streams      4 1 one_queue                streams that wait for operations'
  'conformance 12 3 eager,default            the conformance suites in the world "cuda"'
  'nccl         2 1 eager,default,one_queue  two ranks over NCCL, on one device if there is only one'
  'torch_loop   2 1 eager,default,one_queue  two ranks over TCP that train as PyTorch programs do'
  'python       8 1 default                  the Python package on tensors of torch'
  'bench        8 1 default                  rows 29 and 30: codec and Adam'
  'peers        8 1 default                  rows 29 and 30 next to torch, apex and Transformer Engine'
)

usage() {
  local suite name minutes shards environments what
  cat <<'END'
usage: tests/gpu.sh [options]

Builds the preset cuda, copies its programs into a folder, and if this machine has a CUDA device runs the suites below on it. What
fails or takes too long hides nothing: the rest runs, and the last lines say what ran in which environment, for how long, and how it
ended. Building needs the CUDA toolkit (nvcc in PATH or CUDACXX) and what integration/setup.sh installs, nccl.h among it. Running
needs a driver, bash and, for some of the suites, Python.
  --build-only     only build: the folder and a checkout are all that another machine needs
  --no-build       run what the folder has; no compiler and no library of the build is looked for
  --folder DIR     the folder (build/gpu)
  --arch LIST      CUDA architectures, as CMAKE_CUDA_ARCHITECTURES (native: this machine's)
  --only LIST      these suites alone, with commas between them: SUITE, or SUITE@ENVIRONMENT
  --shard I/N      share I of N (1 to N) of the cases of suites with shards; all of the other suites if I is 1
  --strict         a suite that is skipped counts as failed, and so does a machine without a device
  --no-bench       tests alone
  --n N            elements of the benchmarks (340000000: 11 GB of device memory)
  --json FILE      append the benchmarks' figures to this file, one JSON object per line
  --python PATH    Python for suites that need one (.venv/bin/python if that is there, else python3; integration/setup.sh bench
                   installs one with torch, numpy and pytest)
  -h, --help       this text
NCCL is the library that the variable SOTTO_NCCL_LIBRARY names, the one that this Python has (nvidia.nccl), or the system's.
compute-sanitizer is looked for in PATH and in the CUDA toolkit (CUDA_HOME, else /usr/local/cuda).
The exit code is 0 if everything passed, 1 if not, 2 for wrong options, 77 if there is no CUDA device.

Environments: eager sets CUDA_MODULE_LOADING=EAGER and CUDA_DEVICE_MAX_CONNECTIONS=32, one_queue CUDA_DEVICE_MAX_CONNECTIONS=1,
default neither. With --shard I/SHARDS each suite ends within 8 minutes, all of its environments together.

suite        shards  environments             what
END
  for suite in "${suites[@]}"; do
    read -r name minutes shards environments what <<<"$suite"
    printf '%-12s %6s  %-24s %s\n' "$name" "$shards" "$environments" "$what"
  done
}

# from_here PATH_OR_NAME: a path as one that holds after a change of the folder; links (of virtual environments) stay.
from_here() {
  case $1 in
    */*) realpath -ms "$1" ;;
    *) printf '%s\n' "$1" ;;
  esac
}

parse() {
  build=yes run=yes folder='' arch='' only='' shard='' strict=no bench=yes n='' json='' python=''
  nccl=$(from_here "${SOTTO_NCCL_LIBRARY:-}")
  while [ $# -gt 0 ]; do
    case $1 in
      --build-only) run=no ;;
      --no-build) build=no ;;
      --strict) strict=yes ;;
      --no-bench) bench=no ;;
      --folder | --arch | --only | --shard | --n | --json | --python)
        [ $# -ge 2 ] || usage_error "$1 needs a value"
        case $1 in
          --folder) folder=$(realpath -m "$2") ;;
          --arch) arch=$2 ;;
          --only)
            only=$2
            [ -n "${only//,/}" ] || usage_error "--only names no suite"
            ;;
          --shard) shard=$2 ;;
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
  [ -n "$folder" ] || folder=$SOTTO_ROOT/build/gpu
  check_options
  [ -n "$n" ] || n=340000000
  plan
}

check_options() {
  local name
  local -a wanted_parts
  [ "$build$run" != nono ] || usage_error "--no-build and --build-only leave nothing to do"
  [ "$build" = yes ] || [ -z "$arch" ] || usage_error "--arch is for a build, which --no-build leaves out"
  [ "$run" = yes ] || [ "$strict$bench$only$shard$n$json$python" = noyes ] ||
    usage_error "--only, --shard, --strict, --no-bench, --n, --json and --python are for a run, which --build-only leaves out"
  [ "$bench" = yes ] || [ -z "$only" ] || usage_error "--only names the suites already, without --no-bench"
  if [ -n "$n$json" ] && { [ "$bench" = no ] || [[ -n $only && ,$only != *,bench* && ,$only != *,peers* ]]; }; then
    usage_error "--n and --json are for benchmarks, of which there are none to run"
  fi
  [[ -z $n || $n =~ ^[1-9][0-9]*$ ]] || usage_error "--n is '$n', expected a number of elements"
  [ -z "$json" ] || [ -d "${json%/*}/" ] || usage_error "--json is '$json', in a folder that does not exist"
  [ -n "$shard" ] || shard=1/1
  if ! [[ $shard =~ ^[1-9][0-9]{0,3}/[1-9][0-9]{0,3}$ ]] || [ "${shard%/*}" -gt "${shard#*/}" ]; then
    usage_error "--shard is '$shard', expected I/N with I from 1 to N"
  fi
  IFS=, read -ra wanted_parts <<<"$only"
  for name in "${wanted_parts[@]}"; do
    [ -z "$name" ] || grep -qxF -- "$name" < <(all_parts) || usage_error "--only names '$name', which is no suite, nor SUITE@ENVIRONMENT"
  done
}

# Every name that --only knows, one a line.
all_parts() {
  local suite name minutes shards environments
  for suite in "${suites[@]}"; do
    read -r name minutes shards environments _ <<<"$suite"
    printf '%s\n' "$name" "$name@${environments//,/$'\n'$name@}"
  done
}

# Sets `parts`: suite, environment, time limit in seconds, and whether its cases are divided.
plan() {
  local suite name minutes shards environments environment of
  parts=()
  for suite in "${suites[@]}"; do
    read -r name minutes shards environments _ <<<"$suite"
    of=$((${shard#*/} < shards ? ${shard#*/} : shards))
    for environment in ${environments//,/ }; do
      wanted "$name" "$environment" || continue
      if [ "$shards" -gt 1 ]; then
        parts+=("$name $environment $((60 * minutes / of)) divided")
      elif [ "${shard%/*}" -eq 1 ]; then
        parts+=("$name $environment $((60 * minutes)) whole")
      fi
    done
  done
  [ ${#parts[@]} -gt 0 ] || usage_error "--shard $shard leaves nothing to run: suites that are not divided are in shard 1"
}

# wanted SUITE ENVIRONMENT
wanted() {
  [ "$bench" = yes ] || [[ $1 != bench && $1 != peers ]] || return 1
  [ -z "$only" ] || [[ ,$only, == *,$1,* || ,$only, == *,$1@$2,* ]]
}

build() {
  local cmake ninja
  cmake=$(find_cmake) || die "no working cmake >= 3.25: run integration/setup.sh"
  ninja=$(find_ninja) || die "no working ninja: run integration/setup.sh"
  # The programs find libraries beside themselves, wherever they are.
  # shellcheck disable=SC2016  # the dynamic linker knows $ORIGIN
  local -a configure=(--preset cuda "-DCMAKE_MAKE_PROGRAM=$ninja" -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON
    '-DCMAKE_BUILD_RPATH=$ORIGIN/../lib')
  [ -z "$arch" ] || configure+=("-DSOTTO_CUDA_ARCHITECTURES=$arch")
  "$cmake" "${configure[@]}" || die "configuring failed: integration/setup.sh installs what is missing, but the CUDA toolkit"
  "$cmake" --build --preset cuda --target sotto-cli "${programs[@]}" -j "$(cores)" || die "building failed"
  pack
}

# The programs without their symbols, and the libraries that they need but for those of C and C++.
pack() {
  local program library path
  local system='^(ld-linux.*|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s))\.so(\.|$)'
  rm -f "$folder/built"
  mkdir -p "$folder/bin" "$folder/lib"
  for program in "${programs[@]}"; do
    strip -o "$folder/bin/$program" "build/cuda/bin/$program"
  done
  while read -r library path; do
    [[ $library =~ $system ]] || strip -o "$folder/lib/$library" "$path"
  done < <(ldd "${programs[@]/#/build/cuda/bin/}" | sed -n 's/^\t\([^ ]*\) => \(.*\) (0x.*/\1 \2/p' | sort -u)
  describe_build >"$folder/built"
  summarize_build
}

# In the last lines.
summarize_build() {
  local commit architectures toolkit
  read -r commit architectures toolkit <"$folder/built"
  say "== built: commit $commit, CUDA architectures $architectures, CUDA toolkit $toolkit"
  say "programs   ${programs[*]}"
  say "libraries  $(cd "$folder/lib" && printf '%s ' *)"
  say "$folder: $(du -sm "$folder" | cut -f 1) MiB"
}

# Commit, architectures, version of the toolkit.
describe_build() {
  local commit toolkit
  commit=$(git describe --always --dirty --exclude '*' 2>/dev/null) || commit=unknown
  toolkit=$("${CUDACXX:-nvcc}" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p') || toolkit=unknown
  say "$commit ${arch:-all} ${toolkit:-unknown}"
}

# ---- Running ----

results=()  # per part: how it ended, its name, its seconds, what there is to say
declare -A lacks

# record HOW WHAT
record() {
  local took=$((SECONDS - began))
  results+=("$1|$suite@$environment|$took|$2")
  [ "$1" != skipped ] || say "SKIPPED: $suite@$environment, since $2"
}

# Variables of an environment.
settings_of() {
  case $1 in
    eager) say CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32 ;;
    one_queue) say CUDA_DEVICE_MAX_CONNECTIONS=1 ;;
  esac
}

# attempt COMMAND...: sets `code`; the output goes to `log` too. Whatever still has the pipe does not keep the script waiting.
attempt() {
  local -a words=(-u CUDA_MODULE_LOADING -u CUDA_DEVICE_MAX_CONNECTIONS)
  code=0
  # shellcheck disable=SC2207  # words without spaces
  words+=($(settings_of "$environment"))
  [ "$divided" = whole ] || words+=("GTEST_TOTAL_SHARDS=${shard#*/}" "GTEST_SHARD_INDEX=$((${shard%/*} - 1))")
  timeout --kill-after=30 "$limit" env "${words[@]}" "$@" 2>&1 | timeout $((limit + 60)) tee "$log" || code=${PIPESTATUS[0]}
}

# conclude WHAT: records how the attempt ended, and what there is to say.
conclude() {
  case $code in
    0) record passed "$1" ;;
    77) record skipped "${1:-it had nothing to do}" ;;
    124) record FAILED "ended after $(duration "$limit")${1:+, $1}" ;;
    137) record FAILED "killed, after $(duration "$limit") or for its memory${1:+, $1}" ;;
    *) record FAILED "exit code $code${1:+, $1}" ;;
  esac
}

run() {
  attempt "$@"
  conclude ''
}

# run_cases COMMAND...: a program of gtest or pytest. One that had no case failed; one whose cases were all skipped was skipped.
run_cases() {
  local passed failed last why
  attempt "$@"
  passed=$(sed -n -e 's/^\[  PASSED  \] \([0-9]*\) tests\?\..*/\1/p' -e 's/^=.* \([0-9]*\) passed.*/\1/p' "$log" | tail -n 1)
  failed=$(sed -n -e '/^\[  FAILED  \] [0-9]* tests\?, listed/,$ s/^\[  FAILED  \] \([^ ,]*\.[^ ,]*\).*/\1/p' \
    -e 's/^FAILED \([^ ]*\).*/\1/p' "$log" | head -n 3 | paste -sd ' ')
  last=$(sed -n 's/^\[ RUN      \] //p' "$log" | tail -n 1)
  why=$(sed -n -e '/: Skipped$/{n;p}' -e 's/^SKIPPED \[[0-9]*\] [^ ]*: //p' "$log" | sort -u | paste -sd ';')
  if [ "$code" -ne 0 ]; then
    conclude "${failed:-${last:+in $last}}"
  elif [ "${passed:-0}" -gt 0 ]; then
    conclude "$passed cases passed${why:+, some skipped: $why}"
  elif [ -n "$why" ]; then
    record skipped "$why"
  else
    record FAILED "no case ran"
  fi
}

# ask WORD...: sets `answer`; exit code 0 if it is one, 77 if it says why there is none.
ask() {
  answer=$(timeout --kill-after=10 120 "$python" -B tests/gpu/ask.py "$@" 2>/dev/null) && return
  [ $? -eq 77 ] || answer="$python cannot be run"
  return 77
}

# has MODULE...: whether the Python can run what needs these. Else the suite is skipped.
has() {
  if [ -z "${lacks[$*]+asked}" ]; then
    if ask modules "$@"; then lacks[$*]=''; else lacks[$*]=$answer; fi
  fi
  [ -z "${lacks[$*]}" ] || { record skipped "${lacks[$*]}" && return 1; }
}

suite_device() { run_cases "$folder/bin/sotto-test-cuda_device"; }
suite_kernels() { run_cases "$folder/bin/sotto-test-kernels_cuda"; }

# sanitized TOOL PROGRAM CASES [VARIABLE=VALUE...]: under compute-sanitizer, which is too slow for all cases.
sanitized() {
  local tool=$1 program=$2 cases=$3 toolkit=${CUDA_HOME:-/usr/local/cuda} sanitizer
  shift 3
  sanitizer=$(PATH=$PATH:$toolkit/bin command -v compute-sanitizer) ||
    { record skipped "there is no compute-sanitizer in PATH, nor in $toolkit/bin" && return; }
  run_cases env "$@" "$sanitizer" --tool "$tool" --error-exitcode 99 --report-api-errors no "$folder/bin/$program" \
    --gtest_filter="$cases"
}

kernel_cases='*Equal*TheReference*:KernelsNorms.*'
suite_memcheck() { sanitized memcheck sotto-test-cuda '*SameBits*'; }
# Operands of kernels are parts of large allocations, unless each is asked to be one of its own.
suite_kernelcheck() { sanitized memcheck sotto-test-kernels_cuda "$kernel_cases" PINNED_ALLOCATIONS=own; }
suite_racecheck() { sanitized racecheck sotto-test-kernels_cuda "$kernel_cases"; }
suite_capi() { run_cases "$folder/bin/sotto-test-cuda"; }
suite_streams() { run_cases "$folder/bin/sotto-test-cuda" --gtest_filter='CudaStreams.*:CudaDevices.*'; }
suite_conformance() { run_cases "$folder/bin/sotto-test-conformance" --gtest_filter='*cuda*'; }

# Two ranks over NCCL give the bits that they give over TCP. On one device NCCL refuses two ranks of one host: since 2.30 a
# switch allows them, before that they say that they are on different hosts, and then talk through sockets.
suite_nccl() {
  # shellcheck disable=SC2016  # the rank's shell knows its program and its rank
  local version library rank='exec "$0"' host='NCCL_HOSTID=rank$SOTTO_RANK'
  ask nccl ${nccl:+"$nccl"} || { record skipped "$answer" && return; }
  read -r version library <<<"$answer"
  nccl_version=$((version / 10000)).$((version / 100 % 100)).$((version % 100))
  local settings=(SOTTO_NCCL_LIBRARY="$library" SOTTO_TIMEOUT_US=$((limit * 500000)) NCCL_DEBUG=WARN)
  if [ "$(grep -o 'cuda:' <<<"$devices" | wc -l)" -lt 2 ]; then
    if [ "$version" -ge 23000 ]; then
      settings+=(NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4)
    else
      settings+=(NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
        NCCL_MNNVL_ENABLE=0 NCCL_CUMEM_ENABLE=0 NCCL_MAX_CTAS=1)
      rank="$host $rank"
    fi
  fi
  say "NCCL $nccl_version: ${settings[*]}"
  run env "${settings[@]}" "$folder/bin/sotto-run" -n 2 -- sh -c "$rank" "$folder/bin/sotto-test-nccl_ranks"
}

suite_torch_loop() {
  has torch || return 0
  run env SOTTO_LIBRARY="$folder/lib/libsotto.so.0" "$folder/bin/sotto-run" -n 2 -- \
    "$python" -B tests/gpu/torch_loop.py --seconds 60
}

suite_python() {
  has torch numpy pytest || return 0
  run_cases env SOTTO_LIBRARY="$folder/lib/libsotto.so.0" PYTHON_TESTS_SOTTO_RUN="$folder/bin/sotto-run" \
    "$python" -B -m pytest -p no:cacheprovider -rsf -k on_a_gpu bindings/python/tests/test_cuda.py
}

suite_bench() { run "$folder/bin/sotto-perf-gpu" --n "$n" --json "$json"; }
suite_peers() {
  has torch || return 0
  run "$python" -B tests/perf/peers_gpu.py --sotto-perf-gpu "$folder/bin/sotto-perf-gpu" --n "$n" --json "$json"
}

run_parts() {
  local part suite environment limit divided began code
  for part in "${parts[@]}"; do
    read -r suite environment limit divided <<<"$part"
    began=$SECONDS
    say "== $suite@$environment, $(duration "$limit") at most ($(elapsed)) $(settings_of "$environment")"
    "suite_$suite"
  done
}

# counts PASSED FAILED SKIPPED: the last line.
counts() {
  local strictly=''
  [ "$strict" = no ] || [ "$3" -eq 0 ] || strictly=", which --strict counts as failed"
  say "$1 suites passed, $2 failed, $3 skipped$strictly"
}

count_of() { grep -c "^$1|" < <(printf '%s\n' "${results[@]}") || true; }

# What ran and how it ended; a row for the table of cuda/README.md; the counts.
summary() {
  local how name took what result names='' counts commit architectures toolkit driver
  read -r commit architectures toolkit <"$folder/built"
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || driver=unknown
  say "== summary ($(elapsed)), shard $shard, commit $commit built for $architectures"
  for result in "${results[@]}"; do
    IFS='|' read -r how name took what <<<"$result"
    printf '%-7s  %-21s  %s  %s\n' "$how" "$name" "$(duration "$took")" "$what"
    names+="${names:+ }$name"
  done
  counts=$(counts "$(count_of passed)" "$(count_of FAILED)" "$(count_of skipped)")
  say "| $(date -u +%F) | $devices | ${driver:-unknown} | $toolkit | $nccl_version | $commit | $names, shard $shard | $counts |"
  say "$counts"
  [ "$(count_of FAILED)" -eq 0 ] && [[ $counts != *--strict* ]]
}

without_device() {
  say "SKIPPED: nothing was run, since this machine has no CUDA device"
  counts 0 0 ${#parts[@]}
  [ "$strict" = no ] || exit 1
  exit 77
}

main() {
  parse "$@"
  cd "$SOTTO_ROOT"
  [ "$build" = no ] || build
  [ "$run" = yes ] || exit 0
  [ -e "$folder/built" ] || die "$folder has no programs: make them with --build-only, and name their folder with --folder"
  [ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python; } || python=python3
  devices=$(timeout --kill-after=10 120 "$folder/bin/sotto" info | sed -n 's/^other devices *//p') ||
    die "$folder/bin/sotto info failed"
  say "$devices"
  [[ $devices == cuda:* ]] || without_device
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  log=$scratch/log nccl_version=-
  [ -n "$json" ] || json=$scratch/figures
  run_parts
  summary
}

main "$@"
