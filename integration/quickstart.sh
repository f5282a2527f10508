#!/usr/bin/env bash
# A newcomer's first ten minutes: builds Sotto, trains a small language model with LAMB and with 1-bit LAMB on four
# ranks over a slow network, and writes a report that compares them; with one more configuration, if given.
set -euo pipefail
# shellcheck source=integration/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

RANKS=4
MOST_RANKS=16
SHARDED=onebit_lamb_sharded # the run in two levels
UNLIMITED=-unlimited        # behind the name of a run whose links have no limit
FULL_STEPS=3600
QUICK_STEPS=500
TRACED_STEPS=60 # of runs for the report's time line
BUILD=$SOTTO_ROOT/build/quickstart
LAB=$SOTTO_ROOT/integration/netns/lab.sh

usage() {
  cat <<END
usage: integration/quickstart.sh [options]

Installs what is missing (Debian, root), builds, trains with LAMB and with 1-bit LAMB on $RANKS ranks, every link at
100 Mbit/s, and writes lamb.jsonl, onebit_lamb.jsonl, summary.json and report.html.
  --quick          100 seconds instead of 8 minutes; its losses mean little
  --steps N        optimizer steps per run ($FULL_STEPS); the schedule is scaled to them
  --seeds S,S,..   repeat with these seeds; summary.json then has each of them, and means (default: one run, seed 1)
  --config FILE    train with this configuration too (a DeepSpeed file NAME.json); the report and summary.json then have
                   NAME next to the two, and its log is NAME.jsonl. Its schedule is scaled like theirs, if it has a
                   scheduler with total_num_steps. Examples: integration/configs/co2_lamb.json, onebit_adam.json
  --unlimited-too  with --config: train NAME once more with no limit on the links, so that the report and summary.json
                   say what the network costs it; the log of that run is NAME$UNLIMITED.jsonl
  --data PATH...   text files, or directories searched for .py files (default: this machine's Python library)
  --links MBIT     rate of every link in Mbit/s (100)
  --hosts HxR      H hosts of R ranks each, 2x2 and more, at most $MOST_RANKS ranks: links are between hosts, and ranks of a host
                   share memory. A third run, $SHARDED, is 1-bit LAMB in two levels (docs/hierarchy.md): full
                   precision inside hosts, one bit between them. Needs network namespaces; not with --config
  --isolation HOW  netns: a network namespace per rank; rate_limiter: Sotto's own limit on each rank's sending and
                   receiving, over loopback; auto: netns where permitted (default)
  --out DIR        where the results go (./quickstart-out); results of an earlier quickstart there are replaced
  -h, --help       this text
END
}

# ---- options ----

is_value() { [ -n "$1" ] && [ "${1#--}" = "$1" ]; }

positive() {
  [[ $2 =~ ^[1-9][0-9]{0,8}$ ]] || usage_error "$1: '$2' is not a whole number above 0"
  [ "$2" -le "$3" ] || usage_error "$1: $2 is more than $3"
}

parse_seeds() {
  [[ $1 =~ ^(0|[1-9][0-9]{0,8})(,(0|[1-9][0-9]{0,8}))*$ ]] || usage_error "--seeds: '$1' is not a list of numbers like 1,2,3"
  IFS=, read -r -a seeds <<<"$1"
  [ "$(printf '%s\n' "${seeds[@]}" | sort -u | wc -l)" -eq ${#seeds[@]} ] || usage_error "--seeds: '$1' has a seed twice"
  list_seeds=yes
}

# Names of an additional run: files and keys of summary.json that a quickstart has anyway are taken.
is_run_name() {
  [[ $1 =~ ^[A-Za-z][A-Za-z0-9_]{0,39}$ ]] || return 1 # as run_name in report/quickstart.py
  case $1 in lamb | onebit_lamb | links_mbit | isolation | hosts | hierarchy | network_costs | unigram_entropy | seeds | ratios*) return 1 ;; esac
}

# Sets hosts, per_host and RANKS, and extra to the name of the run in two levels.
parse_hosts() {
  [[ $1 =~ ^([2-9])x([2-9])$ ]] || usage_error "--hosts: '$1' is not like 2x2: hosts x ranks on each, from 2 to 9"
  hosts=${BASH_REMATCH[1]} per_host=${BASH_REMATCH[2]} extra=$SHARDED
  RANKS=$((hosts * per_host))
  [ $RANKS -le $MOST_RANKS ] || usage_error "--hosts: '$1' is $RANKS ranks, more than $MOST_RANKS"
}

# Sets config, and extra to the name of its run.
parse_config() {
  config=$1 extra=${1##*/}
  extra=${extra%.json}
  is_run_name "$extra" || usage_error "--config: '$1' gives its run the name '$extra'; it has to be a word of letters, \
digits and _ (at most 40, the first a letter), and neither lamb nor onebit_lamb nor a key of summary.json: copy the file to another name"
  case $config in -*) config=./$config ;; esac
}

parse() {
  quick=no steps='' config='' extra='' seeds=(1) list_seeds=no data=() links=100 isolation=auto out=./quickstart-out
  hosts=0 per_host=1 unlimited=no
  while [ $# -gt 0 ]; do
    case $1 in
      --quick) quick=yes && shift && continue ;;
      --unlimited-too) unlimited=yes && shift && continue ;;
      -h | --help) usage && exit 0 ;;
      --steps | --seeds | --config | --data | --links | --hosts | --isolation | --out)
        is_value "${2:-}" || usage_error "$1 needs a value" ;;
      *) usage_error "unknown option '$1'" ;;
    esac
    case $1 in
      --steps) positive --steps "$2" 1000000 && steps=$2 ;;
      --seeds) parse_seeds "$2" ;;
      --config) parse_config "$2" ;;
      --links) positive --links "$2" 100000 && links=$2 ;;
      --hosts) parse_hosts "$2" ;;
      --isolation) isolation=$2 ;;
      --out) out=$2 ;;
      --data)
        shift
        while is_value "${1:-}"; do data+=("$1") && shift; done
        continue ;;
    esac
    shift 2
  done
  case $isolation in auto | netns | rate_limiter) ;; *) usage_error "--isolation: '$isolation' is not auto, netns or rate_limiter" ;; esac
  [ $unlimited = no ] || [ -n "$config" ] || usage_error "--unlimited-too repeats the run of --config FILE: give one"
  if [ "$hosts" != 0 ]; then
    [ -z "$config" ] || usage_error "--hosts has a third run, $SHARDED: leave out --config"
    [ "$isolation" != rate_limiter ] || usage_error "--hosts needs --isolation netns: Sotto's own limit would hold ranks of a host too"
    isolation=netns
  fi
  if [ -z "$steps" ]; then
    if [ $quick = yes ]; then steps=$QUICK_STEPS; else steps=$FULL_STEPS; fi
  fi
}

