"""What a run measures: all-reduces of one size by every side in turn, their bytes, and what can be wrong with them."""

import math
import os
import statistics
from dataclasses import dataclass, field

from formulas import payload
from sides import SideError

SERIES_S = 4.0  # a series of operations back to back takes about this long, if more than one fits
MAX_OPERATIONS = 20
BURST = 256 * 1024  # what a token bucket of the lab lets through at once
GOODPUT = 0.956  # of the rate of a link: payload in full Ethernet frames
# Largest difference of one result from the mean of inputs in [-1, 1). Of one bit only the direction is right, and of topk
# the largest: the error of all elements together is below that of a result of 0 (1), from so many elements on that chance plays no part.
BOUNDS = {"fp32": 1e-6, "bf16": 1 / 100, "int8": 1 / 100, "int4": 1 / 6, "1bit": 2.0, "topk": 2.0}
SEGMENT_BYTES = int(os.environ.get("SOTTO_SEGMENT_BYTES") or 128 * 1024)  # of a message, as our ranks have it
URGENT, URGENT_S = 100, 15.0  # small all-reduces beside large ones: so many, fewer if they would take longer
RMS, RMS_MANY = {"1bit": 0.97, "topk": 0.99}, 4096


def quantile(values, q):
    """Between neighbours by their distance."""
    values = sorted(values)
    at = q * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


def spread(values):
    """Interquartile range over median."""
    return (quantile(values, 0.75) - quantile(values, 0.25)) / statistics.median(values)


@dataclass
class Figure:
    """What one method of one side has shown. ms: per pair, of one operation on the slowest rank."""

    side: str
    method: str
    ms: list = field(default_factory=list)
    operations: int = 0
    dropped: int = 0
    error_max: float = 0.0
    error_rms: float = 0.0
    checksum: str = ""
    payload: float = 0.0  # bytes per operation by the formula, of the rank that sends most
    on_interface: float = 0.0  # the same of what has to leave by an interface, which ranks of a host share
    headers: float = 0.0  # the same, by our counters; None of others
    interface: float = None  # bytes per operation by the interface, of the rank that sends most
    kernels: list = field(default_factory=list)  # per pair: (encode, server, decode) in ms of processor time
    wrong: list = field(default_factory=list)

    @property
    def name(self):
        return f"{self.side} {self.method}"

    @property
    def median(self):
        return statistics.median(self.ms)


def check(side, method, n, limit_s):
    """One operation with its result compared: a new figure."""
    figure = Figure(side.name, method)
    replies = side.tell(f"check {method}", limit_s)
    figure.checksum = replies[0]["checksum"]
    figure.error_max = max(reply["error_max"] for reply in replies)
    figure.error_rms = max(reply["error_rms"] for reply in replies)
    if any(reply["checksum"] != figure.checksum for reply in replies):
        figure.wrong.append("results differ between ranks")
    if not figure.error_max <= BOUNDS[method]:
        figure.wrong.append(f"an element is off by {figure.error_max:g}; at most {BOUNDS[method]:g}")
    if method in RMS and n >= RMS_MANY and not figure.error_rms <= RMS[method]:
        figure.wrong.append(f"relative error {figure.error_rms:.3f}; at most {RMS[method]}")
    figure.payload = max(side.payload(method, n, r) for r in range(side.ranks))
    figure.on_interface = max(side.on_interface(method, n, r) for r in range(side.ranks))
    return figure


def compare_counters(side, subject, operations, replies, n):
    """Ours: bytes sent = bytes planned = the formula, on every rank."""
    for rank, reply in enumerate(replies):
        formula = operations * side.payload(subject.method, n, rank)
        sent, header = reply["payload"], reply["header"]
        if (sent, header) != (reply["payload_planned"], reply["header_planned"]) or sent != formula:
            subject.wrong.append(
                f"rank {rank} sent {sent} payload and {header} header bytes; planned {reply['payload_planned']} and "
                f"{reply['header_planned']}; formula: {formula} payload")


def sent_bytes(lab, ours):
    return [lab.sent_bytes(pid) for pid in ours.pids]


