#!/usr/bin/env python3
"""sotto bench net: all-reduces over links of a given rate, ours next to those of other libraries."""

import argparse
import contextlib
import os
import platform
import re
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(ROOT / "integration/netns")]

import command_line  # noqa: E402
import formulas  # noqa: E402
import gap  # noqa: E402
import lab as labs  # noqa: E402
import measure  # noqa: E402
import output  # noqa: E402
import rows as targets  # noqa: E402
import sides  # noqa: E402
import timeline  # noqa: E402

DEFAULT_N = 25_000_000
SINGLES, SINGLES_S = 200, 2.0  # small all-reduces per pair, fewer where they take more than so many seconds

# The short form: what a broken build would miss, and no more. (row, rate): the ratio has to be at least, or at most, this.
SHORT_N, SHORT_PAIRS, SHORT_SERIES_S, SHORT_SINGLES, SHORT_SINGLES_S = 300_000, 3, 0.4, 40, 0.6
SHORT_ROWS = {"100mbit": {10, 14, 16, 17}, "none": {13, 16, 19}}
SHORT_SMALL = (4, 4096, 65536)
ODD_SIZES = (1, 7, 511, 4097, 100_003)
FLOORS = {10: 5.0, 13: 1.0, 16: 0.3}
CEILINGS = {14: 3.0, 17: 3.0}
GOODPUT_FLOOR = 0.5  # share of a link's rate that our fp32 gets; needs no peer
SMALL_CEILING_MS = 30.0  # median of 4 bytes
# Bytes of our interfaces over the formula's: frames, acknowledgements, and what was sent again.
INTERFACE_CEILING = 1.15

EPILOG = """\
Rows of the table of targets:
""" + "\n".join(f"  {row:<4}{what}; {where}" for row, (what, where) in targets.ROWS.items()) + """

Method. All ranks run at once, each in a network namespace of its own behind links with token buckets at both ends
(integration/netns/lab.sh). Sides take turns, one active at a time while the others sleep in read: a warm-up turn, then
--pairs turns. A figure of a turn is one operation of a series back to back, after a barrier, on the slowest rank; 3, 1 or
0 operations before it do not count, so that the burst that a bucket lets through at once does not. Series have 20
operations, fewer if they would take more than 4 s, at least one. Ratios are those of the same turn; their median and interquartile range are shown, and a target counts as
reached if the range is below 10 %. The best fp32 peer is what 1 bit is compared with. Peers run in their best setting:
gloo and Open MPI on the right interface, Open MPI also with its ring, yielding when idle, not bound to cores; MPICH over
UCX's TCP. On one host MPI libraries have their own shared memory. Results are compared with the mean, element by element, and have to be equal on all ranks; bytes sent have to
equal plan and formula; if not, the exit code is 1. Bound of row 14: max(encode, wire / 2) + max(server + decode, wire / 2),
kernels by their processor time (times ranks / cores), wire = bytes / (0.956 x rate).

Time: 25 000 000 elements, 4 ranks, all peers, 7 pairs: about 13 minutes at 100mbit, 2 hours at 10mbit, 5 minutes at 1gbit
and above; 3 to 5 minutes for row 19. The estimate is printed first; a smaller --n shortens all but row 19.
Peers: integration/setup.sh bench installs them. Those that are missing are skipped, with the reason.

Examples:
  sotto bench net --rate 100mbit --json net.jsonl
  sotto bench net --rate 1gbit --delay 50ms --rows 28
  sotto bench net --rate none --rows 19 --ranks 2
  sotto bench net --one-host
  sotto bench net --hosts 2x2 --peers openmpi,mpich
  sotto bench net --rate 1gbit --ucx --peers ""
  sotto bench net --rate 1gbit --timeline line
  sotto bench net --rate 1gbit --beside-bulk
  sotto bench net --gap 10ms
  sotto bench net --gap 10ms --mtu 9000 --ranks 2
  sotto bench net --plot net.svg --json net.jsonl

Rows 18 (bytes on the interface) and 27 (overheads) are `sotto bench wire_bytes` and `sotto bench overheads`.
"""


def say(text):
    print(text, flush=True)


def a_time(text):
    try:
        labs.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def between(low, high, kind=int):
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a number from {low} to {high}")
        return value
    return parse


