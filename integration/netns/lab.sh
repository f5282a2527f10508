#!/usr/bin/env bash
# A small network of "hosts" on one machine: network namespaces around a bridge, every link with its own rate.
# The machine's own network is not touched: the bridge has a namespace of its own too.
set -euo pipefail

usage() {
  cat <<'END'
usage: integration/netns/lab.sh COMMAND

  up N RATE     make hosts 1..N (10.79.0.1 .. 10.79.0.N) on one bridge; RATE bounds both directions of every link:
                100mbit, 1gbit, 500kbit, or none
  rate RATE     change the rate of all links
  down          end every process in the hosts and remove them
  exec I CMD..  run CMD in host I
  wrap CMD..    run CMD in host SOTTO_RANK + 1, with SOTTO_LISTEN set to its address (for sotto-run --wrapper)
  address I     print the address of host I
  describe      print queueing discipline, congestion control and kernel
  check         can hosts be made here? Exit code 0 and "root" or "userns", else 1 and the reason
  enter CMD..   run CMD where hosts can be made: here if this is root, else in a new user namespace

NETLAB names the lab (default: sotto), so that several can live side by side. Needs root, or permission to create user
namespaces, and iproute2.
END
}

# ip and tc live in sbin, which is not on every user's PATH.
PATH=$PATH:/usr/sbin:/sbin
LAB=${NETLAB:-sotto}
MAX_HOSTS=250

die() {
  printf 'lab.sh: %s\n' "$*" >&2
  exit 1
}

address() { printf '10.79.0.%d\n' "$1"; }
host() { printf '%s-%d\n' "$LAB" "$1"; }
bridge() { printf '%s-bridge\n' "$LAB"; }
namespaces() { ip netns list | awk '{print $1}' | grep -E "^$LAB-([0-9]+|bridge)$" || true; }
hosts() { namespaces | grep -v -- '-bridge$' || true; }

# bits_per_second RATE: checks it, too.
bits_per_second() {
  local number unit
  [[ $1 =~ ^([0-9]+)(kbit|mbit|gbit)$ ]] || die "rate '$1': expected none or a number with kbit, mbit or gbit"
  number=${BASH_REMATCH[1]} unit=${BASH_REMATCH[2]}
  [ "$number" -gt 0 ] || die "rate '$1': must be above 0 (none = unlimited)"
  case $unit in
    kbit) echo $((number * 1000)) ;;
    mbit) echo $((number * 1000000)) ;;
    gbit) echo $((number * 1000000000)) ;;
  esac
}

# Bucket of 256 KB: 21 ms at 100 Mbit/s. The queue in front of it may hold what passes in `latency`; a slow link needs
# a longer one, or a burst of four peers is dropped instead of queued.
shape() {
  local namespace=$1 device=$2 rate=$3 latency=20ms
  if [ "$rate" = none ]; then
    ip netns exec "$namespace" tc qdisc del dev "$device" root 2>/dev/null || true
    return
  fi
  [ "$(bits_per_second "$rate")" -gt 100000000 ] || latency=100ms
  ip netns exec "$namespace" tc qdisc replace dev "$device" root tbf rate "$rate" burst 256kb latency "$latency"
}

