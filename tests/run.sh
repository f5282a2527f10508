#!/usr/bin/env bash
# Builds Sotto and runs its tests: optimised, then under the sanitizers.
set -euo pipefail
# shellcheck source=integration/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../integration/common.sh"

# What runs under which sanitizer. Labels are the folders of tests/, cli, python (bindings/python), rust (bindings/rust) and julia (bindings/julia). Cases labelled no_sanitizer measure time or
# start programs that are not ours.
# What runs on the emulated GPU is for --gpu-emulation.
ASAN_LABELS='^(unit|conformance|ranks|cpp|faults|fuzz|cli)$'
TSAN_LABELS='^(unit|conformance|ranks|faults)$'
GPU_LABELS='^(emulation/(cuda|nccl|simt)|kernels_emulated|cuda_device|cuda|nccl)$'
# Not under sanitizers: more than 4 ranks, optimizers that differ from others in their arithmetic only, test parts that
# combine two others or are part of another (inproc of ordered, async of device_memory), the smallest ring of shared memory,
# overlaps on fewer than 3 ranks, the rendezvous of transports that have TCP's. ctest's expressions have 9 groups at most.
# What is not even compiled there is listed in tests/CMakeLists.txt.
COMMON_WITHOUT='_7$|_8$|_compat|_partly|_buckets|ordered_async|/inproc|shm_small_ring|/Overlap(s|Steps|Codec)[.].*_[12]$|(Shm|Ucx)/TransportSuite[.](Join|SetUpExchange)'
# Over UCX the transport's own cases, and collectives.
UCX_WITHOUT='(Optimizer|Outer|Overlap|Codec|Reduce|Exchange|Unequal|TwoLevel)[A-Za-z]*[.].*/ucx'
# Over shared memory these and exchanges, two levels, and the vectors of optimizers.
SHM_WITHOUT='(Optimizer[A-UW-Z]|Outer|Overlap|Codec|Reduce|Unequal)[A-Za-z]*[.].*/shm'
# What is built on collectives has late kernels and no match keys in the world "mixed", optimizers and what has two levels (on
# at most 4 ranks) sockets too. Their bits in all worlds are for the optimised build.
LAYERS_WITHOUT='(Codec|Overlap|Outer)[A-Za-z]*[.].*/(async|ordered)|(Optimizer|Hierarchy)[A-Za-z]*[.].*/(async|ordered|tcp)|OptimizerIdentity|OverlapHierarchy[.].*/device_memory$|OnHosts[.].*_......$'
ASAN_WITHOUT="$COMMON_WITHOUT|$UCX_WITHOUT|$SHM_WITHOUT|$LAYERS_WITHOUT|/async"
# Nor under ThreadSanitizer: cases of arithmetic or memory alone, and what repeats exchanges, overlaps and levels for minutes.
TSAN_WITHOUT="$COMMON_WITHOUT|$UCX_WITHOUT|$SHM_WITHOUT|$LAYERS_WITHOUT|OverlapHierarchy[.]HasTheBits|TwoLevels[.].*_5$|CodecSizes|CodecBits|ReduceMatrix|device_memory|/Unequal[.].*/[ao]|/Exchange[.].*/[ao]|OverlapSteps[.].*/tcp|CapiPredict|StreamsHaveTheBytes|BytesOfTheTrainers|CommitGate|CompressedLayout|DirectPlan|PredictReport"
# ThreadSanitizer knows 8128 threads at most, and takes every emulated CUDA thread for one: four ranks are too
# many, and three that use codecs beside many others.
TSAN_GPU_WITHOUT='_4$|FourRanks|WithMoreRanks/(OneBit|Int8|OneBitAdam|OneBitLamb|ZeroOneAdam)$'

