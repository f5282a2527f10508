#!/usr/bin/env bash
# A small network of "hosts" on one machine: network namespaces around a bridge, every link with its own rate, and delay
# and loss if wanted. The machine's own network is not touched: the bridge has a namespace of its own too.
set -euo pipefail

usage() {
  cat <<'END'
usage: integration/netns/lab.sh COMMAND

  up N RATE [OPTIONS]   make hosts 1..N (10.79.0.1 .. 10.79.0.N and fd00:79::1 .. fd00:79::N on eth0) on one bridge.
                        RATE bounds both directions of every link: 500kbit, 100mbit, 1gbit, 10gbit, .. or none
      --delay TIME      added round-trip time between any two hosts, half of it in each direction: 500us, 50ms, 1s (0)
      --loss PERCENT    share of the packets that are lost, in each direction: 0.1, 1, .. (0)
      --interfaces 2    a second interface: eth1, 10.80.0.I and fd00:80::I, on a bridge of its own
      --mtu BYTES       largest packet of the hosts' interfaces, 1280 to 65535 (1500); not with delay, loss or --seed
      --seed N          draw losses from this seed, which only the TUN program can; it is then used in any case
  rate RATE             change the rate of all links
  delay TIME            change the added round-trip time between all hosts
  loss PERCENT          change the loss on all links
  partition I [I..]     cut these hosts from all others, not from each other; takes the place of an earlier partition
  heal                  end the partition
  down                  end every process in the hosts and remove them
  exec I CMD..          run CMD in host I
  wrap CMD..            run CMD in host SOTTO_RANK + 1, with SOTTO_LISTEN set to its address and SOTTO_HOST_ID to its
                        name (for sotto-run --wrapper); with NETLAB_RANKS_PER_HOST=R ranks 0 to R - 1 are in host 1, ..
  address I [--ipv6] [--interface eth1]   print an address of host I
  describe              print how the links are made, congestion control and kernel
  check                 can hosts be made here? Exit code 0 and "root" or "userns", else 1 and the reason
  enter CMD..           run CMD where hosts can be made: here if this is root, else in a new user namespace

NETLAB names the lab (default: sotto), so that several can live side by side. Needs root, or permission to create user
namespaces, and iproute2. Delay and loss need netem in the kernel, or else /dev/net/tun and the program sotto-tunlink:
NETLAB_TUNLINK says where it is (default: build/PRESET/bin). integration/netns/README.md has more.
END
}

# ip and tc live in sbin, which is not on every user's PATH.
PATH=$PATH:/usr/sbin:/sbin
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
LAB=${NETLAB:-sotto}
MAX_HOSTS=250
MAX_DELAY_US=10000000
TUN_NEEDED="delay and loss without netem in the kernel, and --seed, need /dev/net/tun"
NETEM_PACKETS=100000 # on one delay line; its default of 1000 is 0.1 s at 100 Mbit/s

die() {
  printf 'lab.sh: %s\n' "$*" >&2
  exit 1
}

address() { printf '10.%d.0.%d\n' $((79 + ${2:-0})) "$1"; }
address6() { printf 'fd00:%d::%d\n' $((79 + ${2:-0})) "$1"; }
host() { printf '%s-%d\n' "$LAB" "$1"; }
bridge() { printf '%s-bridge\n' "$LAB"; }
namespaces() { ip netns list | awk '{print $1}' | grep -E "^$LAB-([0-9]+|bridge)$" || true; }
hosts() { namespaces | sed -n 's/.*-\([0-9]*\)$/\1/p' | sort -n; }
interfaces() { ip -n "$(bridge)" -br link show type bridge | sed -n 's/^bridge\([01]\).*/\1/p'; }
is_host() { [[ $1 =~ ^[1-9][0-9]{0,2}$ ]] && [ -e "/run/netns/$(host "$1")" ]; }

# ---- values ----

# bits_per_second RATE: checks it, too. 0: none
bits_per_second() {
  local number unit
  [ "$1" != none ] || { echo 0 && return; }
  [[ $1 =~ ^([0-9]{1,9})(kbit|mbit|gbit)$ ]] || die "rate '$1': expected none or a number with kbit, mbit or gbit"
  number=$((10#${BASH_REMATCH[1]})) unit=${BASH_REMATCH[2]}
  [ "$number" -gt 0 ] || die "rate '$1': must be above 0 (none = unlimited)"
  case $unit in
    kbit) number=$((number * 1000)) ;;
    mbit) number=$((number * 1000000)) ;;
    gbit) number=$((number * 1000000000)) ;;
  esac
  [ $number -le 100000000000 ] || die "rate '$1': at most 100gbit (none = unlimited)"
  echo $number
}