# is_extra_log FILE: whether an earlier quickstart made it for an additional run, which is what its summary.json tells.
is_extra_log() {
  local name=$1
  [ "${name%.jsonl}" != "$name" ] || return 1
  name=${name%.jsonl}
  name=${name%-seed*}
  name=${name%"$UNLIMITED"}
  is_run_name "$name" && grep -qxF "  \"ratios_$name\": {" "$out/summary.json" 2>/dev/null
}

# Results of an earlier quickstart are replaced; anything else is not ours to delete.
check_out() {
  local entry parent
  parent=$(dirname "$out")
  { mkdir -p "$parent" && [ -w "$parent" ]; } 2>/dev/null || die "--out: cannot write to '$parent'"
  [ -e "$out" ] || return 0
  [ -d "$out" ] || die "--out: '$out' is not a directory"
  for entry in "$out"/* "$out"/.[!.]*; do
    [ -e "$entry" ] || continue
    case ${entry##*/} in
      lamb.jsonl | lamb-seed*.jsonl | onebit_lamb.jsonl | onebit_lamb-seed*.jsonl | summary.json | report.html) ;;
      *) is_extra_log "${entry##*/}" || die "--out: '$out' holds '${entry##*/}', which is no quickstart's: choose an empty or a new directory" ;;
    esac
  done
}