def series(lab, ours, side, figure, n, limit_s):
    """Milliseconds of one operation; everything else goes into the figure."""
    before = sent_bytes(lab, ours)
    replies = side.tell(f"series {figure.method} {figure.dropped} {figure.operations}", limit_s)
    if before[0] is not None:
        operations = figure.dropped + figure.operations
        sent = [b - a for a, b in zip(before, sent_bytes(lab, ours))]
        figure.interface = max(sent) / operations
        if "payload" in replies[0] and any(bytes_ < operations * side.on_interface(figure.method, n, rank)
                                for rank, bytes_ in enumerate(sent)):
            figure.wrong.append(f"an interface carried less than the formula's bytes: {sent} in {operations} operations")
    if "payload" in replies[0]:
        compare_counters(side, figure, figure.operations, replies, n)
        figure.headers = max(reply["header"] for reply in replies) / figure.operations
        figure.kernels.append(tuple(max(reply[key] for reply in replies) / figure.operations * 1e-6
                                    for key in ("encode_ns", "server_ns", "decode_ns")))
    return max(reply["ns"] for reply in replies) / figure.operations * 1e-6


def drops(payload_bytes):
    """Operations until the buckets are empty, with a margin; a burst within 1 % of an operation does not matter."""
    if payload_bytes >= 100 * BURST:
        return 0
    return 1 if payload_bytes >= 4 * BURST else 3


def wire_seconds(bytes_, bits_per_second):
    return 0.0 if bits_per_second is None else 8 * bytes_ / (GOODPUT * bits_per_second)


def guessed_seconds(n, ranks, entries, pairs, bits_per_second, series_s):
    """Of a whole run, before anything is known but the rate of the links."""
    fast = 2e9  # bits per second of a rank where the links are no limit
    total = 0.0
    for _, method in entries:
        one = wire_seconds(max(payload(method, n, ranks, r) for r in range(ranks)), min(bits_per_second or fast, fast))
        dropped = drops(payload(method, n, ranks, 0))
        total += (3 + pairs * dropped) * one + pairs * max(one, min(series_s, MAX_OPERATIONS * one))
    return total


class Turns:
    """Entries (side, method) that take turns. A peer that fails is stopped and left out from then on; ours may not."""

    def __init__(self, entries, ours, say):
        self.entries = list(entries)
        self.lost = {}  # side name: why
        self._ours = ours
        self._say = say

    def each(self, action):
        for side, method in list(self.entries):
            if side.name in self.lost:
                continue
            try:
                action(side, method)
            except SideError as error:
                if side is self._ours:
                    raise
                side.stop()
                self.lost[side.name] = str(error)
                self.entries = [entry for entry in self.entries if entry[0] is not side]
                self._say(f"left out from here on: {error}")


def large(lab, sides, entries, n, pairs, series_s, say):
    """All entries (side, method) in turn, a warm-up turn and then `pairs` of them. {(side name, method): figure}, and why
    peers were lost by their names."""
    ours = sides[0]
    limit_s = 120.0 + 10 * wire_seconds(8 * n, lab.bits_per_second)
    turns = Turns(entries, ours, say)
    sized, figures = set(), {}

    def compare(side, method):
        if side.name not in sized:
            sized.add(side.name)
            side.tell(f"size {n}", limit_s)
        figures[side.name, method] = check(side, method, n, limit_s)

    def warm_up(side, method):
        figure = figures[side.name, method]
        figure.dropped, figure.operations = drops(figure.payload), 1
        one_ms = series(lab, ours, side, figure, n, limit_s)
        figure.operations = min(MAX_OPERATIONS, max(1, round(series_s * 1e3 / one_ms)))
        figure.kernels.clear()
        figure.ms = [one_ms]

    turns.each(compare)
    turns.each(warm_up)
    figures = {key: figure for key, figure in figures.items() if key[0] not in turns.lost}
    turn = sum(f.ms[0] * (f.dropped + f.operations) for f in figures.values()) / 1e3
    say(f"warm-up pair done; {pairs} pairs take about {duration(pairs * turn)}")
    for figure in figures.values():
        figure.ms.clear()
    for _ in range(pairs):
        turns.each(lambda side, method: figures[side.name, method].ms.append(
            series(lab, ours, side, figures[side.name, method], n, limit_s)))
    return {key: figure for key, figure in figures.items() if key[0] not in turns.lost}, turns.lost