microseconds() {
  local number
  [ "$1" != 0 ] || { echo 0 && return; }
  [[ $1 =~ ^([0-9]{1,8})(us|ms|s)$ ]] || die "delay '$1': expected 0 or a whole number with us, ms or s"
  number=$((10#${BASH_REMATCH[1]}))
  case ${BASH_REMATCH[2]} in
    ms) number=$((number * 1000)) ;;
    s) number=$((number * 1000000)) ;;
  esac
  [ $number -le $MAX_DELAY_US ] || die "delay '$1': at most $((MAX_DELAY_US / 1000000))s"
  echo $number
}

# loss_ppm PERCENT: in packets of a million.
loss_ppm() {
  local ppm
  [[ $1 =~ ^([0-9]{1,3})(\.([0-9]{1,4}))?$ ]] || die "loss '$1': expected percent from 0 to 100, at most 4 digits after the point"
  ppm=${BASH_REMATCH[3]}0000
  ppm=$((10#${BASH_REMATCH[1]} * 10000 + 10#${ppm:0:4}))
  [ $ppm -le 1000000 ] || die "loss '$1': expected percent from 0 to 100"
  echo $ppm
}

# check_values RATE DELAY LOSS: sets bits, delay_us and ppm.
check_values() {
  bits=$(bits_per_second "$1") || exit 1
  delay_us=$(microseconds "$2") || exit 1
  ppm=$(loss_ppm "$3") || exit 1
}

# What a lab is like, "WAY RATE DELAY LOSS" with veth or tun as WAY, is kept as the alias of a device of the lab: it lives
# and dies with it.
remember() { ip -n "$(bridge)" link set lo alias "$*"; }
recall() { ip -n "$(bridge)" -o link show lo 2>/dev/null | sed -n 's/.*alias //p'; }

# read_lab: sets way, rate, delay and loss.
read_lab() {
  read -r way rate delay loss <<<"$(recall)"
  [ -n "$way" ] || die "lab '$LAB' is not up"
}

# ---- links ----

# bucket BITS: burst and queue of a token bucket. Bucket of 256 KB: 21 ms at 100 Mbit/s. The queue in front of it may hold
# what passes in 20 ms, and as much as the bucket; a slow link needs more, or a burst of four peers is dropped instead of
# queued. Above 1 Gbit/s 256 KB are less than what passes between two looks at the bucket.
bucket() {
  local latency_ms=20
  burst=$((256 * 1024))
  [ "$1" -gt 100000000 ] || latency_ms=100
  [ "$1" -le 1000000000 ] || burst=$(($1 / 8 / 500))
  queue=$((burst + $1 / 8000 * latency_ms))
}

# shape NAMESPACE DEVICE BITS DELAY_US PPM. netem decides when a packet leaves the delay, the bucket below it when it is sent.
shape() {
  local namespace=$1 device=$2 bits=$3 delay_us=$4 ppm=$5 burst queue
  local -a parent=(root)
  if [ "$delay_us" -gt 0 ] || [ "$ppm" -gt 0 ]; then
    tc -n "$namespace" qdisc replace dev "$device" root handle 1: netem limit $NETEM_PACKETS delay "${delay_us}us" \
      loss "$((ppm / 10000)).$(printf %04d $((ppm % 10000)))%"
    # A loss is one packet, not up to 64 KB that would be cut into packets later.
    ip -n "$namespace" link set dev "$device" gso_max_segs 1
    parent=(parent 1:1)
  fi
  if [ "$bits" -gt 0 ]; then
    bucket "$bits"
    tc -n "$namespace" qdisc replace dev "$device" "${parent[@]}" tbf rate "${bits}bit" burst $burst limit $queue
  else
    tc -n "$namespace" qdisc del dev "$device" "${parent[@]}" 2>/dev/null || true
  fi
}

has_netem() {
  tc -n "$(bridge)" qdisc replace dev lo root netem delay 1ms 2>/dev/null && tc -n "$(bridge)" qdisc del dev lo root
}

# A bucket at both ends of every link bounds what a host sends and what it receives. Delay and loss are at the end of the
# sender.
shape_veth() {
  local i k
  for i in $(hosts); do
    for k in $(interfaces); do
      shape "$(host "$i")" "eth$k" "$1" $(($2 / 2)) "$3"
      shape "$(bridge)" "port$i-$k" "$1" 0 0
    done
  done
}

# control REQUEST..: to the lab's sotto-tunlink, by the program that it is.
control() {
  local pid
  for pid in $(ip netns pids "$(bridge)"); do
    [[ $(readlink "/proc/$pid/exe") = */sotto-tunlink* ]] || continue
    ip netns exec "$(bridge)" "/proc/$pid/exe" "$@"
    return
  done
  die "the links of lab '$LAB' are gone, since its sotto-tunlink has ended: lab.sh down"
}

shape_tun() {
  local burst queue
  bucket "$1"
  control set "$1" $burst $queue $(($2 * 500)) "$3"
}

find_tunlink() {
  local program
  for program in ${NETLAB_TUNLINK:+"$NETLAB_TUNLINK"} "$HERE"/../../build/{dev,release,quickstart}/bin/sotto-tunlink; do
    if [ -x "$program" ]; then readlink -f "$program" && return; fi
    [ "$program" != "${NETLAB_TUNLINK:-}" ] || die "NETLAB_TUNLINK: '$program' is not a program"
  done
  die "this needs the program sotto-tunlink, which is not built (delay and loss without netem in the kernel, --seed). \
Build it: cmake --preset dev && cmake --build --preset dev --target sotto-tunlink; or name it in NETLAB_TUNLINK"
}

# start_tunlink SEED: TUN devices, one in each host, take the place of veth pairs. Nothing is changed if they cannot be made.
start_tunlink() {
  local i program reason
  local -a words=(--lab "/run/netns/$(bridge)" --seed "$1")
  program=$(find_tunlink) || exit 1
  [ -c /dev/net/tun ] || die "$TUN_NEEDED, which does not exist here (modprobe tun)"
  reason=$( (: <>/dev/net/tun) 2>&1) || die "$TUN_NEEDED, which cannot be opened: ${reason##*: }"
  [ -z "${NETLAB_OWNER:-}" ] || words+=(--owner "$NETLAB_OWNER")
  for i in $(hosts); do
    ip -n "$(host "$i")" link del eth0 2>/dev/null || true
    words+=("$i,/run/netns/$(host "$i"),$(address "$i"),$(address6 "$i")")
  done
  ip netns exec "$(bridge)" "$program" run "${words[@]}" || die "cannot make TUN devices"
  for i in $(hosts); do
    # The queue of a TUN device is no part of the link: what it drops is counted nowhere.
    ip -n "$(host "$i")" link set eth0 txqueuelen 10000
    configure "$i" 0
  done
}

# set_links WAY RATE DELAY LOSS
set_links() {
  check_values "$2" "$3" "$4"
  "shape_$1" "$bits" "$delay_us" "$ppm"
  remember "$@"
}

# needs_tunlink: whether a lab of veth pairs cannot have the delay and loss wanted.
needs_tunlink() {
  [ "$delay_us" -gt 0 ] || [ "$ppm" -gt 0 ] || return 1
  ! has_netem
}

# change rate|delay|loss VALUE. Connections outlive a change from veth pairs to TUN devices: addresses stay the same.
change() {
  local way rate delay loss bits delay_us ppm
  read_lab
  printf -v "$1" %s "$2"
  check_values "$rate" "$delay" "$loss"
  if [ "$way" = veth ] && needs_tunlink; then
    [ "$(interfaces | wc -l)" = 1 ] || die "$1: a lab with two interfaces needs netem for delay and loss, which this kernel lacks"
    [ -z "$(ip -n "$(bridge)" -br link show master cut0)" ] || die "$1: heal the partition first"
    start_tunlink 1
    way=tun
  fi
  set_links "$way" "$rate" "$delay" "$loss"
}

# ---- partitions ----

# Hosts that are apart have a bridge of their own.
move_port() { ip -n "$(bridge)" link set "port$1-$2" master "$3$2"; }

partition() {
  local way rate delay loss i k
  read_lab
  for i in "$@"; do is_host "$i" || die "partition: no host '$i' in lab '$LAB' ($(hosts | paste -sd ' '))"; done
  if [ "$way" = tun ]; then
    control part "$@"
    return
  fi
  for k in $(interfaces); do
    for i in $(hosts); do
      if [[ " $* " = *" $i "* ]]; then move_port "$i" "$k" cut; else move_port "$i" "$k" bridge; fi
    done
  done
}

# ---- hosts ----

# configure I K: addresses of interface ethK. Reno in the namespace and on the route: a default such as BBR paces below the
# link's rate and would flatter the sender of fewer bytes. Metrics of earlier connections are not reused.
configure() {
  local i=$1 k=$2 namespace
  namespace=$(host "$i")
  ip -n "$namespace" addr add "$(address "$i" "$k")/24" dev "eth$k"
  [ ! -d /proc/sys/net/ipv6 ] || ip -n "$namespace" addr add "$(address6 "$i" "$k")/64" dev "eth$k" nodad
  ip -n "$namespace" link set "eth$k" up
  ip -n "$namespace" route replace "$(address 0 "$k")/24" dev "eth$k" congctl reno
}

add_host() {
  local namespace
  namespace=$(host "$1")
  ip netns add "$namespace"
  ip -n "$namespace" link set lo up
  ip netns exec "$namespace" sysctl -qw net.ipv4.tcp_congestion_control=reno net.ipv4.tcp_no_metrics_save=1
}

add_bridge() {
  local name
  for name in "bridge$1" "cut$1"; do
    ip -n "$(bridge)" link add "$name" type bridge mcast_snooping 0
    ip -n "$(bridge)" link set "$name" up
  done
}

# add_veth I K MTU: the bridge takes the smallest MTU of its ports.
add_veth() {
  ip link add "eth$2" netns "$(host "$1")" mtu "$3" type veth peer name "port$1-$2" mtu "$3" netns "$(bridge)"
  move_port "$1" "$2" bridge
  ip -n "$(bridge)" link set "port$1-$2" up
  configure "$1" "$2"
}

parse_up() {
  while [ $# -gt 0 ]; do
    case $1 in --delay | --loss | --interfaces | --seed | --mtu) ;; *) die "up: unknown option '$1'" ;; esac
    [ $# -ge 2 ] || die "up: $1 needs a value"
    case $1 in
      --delay) delay=$2 ;;
      --loss) loss=$2 ;;
      --interfaces) [[ $2 =~ ^[12]$ ]] || die "--interfaces '$2': expected 1 or 2" && interfaces=$2 ;;
      --mtu)
        if ! [[ $2 =~ ^[0-9]{4,5}$ ]] || [ "$2" -lt 1280 ] || [ "$2" -gt 65535 ]; then
          die "--mtu '$2': expected 1280 to 65535 bytes"
        fi
        mtu=$2 ;;
      --seed) [[ $2 =~ ^[0-9]{1,18}$ ]] || die "--seed '$2': expected a whole number" && seed=$2 ;;
    esac
    shift 2
  done
}