check_paths() {
  local path
  [ -z "$config" ] || { [ -f "$config" ] && [ -r "$config" ]; } || die "--config: '$config' does not exist or cannot be read"
  for path in "${data[@]}"; do [ -r "$path" ] || die "--data: '$path' does not exist or cannot be read"; done
}

# ---- what will happen ----

# Rough seconds of training: a step computes for 20 ms and sends 7.4 Mbit per rank at full precision, 0.25 Mbit
# compressed; 1-bit LAMB is at full precision for the first fifth. An additional run is taken to be at full precision.
# One without a limit on the links computes only. Evaluations add about a tenth, the time line's runs some seconds.
estimated_seconds() {
  local full=$((20000 + 7440000 / links)) small=$((20000 + 250000 / links)) free=0 tenths=12
  [ -z "$extra" ] || tenths=22
  [ $unlimited = no ] || free=20000
  echo $((${#seeds[@]} * steps * (full * tenths + small * 8 + free * 10) * 11 / 100000000 + 15))
}

duration() { if [ "$1" -lt 120 ]; then echo "$1 seconds"; else echo "$((($1 + 30) / 60)) minutes"; fi; }

announce() {
  say "Sotto quickstart. It will"
  say "  1. install missing Debian packages (1 to 6 minutes, once), and build into build/quickstart (2 minutes, once);"
  say "  2. train a byte-level masked language model with LAMB, then with 1-bit LAMB: $RANKS ranks, $steps steps each,"
  say "     every link at $links Mbit/s, seed ${seeds[*]}: about $(duration "$(estimated_seconds)") on 2 cores;"
  if [ -n "$config" ]; then say "     a third run, $extra, is as $config says;"; fi
  if [ $unlimited = yes ]; then say "     a fourth run is $extra again, with no limit on the links;"; fi
  if [ "$hosts" != 0 ]; then
    say "     $hosts hosts have $per_host ranks each, links are between hosts; a third run, $extra, is 1-bit LAMB with"
    say "     full precision inside hosts and one bit between them;"
  fi
  say "  3. write logs, summary.json and report.html into $out."
  if [ $quick = yes ]; then say "This is a quick run: its losses mean little."; fi
}

# ---- build ----

build() {
  local log=$BUILD/build.log
  mkdir -p "$BUILD"
  say "quickstart: building (log: build/quickstart/build.log)"
  {
    "$CMAKE" -S "$SOTTO_ROOT" -B "$BUILD" -G Ninja "-DCMAKE_MAKE_PROGRAM=$NINJA" -DCMAKE_BUILD_TYPE=Release \
      -DSOTTO_BUILD_TESTS=OFF -DSOTTO_BUILD_TOOLS=ON &&
      "$CMAKE" --build "$BUILD" -j "$(cores)" --target sotto-cli sotto-run sotto-c-trainer
  } >"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    die "the build failed"
  }
}

# The library says whether it can run the additional configuration, before anything is trained.
check_config() {
  local text
  [ -n "$config" ] || return 0
  text=$("$BUILD/bin/sotto" config "$config" --world-size "$RANKS" 2>&1 >/dev/null) || die "--config: $text"
}

# ---- network ----

# Sets isolation to netns or rate_limiter. Where only a user namespace permits it, this script goes on inside one.
choose_isolation() {
  local how
  [ "$isolation" != rate_limiter ] || return 0
  if how=$("$LAB" check); then
    isolation=netns
    [ "$how" = root ] || exec env QUICKSTART_INSIDE=yes "$LAB" enter "$0" "$@"
  elif [ "$isolation" = netns ]; then
    die "network namespaces are not possible here: $how"
  else
    isolation=rate_limiter
    say "quickstart: network namespaces are not possible here ($how)"
  fi
}

# Labs whose quickstart was killed before it could tidy up.
remove_stale_labs() {
  local name pid
  for name in $(ip netns list 2>/dev/null | sed -n 's/^\(sotto-quickstart-[0-9]*\)-bridge.*/\1/p'); do
    pid=${name##*-}
    [ -d "/proc/$pid" ] || NETLAB=$name "$LAB" down
  done
}

start_network() {
  if [ "$isolation" = netns ]; then
    PATH=$PATH:/usr/sbin:/sbin remove_stale_labs
    export NETLAB=sotto-quickstart-$$
    lab_is_up=yes
    local places="each rank in its own network namespace" namespaces=$RANKS
    if [ "$hosts" != 0 ]; then
      places="$hosts network namespaces of $per_host ranks each" namespaces=$hosts
      export NETLAB_RANKS_PER_HOST=$per_host
    fi
    "$LAB" up "$namespaces" "${links}mbit"
    network=$("$LAB" describe)
    say "quickstart: isolation netns: $places, both directions of every link at $links Mbit/s"
    say "quickstart: $network"
  else
    export SOTTO_RATE_LIMIT_MBIT=$links
    network="Sotto's rate limiter (SOTTO_RATE_LIMIT_MBIT=$links) on loopback TCP; kernel $(uname -r)"
    say "quickstart: isolation rate_limiter: Sotto itself holds each rank's sending and receiving to $links Mbit/s"
  fi
}

# ---- runs ----

# shellcheck disable=SC2317  # called by traps
tidy_up() {
  if [ -n "${launcher:-}" ] && kill -TERM "$launcher" 2>/dev/null; then
    for _ in $(seq 120); do kill -0 "$launcher" 2>/dev/null && sleep 0.1; done
    kill -KILL "$launcher" 2>/dev/null || true
  fi
  if [ -n "${lab_is_up:-}" ]; then "$LAB" down || true; fi
  if [ -n "${work:-}" ]; then rm -rf "$work"; fi
}

# shellcheck disable=SC2317
interrupted() {
  trap '' INT TERM HUP
  say ""
  warn "quickstart: interrupted; ending the ranks and removing what was begun"
  exit 130
}

# set_rate MBIT|none: of all links from now on.
set_rate() {
  case $isolation-$1 in
    netns-none) "$LAB" rate none ;;
    netns-*) "$LAB" rate "$1mbit" ;;
    rate_limiter-none) unset SOTTO_RATE_LIMIT_MBIT ;;
    rate_limiter-*) export SOTTO_RATE_LIMIT_MBIT=$1 ;;
  esac
}

