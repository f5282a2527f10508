"""Rows of the table of targets, from figures: ratios of pairs measured in turn, their median and spread."""

import statistics
from dataclasses import dataclass

from formulas import ONE_HOP_BYTES
from measure import GOODPUT, spread
from sides import EAGER, OVER_TCP, OVER_UCX, SHARDED

MAX_SPREAD = 0.10
SMALL = (4, 256, 1024, 4096, 8192, ONE_HOP_BYTES)  # bytes
WAN_S = 0.02  # from this delay on a link counts as a wide-area one

# row: (what is divided, where it applies, in words)
ROWS = {
    10: ("best fp32 peer / our 1-bit", "links of at most 100mbit"),
    11: ("best fp32 peer / our 1-bit", "links above 100mbit, up to 1gbit"),
    12: ("best fp32 peer / our 1-bit", "links above 1gbit"),
    13: ("best fp32 peer / our 1-bit", "rate none"),
    14: ("our 1-bit: time / bound", "any rate but none"),
    15: ("1-bit as a list of tensor operations over gloo / our 1-bit", "rate none, gloo among the peers, with numpy"),
    16: ("gloo / our fp32", "gloo among the peers"),
    17: ("our codec: time / (its share of the bytes x our fp32)", "any rate but none"),
    19: ("small all-reduces: ours / Open MPI, and peer / ours", "any"),
    31: ("gloo / our topk, 2 bits of 64 in 4096", "gloo among the peers, any rate but none"),
    28: ("goodput / rate", "a delay of at least 20 ms, any rate but none"),
}
# (row, link): target; a row has none elsewhere. Link: rate in 10^6 bit/s, None: no limit.
TARGETS = {(10, 100): 31, (10, 10): 31, (11, 1000): 20, (12, 10000): 6, (13, None): 3, (14, 100): 1.03, (14, 1000): 1.20,
           (15, None): 25, (16, 1000): 0.99, (16, None): 1.15, (17, 100): 1 / 0.97, (28, 1000): 0.90, (31, 100): 60, (31, 10000): 4}
LESS_IS_BETTER = (14, 17)
# On one host by shared memory, (ranks, what): target.
HOST_TARGETS = {(4, "tcp"): 1.5, (4, "peer"): 1.0, (2, "4 B"): 0.5}
# UCX's sockets next to ours: rate of the links of float32, and of small messages up to so many bytes.
UCX_RATE, UCX_LARGE, UCX_SMALL, UCX_SMALL_BYTES = 1000, 1.03, 1.2, 8192
# Two hosts of two ranks, two levels: what is divided by float32, flat by sharded with a codec, and time by the bound.
HOSTS, HOSTS_RATE, HOSTS_PEER, HOSTS_CODED, HOSTS_BOUND = (2, 2), 100, 1.5, 1.8, 1.10
SMALL_GLOO = {4: 10, 1024: 50, 4096: 50, 8192: 50, ONE_HOP_BYTES: 30}


@dataclass
class Row:
    row: int  # None: of no row of the table
    what: str
    ratio: float
    iqr: float
    target: float = None
    less_is_better: bool = False

    @property
    def verdict(self):
        if self.target is None:
            return "no target"
        if (self.ratio > self.target) if self.less_is_better else (self.ratio < self.target):
            return "not reached"
        return "reached" if self.iqr < MAX_SPREAD else "not settled: the spread is too large"


def is_ours(side):
    return side in ("sotto", OVER_TCP, OVER_UCX, SHARDED)


def of_rate(bits_per_second):
    """The row of the 1-bit all-reduce next to peers at this rate."""
    if bits_per_second is None:
        return 13
    return 10 if bits_per_second <= 100e6 else 11 if bits_per_second <= 1e9 else 12


def applicable(bits_per_second, delay_s, peers):
    rows = {of_rate(bits_per_second), 19}
    if bits_per_second is not None:
        rows |= {14, 17}
        if delay_s >= WAN_S:
            rows.add(28)
    if "gloo" in peers:
        rows |= {15, 16} if bits_per_second is None else {16, 31}
    return rows


def best_peer(figures):
    """The fastest float32 of others, or ours where there is no other."""
    peers = [f for f in figures.values() if not is_ours(f.side) and f.method == "fp32"]
    return min(peers or [figures["sotto", "fp32"]], key=lambda f: f.median)


def _row(row, mbit, what, ratios):
    return Row(row, what, statistics.median(ratios), spread(ratios), TARGETS.get((row, mbit)), row in LESS_IS_BETTER)


def bound_ms(figure, pair, bits_per_second, crowding):
    """No codec without buckets can be faster: max(encode, wire / 2) + max(server + decode, wire / 2). Kernels take their
    processor time; where ranks outnumber cores they share them (crowding = ranks / cores, at least 1)."""
    encode, server, decode = (crowding * ms for ms in figure.kernels[pair])
    half = 8e3 * (figure.payload + figure.headers) / (GOODPUT * bits_per_second) / 2
    return max(encode, half) + max(server + decode, half)