def a_grid(text):
    """Hosts and ranks on each."""
    match = re.fullmatch("([2-8])x([2-8])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"'{text}' is not like 2x2: hosts x ranks on each, from 2 to 8")
    return int(match[1]), int(match[2])


def words_of(allowed, kind=str):
    def parse(text):
        found = [word for word in text.split(",") if word]
        wrong = [word for word in found if word not in map(str, allowed)]
        if wrong:
            raise argparse.ArgumentTypeError(f"'{wrong[0]}' is not one of {', '.join(map(str, allowed))}")
        return [kind(word) for word in found]
    return parse


def parse(arguments):
    parser = argparse.ArgumentParser(prog="sotto bench net", description=__doc__.split(": ", 1)[1], epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=labs.a_rate, help="of every link, both directions: 10mbit, 100mbit, "
                        "1gbit, 10gbit, none, .. (default: 100mbit; with --gap none)")
    parser.add_argument("--ranks", type=between(2, 64), help="(default: 4; with --gap first 2, then 4)")
    parser.add_argument("--n", type=between(1, 1 << 31), help="elements of the large all-reduces (default: 25000000)")
    parser.add_argument("--delay", type=a_time, help="added round-trip time between any two hosts: 50ms, ..")
    parser.add_argument("--loss", type=between(0.0, 50.0, float), help="packets lost, percent")
    parser.add_argument("--mtu", type=between(1280, 65535), help="largest packet of the hosts' interfaces, in bytes (default: 1500)")
    parser.add_argument("--loopback", action="store_true", help="ranks beside each other on loopback, without hosts, peers and links; "
                        "a --rate is held by the TCP transport")
    parser.add_argument("--one-host", action="store_true", help="ranks beside each other on one host without a limit: ours by shared "
                        "memory and over TCP, gloo over TCP, MPI libraries with their own shared memory")
    parser.add_argument("--hosts", type=a_grid, metavar="HxR", help="H hosts of R ranks each: ours in two levels next to one, with "
                        "shared memory inside hosts, and MPI libraries with their own; only such rows")
    parser.add_argument("--ucx", action="store_true", help="ours over UCX's sockets, too, next to ours over its own")
    parser.add_argument("--peers", type=words_of(sides.PEERS), default=list(sides.PEERS),
                        help="out of " + ",".join(sides.PEERS) + " (default: all that are installed; \"\": none)")
    parser.add_argument("--rows", type=words_of(targets.ROWS, int), help="which rows (default: all that apply)")
    parser.add_argument("--pairs", type=between(7, 1001), default=7, help="turns that count (default: 7)")
    parser.add_argument("--cores", type=between(1, 4096), help="let all ranks use only so many cores (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON line per figure and row")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--timeline", metavar="PREFIX", help="measure no rows: show what the time of one all-reduce of each of "
                         "our methods is spent on, and leave its traces as PREFIX-METHOD.rankR.json, for Perfetto")
    instead.add_argument("--beside-bulk", action="store_true", help="measure no rows: latency of 4-byte all-reduces that begin "
                         "while one of --n float32 is under way")
    instead.add_argument("--gap", type=a_time, metavar="TIME", help="measure no rows: float32 all-reduces of 1 kB to 20 MB (or of --n) with "
                         "a pause of TIME before each, in which ranks sleep, next to the same with fixed send buffers; at most 1.2 times "
                         "as long as with the best of these. On loopback, and between hosts with packets of 1500 and 9000 bytes, unless "
                         "--loopback or --mtu choose one: 2 minutes each")
    instead.add_argument("--short", action="store_true", help="for tests, one minute: small sizes at 100mbit and without a "
                         "limit, odd sizes; exit code 1 below loose limits")
    instead.add_argument("--plot", type=Path, metavar="SVG", help="measure nothing: draw the times in --json FILE against "
                         "the links' rate")
    parser.add_argument("--sotto-perf", required=True, help=argparse.SUPPRESS)  # sotto-perf passes it
    options = parser.parse_args(arguments)
    if options.plot and not options.json:
        parser.error("--plot draws what --json FILE has: name that too")
    options.rate = options.rate or ("none" if options.gap or options.one_host else "100mbit")
    options.gap_ranks = (options.ranks,) if options.ranks else gap.RANKS
    if options.hosts:
        if options.ranks or options.rows:
            parser.error("--hosts says how many ranks there are, and has rows of its own: neither --ranks nor --rows go with it")
        options.ranks = options.hosts[0] * options.hosts[1]
    options.ranks = options.ranks or 4
    options.bits_per_second = labs.bits_per_second(options.rate)
    options.delay_s = labs.seconds(options.delay) if options.delay else 0.0
    options.sizes = gap.SIZES if options.n is None else (4 * options.n,)
    options.n = options.n or DEFAULT_N
    check_network(parser, options)
    check_cores(parser, options)
    check_files(parser, options)
    if not (options.short or options.timeline or options.beside_bulk or options.gap):
        can = targets.applicable(options.bits_per_second, options.delay_s, options.peers)
        for row in options.rows or []:
            if row not in can:
                parser.error(f"--rows: row {row} applies to {targets.ROWS[row][1]}; with these options there are rows "
                             f"{', '.join(map(str, sorted(can)))}")
        options.rows = set(options.rows or can)
    return options