# launch CONFIG SEED STEPS STEM: writes STEM.jsonl; in the background, so that a signal to this script ends it at once.
launch() {
  local stem=$4 status=0
  local -a launch=("$BUILD/bin/sotto-run" -n "$RANKS") program=("$BUILD/bin/sotto-c-trainer")
  if [ "$isolation" = netns ]; then
    launch+=(--rendezvous "tcp://$("$LAB" address 1):$((29400 + launches))" --wrapper "'$LAB' wrap")
  fi
  program+=(--config "$1" --name "${stem##*/}" --steps "$3" --seed "$2" --log "$stem.jsonl" --summary "$stem.summary.json")
  [ ${#data[@]} -eq 0 ] || program+=(--data "${data[@]}")
  launches=$((launches + 1))
  "${launch[@]}" -- "${program[@]}" </dev/null &
  launcher=$!
  wait $launcher || status=$?
  launcher=''
  [ $status = 0 ] || die "the ${stem##*/} run failed (exit code $status); the first failing rank's message is above"
}

# train NAME SEED FILE_STEM CONFIG [none]: a run of NAME; with "none", without a limit on the links.
train() {
  local name=$1 seed=$2 stem=$3 config=$4 rate=${5:-$links} about=''
  [ "$rate" = "$links" ] || about=", no limit on the links"
  runs=$((runs + 1))
  say "quickstart: run $runs of $((runs_per_seed * ${#seeds[@]})): $name, seed $seed$about"
  set_rate "$rate"
  launch "$config" "$seed" "$steps" "$work/$stem"
}

# Short runs for the time line: one of a whole run would be hundreds of megabytes.
trace_all() {
  local name
  say "quickstart: $TRACED_STEPS steps of each for the report's time line"
  for name in lamb onebit_lamb $extra; do
    report scale "$work/config/$name.json" "$work/trace/$name.json" --steps $TRACED_STEPS --if-it-has-a-length >/dev/null
    SOTTO_TRACE=$work/trace/$name launch "$work/trace/$name.json" "${seeds[0]}" $TRACED_STEPS "$work/trace/$name"
  done
}

report() { PYTHONPATH=$SOTTO_ROOT/integration PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR=$BUILD/matplotlib "$PYTHON" -m report.quickstart "$@"; }

prepare() {
  local parent name
  parent=$(dirname "$out")
  work=$(mktemp -d "$parent/.quickstart-out.XXXXXX") || die "--out: cannot write to '$parent'"
  chmod 755 "$work"
  mkdir -p "$work/config" "$work/trace" "$BUILD/matplotlib"
  for name in lamb onebit_lamb; do
    report scale "$SOTTO_ROOT/integration/configs/$name.json" "$work/config/$name.json" --steps "$steps"
  done
  [ -z "$config" ] || report scale "$config" "$work/config/$extra.json" --steps "$steps" --if-it-has-a-length
  [ "$hosts" = 0 ] ||
    report scale "$SOTTO_ROOT/integration/configs/onebit_lamb.json" "$work/config/$extra.json" --steps "$steps" --hierarchy sharded
}

train_all() {
  local seed suffix='' runs=0 runs_per_seed=2
  [ -z "$extra" ] || runs_per_seed=3
  [ $unlimited = no ] || runs_per_seed=4
  for seed in "${seeds[@]}"; do
    [ $runs = 0 ] || suffix=-seed$seed
    train lamb "$seed" "lamb$suffix" "$work/config/lamb.json"
    train onebit_lamb "$seed" "onebit_lamb$suffix" "$work/config/onebit_lamb.json"
    [ -z "$extra" ] || train "$extra" "$seed" "$extra$suffix" "$work/config/$extra.json"
    [ $unlimited = yes ] || continue
    # A period that the run with a limit has measured is that of the run without it too.
    report settle "$work/config/$extra.json" "$work/$extra$suffix.summary.json" "$work/config/$extra$UNLIMITED.json"
    train "$extra" "$seed" "$extra$UNLIMITED$suffix" "$work/config/$extra$UNLIMITED.json" none
  done
}

# publish: the finished directory takes the place of the old one.
publish() {
  rm -rf "$work"/*.summary.json "$work/config" "$work/trace"
  if [ -e "$out" ]; then
    mv -T "$out" "$work.old"
    mv -T "$work" "$out" || { mv -T "$work.old" "$out" && die "--out: cannot replace '$out'"; }
    rm -rf "$work.old"
  else
    mv -T "$work" "$out"
  fi
  work=''
}

finish() {
  local status=0
  local -a configs=("$work/config/lamb.json" "$work/config/onebit_lamb.json") options=(--links "$links" --isolation "$isolation" --network "$network" --seeds "$(IFS=, && echo "${seeds[*]}")")
  [ $list_seeds = no ] || options+=(--list-seeds)
  [ $quick = no ] || options+=(--quick)
  [ $unlimited = no ] || options+=(--unlimited)
  if [ -n "$extra" ]; then configs+=("$work/config/$extra.json") && options+=(--extra "$extra"); fi
  [ "$hosts" = 0 ] || options+=(--hosts "$hosts" "$per_host")
  say ""
  report finish --dir "$work" --root "$SOTTO_ROOT" --command "integration/quickstart.sh $command_line" \
    --configs "${configs[@]}" "${options[@]}" || status=$?
  [ $status = 0 ] || [ $status = 3 ] || die "no report could be made"
  publish
  if [ $quick = yes ]; then say "(A quick run: the losses mean little.)"; fi
  say "Report: $out/report.html   (figures: $out/summary.json; finished after $(elapsed))"
  exit $status
}

main() {
  command_line="$*"
  parse "$@"
  check_out
  check_paths
  if [ "${QUICKSTART_INSIDE:-}" != yes ]; then
    announce
    "$SOTTO_ROOT/integration/setup.sh" run
    need_tools
    build
  else
    need_tools
  fi
  check_config
  choose_isolation "$@"
  trap tidy_up EXIT
  trap interrupted INT TERM HUP
  export OPENBLAS_NUM_THREADS=1 # the ranks share the cores already
  prepare
  start_network
  launches=0
  trace_all
  train_all
  finish
}

main "$@"