# up N RATE [OPTIONS]
up() {
  local n=$1 rate=$2 delay=0 loss=0 interfaces=1 seed='' mtu=1500 way=veth i k bits delay_us ppm
  if ! [[ $n =~ ^[1-9][0-9]{0,2}$ ]] || [ "$n" -gt $MAX_HOSTS ]; then
    die "number of hosts '$n': expected 1 to $MAX_HOSTS"
  fi
  shift 2
  parse_up "$@"
  check_values "$rate" "$delay" "$loss"
  [ -z "$(namespaces)" ] || die "lab '$LAB' is up already: lab.sh down first, or another name in NETLAB"
  trap down EXIT # half a lab is removed again
  ip netns add "$(bridge)"
  if [ -n "$seed" ] || needs_tunlink; then way=tun; fi
  if [ $way = tun ] && [ "$mtu" != 1500 ]; then
    die "--mtu $mtu: not with TUN devices, which --seed asks for, and delay and loss if the kernel lacks netem"
  fi
  if [ $way = tun ] && [ "$interfaces" = 2 ]; then
    die "--interfaces 2: not with TUN devices, which --seed asks for, and delay and loss if the kernel lacks netem"
  fi
  for ((i = 1; i <= n; i++)); do add_host "$i"; done
  if [ $way = tun ]; then
    start_tunlink "${seed:-1}"
  else
    for ((k = 0; k < interfaces; k++)); do
      add_bridge "$k"
      for ((i = 1; i <= n; i++)); do add_veth "$i" "$k" "$mtu"; done
    done
  fi
  set_links $way "$rate" "$delay" "$loss"
  trap - EXIT
}