def check_network(parser, options):
    for name, value in (("--delay", options.delay), ("--loss", options.loss), ("--mtu", options.mtu)):
        if options.loopback and value is not None:
            parser.error(f"--loopback has no hosts whose links could have a {name}")
    if options.one_host:
        for name, value in (("--rate", options.bits_per_second), ("--delay", options.delay), ("--loss", options.loss),
                            ("--mtu", options.mtu), ("--loopback", options.loopback), ("--gap", options.gap),
                            ("--short", options.short), ("--ucx", options.ucx), ("--hosts", options.hosts), ("--timeline", options.timeline), ("--beside-bulk", options.beside_bulk)):
            if value:
                parser.error(f"--one-host has no links, and measures rows: {name} does not go with it")
    for name, value in (("--loopback", options.loopback), ("--gap", options.gap), ("--short", options.short), ("--ucx", options.ucx),
                        ("--timeline", options.timeline), ("--beside-bulk", options.beside_bulk)):
        if options.hosts and value:
            parser.error(f"--hosts measures rows of its own: {name} does not go with it")
    if options.mtu is not None and (options.delay or options.loss):
        parser.error("--mtu: links with --delay or --loss have 1500")
    for name, value in (("--timeline", options.timeline), ("--gap", options.gap)):
        if options.ucx and value:
            parser.error(f"--ucx is for rows and --beside-bulk: {name} does not go with it")
    for name, value in (("--timeline", options.timeline), ("--beside-bulk", options.beside_bulk), ("--gap", options.gap)):
        if value and (options.rows or options.peers != list(sides.PEERS)):
            parser.error(f"{name} measures no rows, and ours alone: neither --rows nor --peers go with it")


def check_cores(parser, options):
    there = len(os.sched_getaffinity(0))
    if options.cores and options.cores > there:
        parser.error(f"--cores: found {options.cores}, allowed is 1 to {there}, the cores that this process may run on")


def check_files(parser, options):
    for name, value in (("--timeline", options.timeline), ("--beside-bulk", options.beside_bulk)):
        if value and options.json:
            parser.error(f"{name} shows what it finds: --json does not go with it")
    if options.timeline and not Path(options.timeline).resolve().parent.is_dir():
        parser.error(f"--timeline: there is no folder {Path(options.timeline).resolve().parent}")
    if not options.plot:
        command_line.check_lines_file(parser, options.json)


def enter(options, arguments):
    """"netns", "loopback" or "one host". Where only a user namespace permits hosts, this program starts again inside one."""
    if options.loopback:
        return "loopback"
    if options.one_host:
        return "one host"
    how, reason = labs.enter(["-B", str(HERE / "run.py"), *arguments])
    if how:
        return "netns"
    if options.delay or options.loss or options.mtu or options.hosts:
        raise labs.LabError(f"--delay, --loss, --mtu and --hosts need network namespaces, which are not possible here: {reason}")
    say(f"skipped: rows next to peers, and bytes of interfaces: network namespaces are not possible here ({reason}); our "
        "ranks run over loopback, held to the rate by the TCP transport")
    return "loopback"


@contextlib.contextmanager
def a_lab(options, rate, isolation):
    if isolation == "netns":
        lab = labs.Lab(options.ranks, rate, Path(options.sotto_perf).resolve().parent, options.delay, options.loss,
                       mtu=options.mtu, per_host=options.hosts[1] if options.hosts else 1)
    else:
        lab = labs.Loopback(rate)
    try:
        yield lab
    finally:
        lab.close()


def setting_of(options, lab, rate, isolation, about):
    bits = lab.bits_per_second
    return output.Setting(bits, {
        "rate": rate, "rate_mbit": None if bits is None else bits / 1e6,
        "delay": options.delay, "loss": options.loss, "mtu": options.mtu, "gap": options.gap, "isolation": isolation,
        "ranks": options.ranks, "cores": len(os.sched_getaffinity(0)), "network": lab.description,
        "version": about["version"], "build": about["build"], "processor": processor(), "kernel": platform.release()})