def large_rows(figures, wanted, bits_per_second, crowding):
    mbit = None if bits_per_second is None else bits_per_second / 1e6
    onebit, dense = figures["sotto", "1bit"], figures["sotto", "fp32"]
    rows = []
    peer, first = best_peer(figures), of_rate(bits_per_second)
    if first in wanted:
        row = _row(first, mbit, f"{peer.name} / our 1bit", [p / o for p, o in zip(peer.ms, onebit.ms)])
        if peer is dense:
            row.target = None  # which names a peer
        rows.append(row)
    if 14 in wanted:
        rows.append(_row(14, mbit, "our 1bit / bound", [
            ms / bound_ms(onebit, pair, bits_per_second, crowding) for pair, ms in enumerate(onebit.ms)]))
    if 15 in wanted and EAGER in figures:
        rows.append(_row(15, mbit, "1bit of tensor operations over gloo / our 1bit",
                         [e / o for e, o in zip(figures[EAGER].ms, onebit.ms)]))
    if 16 in wanted and ("gloo", "fp32") in figures:
        gloo = figures["gloo", "fp32"]
        rows.append(_row(16, mbit, "gloo fp32 / our fp32", [g / o for g, o in zip(gloo.ms, dense.ms)]))
    if 31 in wanted and ("gloo", "fp32") in figures:
        gloo, topk = figures["gloo", "fp32"], figures["sotto", "topk"]
        rows.append(_row(31, mbit, "gloo fp32 / our topk", [g / o for g, o in zip(gloo.ms, topk.ms)]))
    for method in ("bf16", "int8", "int4"):
        if 17 in wanted:
            figure = figures["sotto", method]
            share = figure.payload / dense.payload
            rows.append(_row(17, mbit, f"our {method} / (byte share x our fp32)",
                             [c / (share * d) for c, d in zip(figure.ms, dense.ms)]))
    if 28 in wanted:
        for figure in (f for f in figures.values() if f.side == "sotto"):
            row = _row(28, mbit, f"our {figure.method}: goodput / rate",
                       [8e3 * figure.payload / ms / bits_per_second for ms in figure.ms])
            if figure is not dense:
                row.target = None
            rows.append(row)
    return rows


def small_rows(latencies):
    by = {(x.side, x.method, x.bytes): x for x in latencies}
    rows = []
    for (side, _, size), peer in by.items():
        if is_ours(side):
            continue
        ours = by["sotto", "fp32", size]
        if side.startswith("openmpi"):
            rows.append(Row(19, f"{size} B: our fp32 / {side}", *_ratio(ours, peer), 1.0 if side == "openmpi" else None, True))
        else:
            target = SMALL_GLOO.get(size) if side == "gloo" else None
            rows.append(Row(19, f"{size} B: {side} / our fp32", *_ratio(peer, ours), target))
    return rows


def host_rows(figures, latencies, ranks):
    """Shared memory next to TCP, and next to the best peer, on one host."""
    rows = []
    if figures:
        ours, tcp, peer = figures["sotto", "fp32"], figures[OVER_TCP, "fp32"], best_peer(figures)
        for name, other, what in (("our fp32 over TCP", tcp, "tcp"), (peer.name, peer, "peer")):
            if other is not ours:
                ratios = [x / y for x, y in zip(other.ms, ours.ms)]
                rows.append(Row(None, f"{name} / by shared memory", statistics.median(ratios), spread(ratios),
                                HOST_TARGETS.get((ranks, what))))
    by = {(x.side, x.bytes): x for x in latencies if x.method == "fp32"}
    for (side, size), tcp in by.items():
        if side == OVER_TCP:
            rows.append(Row(None, f"{size} B: our fp32 by shared memory / over TCP", *_ratio(by["sotto", size], tcp),
                            HOST_TARGETS.get((ranks, f"{size} B")), True))
    return rows


def level_rows(figures, hosts, bits_per_second):
    """Two levels next to one and to peers, and next to what the links between hosts allow."""
    rows, as_asked = [], (*hosts, bits_per_second) == (*HOSTS, HOSTS_RATE * 1e6)

    def add(what, ratios, target, less_is_better=False):
        rows.append(Row(None, what, statistics.median(ratios), spread(ratios), target if as_asked else None, less_is_better))

    for (side, method), figure in figures.items():
        ours = figures[SHARDED, method] if (SHARDED, method) in figures else None
        if side != SHARDED and ours:
            target = HOSTS_PEER if side == "openmpi" else HOSTS_CODED if method != "fp32" else None
            add(f"{figure.name} / {ours.name}", [x / y for x, y in zip(figure.ms, ours.ms)], target)
        if side == SHARDED and bits_per_second:
            wire_ms = 8e3 * figure.on_interface / (GOODPUT * bits_per_second)
            add(f"{figure.name} / its bytes between hosts at the rate", [ms / wire_ms for ms in figure.ms], HOSTS_BOUND, True)
    return rows


def ucx_rows(figures, latencies, bits_per_second):
    """Ours over UCX's sockets next to ours over its own."""
    rows = []
    if figures:
        pairs = zip(figures[OVER_UCX, "fp32"].ms, figures["sotto", "fp32"].ms)
        ratios = [x / y for x, y in pairs]
        target = UCX_LARGE if bits_per_second == UCX_RATE * 1e6 else None
        rows.append(Row(None, "our fp32 over UCX / over TCP", statistics.median(ratios), spread(ratios), target, True))
    by = {(x.side, x.bytes): x for x in latencies if x.method == "fp32"}
    for (side, size), ucx in by.items():
        if side == OVER_UCX:
            rows.append(Row(None, f"{size} B: our fp32 over UCX / over TCP", *_ratio(ucx, by["sotto", size]),
                            UCX_SMALL if size <= UCX_SMALL_BYTES else None, True))
    return rows


def _ratio(a, b):
    ratios = [x / y for x, y in zip(a.medians, b.medians)]
    return statistics.median(ratios), spread(ratios)