# Processes first: a namespace lives as long as a process is in it.
down() {
  local namespace pids
  for namespace in $(namespaces); do
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
  is_host "$i" || die "no host $i in lab '$LAB'"
  exec ip netns exec "$(host "$i")" "$@"
}

wrap() {
  local i ranks=${NETLAB_RANKS_PER_HOST:-1}
  [[ ${SOTTO_RANK:-} =~ ^[0-9]+$ ]] || die "wrap needs SOTTO_RANK, as sotto-run sets it"
  [[ $ranks =~ ^[1-9][0-9]{0,2}$ ]] || die "NETLAB_RANKS_PER_HOST '$ranks': expected 1 to 999"
  i=$((SOTTO_RANK / ranks + 1))
  SOTTO_LISTEN=$(address "$i")
  # The hosts of a lab have one name and one kernel, by which ranks would take them for one host.
  SOTTO_HOST_ID=${SOTTO_HOST_ID:-$(host "$i")}
  export SOTTO_LISTEN SOTTO_HOST_ID
  exec_in "$i" "$@"
}

# address_of I [--ipv6] [--interface ethK]
address_of() {
  local i=$1 k=0 which=address
  if ! [[ $i =~ ^[1-9][0-9]{0,2}$ ]] || [ "$i" -gt $MAX_HOSTS ]; then die "host '$i': expected 1 to $MAX_HOSTS"; fi
  shift
  while [ $# -gt 0 ]; do
    case "$1 ${2:-}" in
      "--ipv6 "*) which=address6 ;;
      "--interface eth0" | "--interface eth1") k=${2#eth} && shift ;;
      "--interface "*) die "--interface '${2:-}': expected eth0 or eth1" ;;
      *) die "address: unknown option '$1'" ;;
    esac
    shift
  done
  $which "$i" "$k"
}