def peers_folder(programs):
    """Where the peers' programs are compiled: in the build, or, for an installation, among the user's caches."""
    if (ROOT / "CMakeLists.txt").exists():
        return programs.parent / "net-peers"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sotto" / "net-peers"


class Network:
    """A lab, our ranks in it, and all peers that run here."""

    def __init__(self, options, rate, isolation):
        programs = Path(options.sotto_perf).resolve().parent
        self.sides, self.skipped = [], {}
        self._ends = contextlib.ExitStack()
        self.lab = self._ends.enter_context(a_lab(options, rate, isolation))
        try:
            for ours in self._ours(options, isolation):
                self.sides.append(ours)
                ours.start()
            ours = self.sides[0]
            for name in options.peers if isolation != "loopback" else ():
                try:
                    self.sides.append(sides.start_peer(name, self.lab, options.ranks, peers_folder(programs)))
                except sides.Missing as reason:
                    self.skipped[name] = str(reason)
            self.setting = setting_of(options, self.lab, rate, isolation, ours.about)
            self._check_delay(options)
        except BaseException:
            self.close()
            raise

    def _ours(self, options, isolation):
        """The first is the one that rows are about; neither is started."""
        programs = options.ranks, options.sotto_perf
        if options.hosts:
            ours = [sides.Ours(self.lab, *programs, SOTTO_TRANSPORT="shm"),
                    sides.Ours(self.lab, *programs, name=sides.SHARDED, SOTTO_TRANSPORT="shm", SOTTO_HIERARCHY="sharded")]
            for side in ours:
                side.methods = ("fp32", "int8", "1bit")
            return ours
        if isolation != "one host":
            ours = [sides.Ours(self.lab, *programs)]
            if options.ucx:
                ours.append(sides.over_ucx(self.lab, *programs))
                ours[1].methods = ("fp32", "1bit")
            return ours
        tcp = sides.Ours(self.lab, *programs, name=sides.OVER_TCP, SOTTO_TRANSPORT="tcp")
        tcp.methods = ("fp32", "1bit")
        return [sides.Ours(self.lab, *programs, SOTTO_TRANSPORT="shm"), tcp]

    def _check_delay(self, options):
        """A small all-reduce takes a round trip at least, or the delay is not there."""
        if not options.delay_s:
            return
        ours = self.sides[0]
        ours.tell("size 1")
        fastest = min(max(r["ns"][0] for r in ours.tell("singles fp32 1")) for _ in range(3)) * 1e-9
        say(f"with a delay of {options.delay} a 4-byte all-reduce takes {fastest * 1e3:.1f} ms at least")
        if fastest < 0.45 * options.delay_s:  # one way is what it needs
            raise labs.LabError(f"links have no delay of {options.delay}: a 4-byte all-reduce took {fastest * 1e3:.1f} ms")

    def entries(self, wanted=()):
        """Sides and methods that the rows wanted need."""
        found = [(side, method) for side in self.sides for method in side.methods]
        if 31 in wanted:
            found.append((self.sides[0], "topk"))
        if 15 in wanted:
            found += [(side, sides.EAGER[1]) for side in self.sides if side.name == sides.EAGER[0] and side.about["numpy"]]
        return found

    def lose(self, why):
        """Peers that have failed: a dictionary of names."""
        self.sides = [side for side in self.sides if side.name not in why]
        self.skipped |= why

    def close(self):
        for side in self.sides:
            side.stop()
        self._ends.close()


def processor():
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


class Results:
    """Of all networks of a run: lines for the file, and what was wrong."""

    def __init__(self):
        self.lines, self.wrong = [], []

    def add(self, network, n, figures, latencies, rows):
        setting = network.setting
        best = targets.best_peer(figures) if figures else None
        self.lines += [output.figure_line(f, n, best, setting) for f in figures.values()]
        self.lines += [output.latency_line(x, setting) for x in latencies]
        self.lines += [output.row_line(row, n, setting) for row in rows]
        for what in (*figures.values(), *latencies):
            self.wrong += [f"{what.side} {what.method}: {text}" for text in dict.fromkeys(what.wrong)]


