"""All-reduces with a pause before each, as a trainer makes them: our send window next to fixed send buffers.

A connection that pauses carries little in a second, but each of its bursts goes as fast as the path does. So what is tested
is whether the window follows the path rather than the pauses, and whether anything waits for a delayed acknowledgement.
Ranks sleep in the pause: ranks that computed would measure how the system shares cores, where there are fewer than ranks.
"""

import statistics
from dataclasses import dataclass

import measure as common
import output
import sides

SIZES = (1000, 16_000, 128 * 1024, 620_000, 4_000_000, 20_000_000)  # bytes; 620 000: the quickstart's model
BUFFERS = (65536, 262144, 1 << 20, 4 << 20)  # SOTTO_SEND_BUFFER_BYTES
SHORT_SIZES, SHORT_BUFFERS = (620_000,), (1 << 20,)
RANKS = (2, 4)
CEILING = 1.2
STALL = 5.0  # of --short: 40 ms of a delayed acknowledgement are 10 to 50 times as long
TURN, TURN_S = 50, 0.6  # operations of a turn, fewer where they take more than half of so many seconds
WINDOW = "sotto"


def sides_of(lab, ranks, sotto_perf, buffers):
    """Ours as it is, then with each of the fixed buffers; not started."""
    found = [sides.Ours(lab, ranks, sotto_perf)]
    for bytes_ in buffers:
        side = sides.Ours(lab, ranks, sotto_perf, SOTTO_SEND_BUFFER_BYTES=str(bytes_))
        side.name = f"{WINDOW}, {bytes_ // 1024} KiB"
        found.append(side)
    return found


@dataclass
class Row:
    """All sides at one size, the first with the send window."""

    latencies: list

    @property
    def bytes(self):
        return self.latencies[0].bytes

    @property
    def best(self):
        """The fixed buffer with the least time."""
        return min(self.latencies[1:], key=lambda x: statistics.median(x.means))

    @property
    def ratios(self):
        """Of the same turns, so that what else the machine does counts for both. Means, since a stall of one operation in
        some is what a median hides."""
        return [ours / best for ours, best in zip(self.latencies[0].means, self.best.means)]

    @property
    def ratio(self):
        return statistics.median(self.ratios)

    @property
    def verdict(self):
        if self.ratio <= CEILING:
            return "reached"
        return "not reached" if common.quantile(self.ratios, 0.25) > CEILING else "not settled: the spread is too large"


def measure(all_sides, sizes, pairs, pause_s, say):
    entries = [(side, "fp32") for side in all_sides]
    latencies = common.small(all_sides, entries, sizes, pairs, TURN, TURN_S, say, round(1e6 * pause_s))
    return [Row([x for x in latencies if x.bytes == size // 4 * 4]) for size in sizes]


def table(rows):
    names = [x.side.removeprefix(f"{WINDOW}, ") for x in rows[0].latencies]
    body = [[str(row.bytes), str(len(row.latencies[0].all)), *(f"{statistics.median(x.means):.3f}" for x in row.latencies),
             f"{common.quantile(row.latencies[0].all, 0.9):.3f}", f"{row.ratio:.2f}", f"{100 * common.spread(row.ratios):.0f}",
             row.verdict]
            for row in rows]
    head = ["bytes", "operations", "window", *names[1:], "window, p90", "window / best", "IQR %", f"target {CEILING}"]
    return ("one float32 all-reduce behind a pause, slowest rank: ms, median over the turns of their means; with the send window, "
            "and with fixed send buffers\n\n" + output.grid(head, body))


def lines(rows, setting):
    found = [output.latency_line(x, setting) for row in rows for x in row.latencies]
    return found + [output.gap_line(row, CEILING, setting) for row in rows]


def wrong(rows):
    """Texts of what is no result."""
    return [f"{x.side}, {x.bytes} bytes: {text}" for row in rows for x in row.latencies for text in dict.fromkeys(x.wrong)]


def stalls(rows):
    """Texts of what takes so much longer than with a fixed buffer that it waits for something."""
    return [f"{row.bytes} bytes behind a pause: {row.ratio:.1f} times as long as with {row.best.side}; at most {STALL}"
            for row in rows if row.ratio > STALL]