usage() {
  cat <<'END'
usage: tests/run.sh [options]

Installs what is missing, builds, runs all tests: optimised (preset dev), with AddressSanitizer and
UndefinedBehaviorSanitizer (asan), and with ThreadSanitizer (tsan).
  --no-sanitizers  only the optimised build
  --sanitizers     all three (default)
  --gpu-emulation  something else: all that runs on the emulated GPU and the fake NCCL, under both sanitizers
  --label REGEX    only tests whose label matches: unit, conformance, ranks, cpp, faults, fuzz, abi, golden, cli,
                   emulation/async_device, emulation/cuda, emulation/nccl, emulation/simt, support,
                   kernels_emulated, cuda_device, cuda, nccl, lint, model, python, rust, julia, readme, report, scripts,
                   perf
  --tidy           something else: clang-tidy over the production sources, with the checks in .clang-tidy; no test
  --fresh          configure the build folders anew
  -h, --help       this text
The last line is "N passed, N failed, N skipped". The exit code is 0 only if a test ran and none failed.
END
}

parse() {
  sanitizers=yes gpu_emulation=no tidy=no label='' fresh=no
  while [ $# -gt 0 ]; do
    case $1 in
      --sanitizers) sanitizers=yes ;;
      --no-sanitizers) sanitizers=no ;;
      --gpu-emulation) gpu_emulation=yes ;;
      --tidy) tidy=yes ;;
      --label)
        [ $# -ge 2 ] || usage_error "--label needs a regular expression"
        label=$2 && shift ;;
      --fresh) fresh=yes ;;
      -h | --help) usage && exit 0 ;;
      *) usage_error "unknown option '$1'" ;;
    esac
    shift
  done
}

# What is built of a preset, and which one comes after it.
declare -A TARGETS=([dev]=all [asan]=sotto_sanitized [tsan]=sotto_sanitized) NEXT=([dev]=asan [asan]=tsan)

# configure PRESET
configure() {
  local -a options=(--preset "$1" "-DCMAKE_MAKE_PROGRAM=$NINJA")
  [ "$fresh" = no ] || options+=(--fresh)
  "$CMAKE" "${options[@]}" >"$results/$1.configure.log" 2>&1 || {
    cat "$results/$1.configure.log"
    die "configuring $1 failed"
  }
}

# build PRESET
build() {
  say "== $1: configure and build ($(elapsed))"
  if [ -n "$ahead" ]; then
    wait "$ahead" || true  # what failed in it fails again, with its text
    trap - EXIT
    ahead=
  else
    configure "$1"
  fi
  "$CMAKE" --build "build/$1" --target "${TARGETS[$1]}" -j "$(cores)" || die "building $1 failed"
}

# build_ahead PRESET: begins with what comes after it, on processors that are idle.
build_ahead() {
  local next=${NEXT[$1]:-}
  if [ "$sanitizers" = no ] || [ -z "$next" ]; then return 0; fi
  configure "$next"
  chrt --idle 0 "$NINJA" -C "build/$next" -j "$(cores)" "${TARGETS[$next]}" >/dev/null 2>&1 &
  ahead=$!
  trap 'kill $ahead 2>/dev/null || true' EXIT
}

# ctest_part NAME PRESET CTEST_OPTIONS...: failures are counted from the result file, not from the exit code.
ctest_part() {
  local name=$1 preset=$2
  shift 2
  [ -z "$label" ] || set -- "$@" -L "$label"
  "$CTEST" --test-dir "build/$preset" --output-on-failure --no-tests=ignore --test-output-size-passed 65536 \
    --test-output-size-failed 1000000 --output-junit "$results/$name.xml" "$@" || true
  junit+=("$results/$name.xml")
}

# excludes PRESET REGEX: dies if ctest leaves nothing out for it, which is also how ctest takes an invalid one.
excludes() {
  local -a all some
  mapfile -t all < <("$CTEST" --test-dir "build/$1" -N)
  mapfile -t some < <("$CTEST" --test-dir "build/$1" -N -E "$2")
  [ "${#some[@]}" -lt "${#all[@]}" ] || die "ctest leaves nothing out for '$2'"
}