def announce(options, network, rate, wanted, n, pairs, series_s):
    cores = len(os.sched_getaffinity(0))
    say(f"\n== links of {rate}, {options.ranks} ranks on {cores} cores; {network.lab.description}")
    for name, reason in network.skipped.items():
        say(f"skipped: {name}: {reason}")
    if 15 in wanted and len(network.entries(wanted)) == len(network.entries()):
        say("skipped: row 15: it needs gloo, and numpy beside torch")
    if options.peers and all(targets.is_ours(side.name) for side in network.sides):
        say("no peer runs here: ratios are to our own fp32")
    if wanted - {19}:
        guess = measure.guessed_seconds(n, options.ranks, network.entries(wanted), pairs, network.lab.bits_per_second, series_s)
        say(f"large all-reduces, n = {n}, {', '.join(s.name for s in network.sides)}: about {measure.duration(guess)}")


def run_rows(options, network, rate, wanted, short, results):
    """Measures, prints and keeps the rows wanted on one network."""
    n, pairs = (SHORT_N, SHORT_PAIRS) if short else (options.n, options.pairs)
    series_s = SHORT_SERIES_S if short else measure.SERIES_S
    announce(options, network, rate, wanted, n, pairs, series_s)
    crowding = max(1.0, options.ranks / len(os.sched_getaffinity(0)))
    figures, latencies, rows = {}, [], []
    if wanted - {19}:
        figures, lost = measure.large(network.lab, network.sides, network.entries(wanted), n, pairs, series_s, say)
        network.lose(lost)
        if options.hosts:
            rows += targets.level_rows(figures, options.hosts, network.lab.bits_per_second)
        else:
            rows += targets.large_rows(figures, wanted, network.lab.bits_per_second, crowding)
        say("\n" + output.large_table(figures, n, network.setting))
    if 19 in wanted and not options.hosts:
        sizes, count, turn_s = (SHORT_SMALL, SHORT_SINGLES, SHORT_SINGLES_S) if short else (targets.SMALL, SINGLES, SINGLES_S)
        latencies = measure.small(network.sides, network.entries(), sizes, pairs, count, turn_s, say)
        rows += targets.small_rows(latencies)
        say("\n" + output.small_table(latencies))
    if options.one_host:
        rows += targets.host_rows(figures, latencies, options.ranks)
    if options.ucx:
        rows += targets.ucx_rows(figures, latencies, network.lab.bits_per_second)
    if rows:
        say(output.rows_table(rows))
    results.add(network, n, figures, latencies, rows)
    if short:
        results.wrong += below_limits(figures, rows, latencies, network.lab.bits_per_second)
        for row in sorted(wanted - {r.row for r in rows}):
            say(f"skipped: row {row}: {targets.ROWS[row][1]}")


def below_limits(figures, rows, latencies, bits_per_second):
    """The short form's limits: texts of what missed them."""
    missed = []
    for f in (f for f in figures.values() if f.side == "sotto"):
        if f.interface is not None and f.interface > INTERFACE_CEILING * f.payload:
            missed.append(f"our {f.method}: {f.interface:.0f} bytes on an interface, at most {INTERFACE_CEILING} times the "
                          f"{f.payload:.0f} of the formula")
        if bits_per_second and f.method == "fp32" and 8e3 * f.payload / f.median < GOODPUT_FLOOR * bits_per_second:
            missed.append(f"our fp32: {f.median:.2f} ms; its bytes have to get {GOODPUT_FLOOR} of the link's rate at least")
    missed += [f"row {r.row}, {r.what}: {r.ratio:.2f}, at least {FLOORS[r.row]}" for r in rows
              if r.ratio < FLOORS.get(r.row, 0)]
    missed += [f"row {r.row}, {r.what}: {r.ratio:.2f}, at most {CEILINGS[r.row]}" for r in rows
               if r.ratio > CEILINGS.get(r.row, float("inf"))]
    for x in latencies:
        median = measure.quantile(x.all, 0.5)
        if x.side == "sotto" and x.method == "fp32" and x.bytes == 4 and median > SMALL_CEILING_MS:
            missed.append(f"row 19, 4 bytes: {median:.1f} ms, at most {SMALL_CEILING_MS}")
    return missed


def measure_all(options, isolation, results):
    """Skipped peers, by name."""
    skipped = {}
    todo = SHORT_ROWS if options.short else {options.rate: options.rows}
    for number, (rate, wanted) in enumerate(todo.items()):
        network = Network(options, rate, isolation)
        try:
            run_rows(options, network, rate, wanted, options.short, results)
            skipped |= network.skipped
            if options.short and number == 0:
                results.wrong += measure.odd_sizes(network.sides, network.entries(), ODD_SIZES, say)
        finally:
            network.close()
    return skipped