def duration(seconds):
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@dataclass
class Latency:
    """Singles of one method of one side at one size: milliseconds."""

    side: str
    method: str
    bytes: int
    medians: list = field(default_factory=list)  # per pair
    all: list = field(default_factory=list)
    wrong: list = field(default_factory=list)
    means: list = field(default_factory=list)  # per pair


def one_turn(side, latency, count, pause_us=0):
    replies = side.tell(f"singles {latency.method} {count}" + (f" {pause_us}" if pause_us else ""))
    if "payload" in replies[0]:
        compare_counters(side, latency, count, replies, latency.bytes // 4)
    # An operation has ended when it has on the slowest rank.
    return [max(reply["ns"][i] for reply in replies) * 1e-6 for i in range(count)]


def small(sides, entries, sizes, pairs, count, turn_s, say, pause_us=0):
    """Latencies at all sizes in bytes, a list. count: operations per pair, fewer where they take more than turn_s. pause_us: before
    each of them."""
    out = []
    for size in sizes:
        for side in sides:
            side.tell(f"size {size // 4}")
        found = []
        for side, method in entries:
            figure = check(side, method, size // 4, 300.0)
            latency = Latency(side.name, method, size, wrong=figure.wrong)
            one_ms = statistics.median(one_turn(side, latency, 10, pause_us)) + pause_us / 1e3
            found.append((side, latency, max(10, min(count, int(turn_s * 1e3 / (2 * one_ms))))))
        for _ in range(pairs):
            for side, latency, times in found:
                turn = one_turn(side, latency, times, pause_us)
                latency.medians.append(statistics.median(turn))
                latency.means.append(statistics.fmean(turn))
                latency.all += turn
        out += [latency for _, latency, _ in found]
        say(f"latency of {size} bytes done")
    return out


@dataclass
class Urgent:
    """Milliseconds of 4-byte all-reduces on the slowest rank: alone, and while large ones are under way."""

    alone: list
    beside: list
    bulk: list
    segment_ms: float = None  # what one segment takes on a link; None: it has no rate


def urgent(ours, n, bits_per_second):
    """Each begins somewhere in the middle of a large one; those that begin later than it ends do not count."""
    ours.tell("size 1")
    alone = Latency(ours.name, "fp32", 4)
    result = Urgent(one_turn(ours, alone, URGENT), [], [])
    if alone.wrong:
        raise SideError(alone.wrong[0])
    if bits_per_second:
        result.segment_ms = 1e3 * wire_seconds(SEGMENT_BYTES, bits_per_second)
    ours.tell(f"size {n}")
    ours.tell("series fp32 1 1")
    bulk_ms = max(reply["bulk_ns"] for reply in ours.tell("urgent 0")) * 1e-6
    count = max(10, min(URGENT, int(URGENT_S * 1e3 / bulk_ms)))
    for k in range(count):
        after_ms = bulk_ms * (0.2 + 0.6 * k / count)
        replies = ours.tell(f"urgent {round(1e3 * after_ms)}")
        bulk = max(reply["bulk_ns"] for reply in replies) * 1e-6
        if bulk > after_ms:
            result.bulk.append(bulk)
            result.beside.append(max(reply["ns"] for reply in replies) * 1e-6)
    return result


def odd_sizes(sides, entries, sizes, say):
    """Results alone, at sizes that are no multiples of anything. Texts of what was wrong."""
    wrong = []
    for n in sizes:
        for side in sides:
            side.tell(f"size {n}")
        for side, method in entries:
            try:
                figure = check(side, method, n, 300.0)
            except SideError as error:
                raise SideError(f"n = {n}, {method}: {error}") from error
            wrong += [f"{figure.name}, n = {n}: {text}" for text in figure.wrong]
    say(f"results at odd sizes compared: n = {', '.join(map(str, sizes))}")
    return wrong