# run_tests PRESET [LABELS [WITHOUT]]: most cases side by side, more than there are cores. Then those that do nothing but wait
# (label waits), many at once. Then the ones labelled serial, one at a time. Last those with time limits or rates of their own
# (faults, label quiet): they ask for two slots each, so that three run on two cores, and mostly wait, so that the next build
# begins meanwhile.
run_tests() {
  local preset=$1 not='^$'
  local -a only=()
  [ $# -lt 2 ] || only=(-L "$2") not='^no_sanitizer$'
  if [ $# -gt 2 ]; then
    excludes "$preset" "$3"
    only+=(-E "$3")
  fi
  say "== $preset: tests ($(elapsed))"
  # One expression: ctest excludes a case only if every -LE matches.
  ctest_part "$preset" "$preset" -j "$((2 * $(cores)))" -LE "^(waits|serial|faults|quiet)$|$not" "${only[@]}"
  ctest_part "$preset-waits" "$preset" -j "$((16 * $(cores)))" -L '^waits$' -LE "$not" "${only[@]}"
  ctest_part "$preset-serial" "$preset" -j 1 -L '^serial$' -LE "$not" "${only[@]}"
  build_ahead "$preset"
  ctest_part "$preset-quiet" "$preset" -j "$((3 * $(cores)))" -L '^(faults|quiet)$' -LE "^serial$|$not" "${only[@]}"
}

announce() {
  say "Sotto's tests. This installs missing packages (Debian's, and Python's into .venv), builds into build/, and runs everything that matches."
  if [ "$gpu_emulation" = yes ]; then
    say "Two builds (asan, tsan): more than an hour on 2 cores the first time."
  elif [ "$sanitizers" = yes ]; then
    say "Three builds (dev, asan, tsan): one to two hours on 2 cores the first time, about an hour with a warm compiler cache."
  else
    say "One build (dev): 40 to 60 minutes on 2 cores the first time."
  fi
}

# tidy: every source on its own, from the compile commands of dev, of which nothing is built.
tidy() {
  integration/setup.sh tidy
  need_tools
  results=$SOTTO_ROOT/build
  mkdir -p "$results"
  configure dev
  say "== clang-tidy: about 25 minutes on 2 cores"
  run-clang-tidy-14 -quiet -p build/dev -j "$(cores)" -extra-arg=-Wno-unknown-warning-option \
    "$SOTTO_ROOT/(capi/src|core|cuda|transports)/.*[.]cc\$" || die "clang-tidy found something"
  say "clang-tidy found nothing"
}

main() {
  parse "$@"
  cd "$SOTTO_ROOT"
  if [ "$tidy" = yes ]; then
    tidy
    return
  fi
  announce
  integration/setup.sh test
  need_tools
  results=$SOTTO_ROOT/build/test-results
  junit=() ahead=''
  rm -rf "$results" && mkdir -p "$results"
  # OpenBLAS starts a thread per core in every process; ranks share the cores already.
  # intercept_tls_get_addr=0: the leak check of GCC 12 takes a thread-local block of an opened library
  # (UCX) that lies 16 bytes behind a page's start for one of an older glibc, and reads a size and an
  # address that are not there: "Tracer caught signal 11".
  export OPENBLAS_NUM_THREADS=1 \
    ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1:intercept_tls_get_addr=0} \
    UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1} TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:atexit_sleep_ms=20}
  if [ "$gpu_emulation" = yes ]; then
    TARGETS=([asan]=sotto_emulated_gpu [tsan]=sotto_emulated_gpu)
    build asan && run_tests asan "$GPU_LABELS"
    build tsan && run_tests tsan "$GPU_LABELS" "$TSAN_GPU_WITHOUT"
  else
    build dev && run_tests dev
  fi
  if [ "$gpu_emulation" = no ] && [ "$sanitizers" = yes ]; then
    build asan && run_tests asan "$ASAN_LABELS" "$ASAN_WITHOUT"
    build tsan && run_tests tsan "$TSAN_LABELS" "$TSAN_WITHOUT"
  fi
  say "== summary ($(elapsed))"
  "$PYTHON" tests/junit_summary.py "${junit[@]}"
}

main "$@"