def show_timelines(options, isolation):
    """Of the last of some operations, so that connections are warm and buckets empty."""
    with a_lab(options, options.rate, isolation) as lab:
        say(f"{options.ranks} ranks, n = {options.n}; {lab.description}")
        for method in sides.METHODS:
            prefix = f"{options.timeline}-{method}"
            ours = sides.Ours(lab, options.ranks, options.sotto_perf, SOTTO_TRACE=str(Path(prefix).resolve()))
            try:
                ours.start()
                ours.tell(f"size {options.n}")
                ours.tell(f"series {method} {1 + measure.drops(formulas.payload(method, options.n, options.ranks, 0))} 1")
            finally:
                ours.stop()
            say(f"\n== {method}: {timeline.files(prefix, 2)[0]} and so on\n" +
                timeline.describe(*timeline.read(prefix, options.ranks), lab.bits_per_second))


def run_gaps(options, isolation, results):
    """On every network that is asked for and possible, with every number of ranks."""
    if isolation == "loopback" or options.mtu:
        networks = ((isolation, options.mtu),)
    else:
        networks = (("loopback", None), ("netns", 1500), ("netns", 9000))
    for how, mtu in networks:
        for ranks in options.gap_ranks:
            run_gap(argparse.Namespace(**{**vars(options), "mtu": mtu, "ranks": ranks}), how, results)


def run_gap(options, isolation, results, short=False):
    with a_lab(options, "none" if short else options.rate, isolation) as lab, contextlib.ExitStack() as ends:
        all_sides = gap.sides_of(lab, options.ranks, options.sotto_perf, gap.SHORT_BUFFERS if short else gap.BUFFERS)
        for side in all_sides:
            ends.callback(side.stop)
            side.start()
        setting = setting_of(options, lab, options.rate, isolation, all_sides[0].about)
        mtu = f"packets of {options.mtu or 1500} bytes; " if isolation == "netns" else ""
        say(f"\n== {options.ranks} ranks, {options.gap} before each operation; {mtu}{lab.description}")
        sizes, pairs = (gap.SHORT_SIZES, SHORT_PAIRS) if short else (options.sizes, options.pairs)
        rows = gap.measure(all_sides, sizes, pairs, labs.seconds(options.gap), say)
        say("\n" + gap.table(rows))
        results.lines += gap.lines(rows, setting)
        results.wrong += gap.wrong(rows) + (gap.stalls(rows) if short else [])


def show_beside_bulk(options, isolation):
    with a_lab(options, options.rate, isolation) as lab:
        for make in (sides.Ours, sides.over_ucx)[:2 if options.ucx else 1]:
            ours = make(lab, options.ranks, options.sotto_perf)
            try:
                ours.start()
                say(f"{ours.name}, {options.ranks} ranks, n = {options.n}; {lab.description}")
                say(output.urgent_table(measure.urgent(ours, options.n, lab.bits_per_second)))
            finally:
                ours.stop()


def draw(options):
    sys.path.insert(0, str(ROOT / "integration"))
    try:
        from report import net  # pylint: disable=import-outside-toplevel
    except ImportError as error:
        say(f"--plot needs matplotlib and numpy: {error}")
        return 1
    try:
        options.plot.write_text(net.time_against_rate(net.read_times(options.json)), encoding="utf-8")
    except (OSError, net.ReportError) as error:
        say(f"sotto bench net: {error}")
        return 1
    say(f"drawn: {options.plot}")
    return 0


def main(arguments):
    options = parse(arguments)
    if options.plot:
        return draw(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:options.cores])
    results = Results()
    try:
        isolation = enter(options, arguments)
        for wanted, show in ((options.timeline, show_timelines), (options.beside_bulk, show_beside_bulk)):
            if wanted:
                show(options, isolation)
                return 0
        if options.gap:
            skipped = {}
            run_gaps(options, isolation, results)
        else:
            skipped = measure_all(options, isolation, results)
            if options.short:
                run_gap(argparse.Namespace(**{**vars(options), "gap": "10ms"}), "loopback", results, short=True)
    except (labs.LabError, sides.SideError, timeline.TimelineError, OSError) as error:
        say(f"sotto bench net: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    if options.json:
        with open(options.json, "a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in results.lines))
    for text in results.wrong:
        say(f"WRONG: {text}")
    say(f"{len(results.lines)} figures and rows, {len(results.wrong)} wrong, {len(skipped)} peers skipped")
    return 1 if results.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