describe() {
  local way rate delay loss first links
  read_lab
  first=$(host "$(hosts | head -n 1)")
  if [ "$way" = tun ]; then
    links="sotto-tunlink rate $rate round trip +$delay loss $loss% ($(control counters))"
  else
    links=$(tc -n "$first" qdisc show dev eth0 | sed 's/^qdisc //; s/ [0-9a-f]*: / /; s/ *root refcnt [0-9]*//; s/ *$//' | paste -sd, | sed 's/,/, /g')
  fi
  printf '%s; congestion control %s; kernel %s\n' "$links" \
    "$(ip netns exec "$first" sysctl -n net.ipv4.tcp_congestion_control)" "$(uname -r)"
}

# try_here: one small lab, made and removed. Its first complaint is the reason.
try_here() { NETLAB="sotto-try$$" "$0" up 1 100mbit && NETLAB="sotto-try$$" "$0" down; }

enter() {
  if [ "$(id -u)" = 0 ]; then exec "$@"; fi
  # /run is hidden by an empty one, so that `ip netns` may keep its list there. A lab made inside ends with this process,
  # which becomes CMD.
  NETLAB_OWNER=$BASHPID exec unshare --user --map-root-user --net --mount \
    sh -c 'mount -t tmpfs lab /run && exec "$@"' enter "$@"
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
  [[ $LAB =~ ^[A-Za-z0-9_-]{1,60}$ ]] || die "NETLAB '$LAB': expected at most 60 letters, digits, - and _"
  case $command in
    up) need $# 2 && up "$@" ;;
    rate | delay | loss) need $# 1 && change "$command" "$1" ;;
    partition) need $# 1 && partition "$@" ;;
    heal) partition ;;
    down) down ;;
    exec) need $# 2 && exec_in "$@" ;;
    wrap) need $# 1 && wrap "$@" ;;
    address) need $# 1 && address_of "$@" ;;
    describe) describe ;;
    check) check ;;
    try) try_here ;;
    enter) need $# 1 && enter "$@" ;;
    -h | --help) usage ;;
    *) printf 'lab.sh: unknown command %s\n' "$command" >&2 && usage >&2 && exit 2 ;;
  esac
}

main "$@"