# set_rate RATE: a bucket at both ends of every link bounds what a host sends and what it receives.
set_rate() {
  local rate=$1 namespace i
  [ "$rate" = none ] || bits_per_second "$rate" >/dev/null
  [ -n "$(hosts)" ] || die "lab '$LAB' is not up"
  for namespace in $(hosts); do
    i=${namespace##*-}
    shape "$namespace" eth0 "$rate"
    shape "$(bridge)" "port$i" "$rate"
  done
}

# Reno in the namespace and on the route: a default such as BBR paces below the link's rate and would flatter whoever
# sends less. Metrics of earlier connections are not reused.
set_congestion_control() {
  local namespace=$1
  ip netns exec "$namespace" sysctl -qw net.ipv4.tcp_congestion_control=reno
  ip netns exec "$namespace" sysctl -qw net.ipv4.tcp_no_metrics_save=1
  ip -n "$namespace" route replace 10.79.0.0/24 dev eth0 congctl reno
}

add_host() {
  local i=$1 namespace
  namespace=$(host "$i")
  ip netns add "$namespace"
  ip link add eth0 netns "$namespace" type veth peer name "port$i" netns "$(bridge)"
  ip -n "$(bridge)" link set "port$i" master bridge0 up
  ip -n "$namespace" addr add "$(address "$i")/24" dev eth0
  ip -n "$namespace" link set lo up
  ip -n "$namespace" link set eth0 up
  set_congestion_control "$namespace"
}

up() {
  local n=$1 rate=$2 i
  if ! [[ $n =~ ^[1-9][0-9]{0,2}$ ]] || [ "$n" -gt $MAX_HOSTS ]; then
    die "number of hosts '$n': expected 1 to $MAX_HOSTS"
  fi
  [ "$rate" = none ] || bits_per_second "$rate" >/dev/null
  [ -z "$(namespaces)" ] || die "lab '$LAB' is up already: lab.sh down first, or another name in NETLAB"
  trap down EXIT # half a lab is removed again
  ip netns add "$(bridge)"
  ip -n "$(bridge)" link add bridge0 type bridge
  ip -n "$(bridge)" link set bridge0 up
  for ((i = 1; i <= n; i++)); do add_host "$i"; done
  set_rate "$rate"
  trap - EXIT
}

# Processes first: a namespace lives as long as somebody is in it.
down() {
  local namespace pids
  for namespace in $(hosts); do
    pids=$(ip netns pids "$namespace" 2>/dev/null || true)
    # shellcheck disable=SC2086  # one word per process
    [ -z "$pids" ] || kill -KILL $pids 2>/dev/null || true
  done
  for namespace in $(namespaces); do ip netns del "$namespace"; done
}

exec_in() {
  local i=$1
  shift
  [[ $i =~ ^[0-9]+$ ]] || die "host '$i': expected a number"
  ip netns list | grep -q "^$(host "$i")\b" || die "no host $i in lab '$LAB'"
  exec ip netns exec "$(host "$i")" "$@"
}

wrap() {
  local i
  [[ ${SOTTO_RANK:-} =~ ^[0-9]+$ ]] || die "wrap needs SOTTO_RANK, as sotto-run sets it"
  i=$((SOTTO_RANK + 1))
  SOTTO_LISTEN=$(address "$i")
  export SOTTO_LISTEN
  exec_in "$i" "$@"
}

describe() {
  local first
  first=$(hosts | head -n 1)
  [ -n "$first" ] || die "lab '$LAB' is not up"
  printf '%s; congestion control %s; kernel %s\n' \
    "$(ip netns exec "$first" tc qdisc show dev eth0 | head -n 1 | sed 's/^qdisc //; s/ 8[0-9a-f]*: / /; s/root refcnt [0-9]* //; s/ *$//')" \
    "$(ip netns exec "$first" sysctl -n net.ipv4.tcp_congestion_control)" "$(uname -r)"
}

# try_here: one small lab, made and removed. Its first complaint is the reason.
try_here() { NETLAB="sotto-try$$" "$0" up 1 100mbit && NETLAB="sotto-try$$" "$0" down; }

enter() {
  if [ "$(id -u)" = 0 ]; then exec "$@"; fi
  # /run is hidden by an empty one, so that `ip netns` may keep its list there.
  exec unshare --user --map-root-user --net --mount sh -c 'mount -t tmpfs lab /run && exec "$@"' enter "$@"
}

check() {
  local way=root reason
  if ! command -v ip >/dev/null || ! command -v tc >/dev/null; then
    echo "iproute2 (ip, tc) is not installed"
    return 1
  fi
  [ "$(id -u)" = 0 ] || way=userns
  if reason=$(enter "$0" try 2>&1); then
    echo $way
  else
    printf '%s\n' "${reason:-network namespaces are not permitted}" | head -n 1
    return 1
  fi
}

need() { [ "$1" -ge "$2" ] || { usage >&2 && exit 2; }; }

main() {
  local command=${1:-}
  need $# 1
  shift
  case $command in
    up) need $# 2 && up "$1" "$2" ;;
    rate) need $# 1 && set_rate "$1" ;;
    down) down ;;
    exec) need $# 2 && exec_in "$@" ;;
    wrap) need $# 1 && wrap "$@" ;;
    address) need $# 1 && address "$1" ;;
    describe) describe ;;
    check) check ;;
    try) try_here ;;
    enter) need $# 1 && enter "$@" ;;
    -h | --help) usage ;;
    *) printf 'lab.sh: unknown command %s\n' "$command" >&2 && usage >&2 && exit 2 ;;
  esac
}

main "$@"
