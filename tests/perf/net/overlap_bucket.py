#!/usr/bin/env python3
"""sotto bench overlap_bucket: averages of gradients that travel during a backward pass, over links of a given rate."""

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(ROOT / "integration/netns")]

import command_line  # noqa: E402
import lab as labs  # noqa: E402
import measure  # noqa: E402
import overlap  # noqa: E402
import rows  # noqa: E402
import sides  # noqa: E402
from overlap import say, slowest  # noqa: E402

OF_COMMUNICATION = 0.10  # row 22: exposed share of what the averages take alone
WARM_UP = 3  # rounds

EPILOG = """\
Row 22 of the table of targets. Each rank is a process in a network namespace of its own. A backward pass computes gradients of
equal counts one after the other, by arithmetic in the cache or by sleeping, as a processor does beside a GPU; each of them
is a bucket, averaged in one bit (or as --codec says) while the others are computed. The pass takes --backward times as long as
the averages take alone. A turn is, on the slowest rank: passes alone, averages alone (all gradients are there at once),
and both at the same time.

  exposed   how long a round goes on behind the end of the last rank's pass, and its share of averages alone; target 10 %
  ratio     both at once / passes alone
  saved     share of the averages that overlap saves: (one after the other - at once) / averages

The last bucket's average cannot be hidden: 1 / buckets of all.
Exit code 1 if averages differ between ranks at the end, or if an interface has carried less than the plan's bytes.
Without namespaces ranks run on loopback, held to the rate by the TCP transport.

Examples:
  sotto bench overlap_bucket --rate 1gbit --pairs 15
  sotto bench overlap_bucket --rate 100mbit --codec none --n 2500000 --json buckets.jsonl
"""


@dataclass
class Figures:
    """Lists: per pair, in ms per round on the slowest rank."""

    alone: list = field(default_factory=list)  # the backward pass
    averages: list = field(default_factory=list)
    both: list = field(default_factory=list)
    exposed: list = field(default_factory=list)

    def shares(self):
        return [e / a for e, a in zip(self.exposed, self.averages)]

    def ratios(self):
        return [b / c for b, c in zip(self.both, self.alone)]

    def saved(self):
        return [(c + a - b) / a for a, b, c in zip(self.averages, self.both, self.alone)]


def parse(arguments):
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="sotto bench overlap_bucket", description=__doc__.split(": ", 1)[1], epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=labs.a_rate, default="1gbit", help="of every link, both directions (default: 1gbit)")
    parser.add_argument("--ranks", type=command_line.at_least(2), default=max(2, min(4, cores)),
                        help="(default: 4, fewer where there are fewer cores)")
    parser.add_argument("--n", type=command_line.at_least(1), default=25_000_000, help="elements of all gradients (default: 25000000)")
    parser.add_argument("--buckets", type=command_line.at_least(1), default=25, help="(default: 25)")
    parser.add_argument("--codec", choices=overlap.CODECS, default="onebit", help="(default: onebit)")
    parser.add_argument("--backward", type=float, default=1.5, metavar="TIMES", help="averages alone (default: 1.5)")
    parser.add_argument("--compute", choices=("arithmetic", "sleep"), help="(default: arithmetic with a core per rank, else sleep)")
    parser.add_argument("--rounds", type=command_line.at_least(1), default=10, help="that count per pair (default: 10)")
    parser.add_argument("--pairs", type=command_line.at_least(1), default=7, help="pairs that count (default: 7)")
    parser.add_argument("--loopback", action="store_true", help="no namespaces, the limiter of the TCP transport")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON line")
    parser.add_argument("--sotto-perf", required=True, help=argparse.SUPPRESS)  # sotto-perf passes it
    options = parser.parse_args(arguments)
    if options.buckets > options.n:
        parser.error(f"--buckets {options.buckets}: at most one for each of {options.n} elements")
    if not 0.01 <= options.backward <= 1000:
        parser.error(f"--backward {options.backward:g}: allowed is 0.01 to 1000")
    command_line.check_lines_file(parser, options.json)
    options.compute = options.compute or ("arithmetic" if cores >= options.ranks else "sleep")
    return options


def take(figures, rounds, alone, averages, both):
    """Figures of one turn, from the replies of ranks."""
    figures.alone.append(slowest(alone) / rounds / 1e6)
    figures.averages.append(slowest(averages) / rounds / 1e6)
    figures.both.append(slowest(both) / rounds / 1e6)
    # On the rank whose pass ends last it is no wait for another rank's.
    figures.exposed.append(statistics.mean(map(min, zip(*(reply["exposed_ns"] for reply in both)))) / 1e6)


def measure_pairs(side, options, figures):
    """The number of buckets, and bytes of payload of every rank's rounds: sent, and before the last bucket's gradients are there."""
    settings = {} if options.codec == "none" else {"codec": options.codec}
    buckets = side.tell(f"buckets {options.n} {options.buckets} {json.dumps(settings)}", 600)[0]["buckets"]
    side.tell(f"rounds at_once {WARM_UP}", 600)
    averages_ms = slowest(side.tell(f"rounds at_once {options.rounds}", 600)) / options.rounds / 1e6
    pass_ms = options.backward * averages_ms
    side.tell(f"calibrate {round(pass_ms * 1e6 / buckets)} {options.compute}", 600)
    limit_s = 60 + 20 * options.rounds * (pass_ms + averages_ms) / 1e3
    say(f"{options.n} elements in {buckets} buckets, {options.codec}; averages alone take {averages_ms:.1f} ms, a backward pass {pass_ms:.1f} ms; "
        f"{options.pairs} pairs take about {measure.duration(options.pairs * options.rounds * (2 * pass_ms + averages_ms) / 1e3)}")
    side.tell(f"rounds overlapped {WARM_UP}", limit_s)
    for _ in range(options.pairs):
        alone = side.tell(f"compute {options.rounds * buckets}", limit_s)
        averages = side.tell(f"rounds at_once {options.rounds}", limit_s)
        both = side.tell(f"rounds overlapped {options.rounds}", limit_s)
        take(figures, options.rounds, alone, averages, both)
    return buckets, [(reply["payload"], reply["early"]) for reply in both]


def finish(side, lab, rounds, payloads, sent_before):
    """What is wrong at the end."""
    wrong = []
    if len({reply["digest"] for reply in side.tell("digest", 600)}) != 1:
        wrong.append("averages differ between ranks")
    for rank, (pid, (payload, _), before) in enumerate(zip(side.pids, payloads, sent_before)):
        if before is None:
            continue
        sent = lab.sent_bytes(pid) - before
        if sent < rounds * payload:
            wrong.append(f"the interface of rank {rank} carried {sent} bytes in {rounds} rounds of {payload} bytes")
    return wrong


def verdict(figures):
    share, spread = statistics.median(figures.shares()), measure.spread(figures.both)
    return share, overlap.result(share <= OF_COMMUNICATION, spread <= rows.MAX_SPREAD)


def table(figures):
    say(f"\n{'pass':>9} {'averages':>9} {'at once':>9} {'IQR %':>6} {'exposed':>9} {'share':>8} {'ratio':>7} {'saved':>7}")
    median = statistics.median
    say(f"{median(figures.alone):9.1f} {median(figures.averages):9.1f} {median(figures.both):9.1f} {100 * measure.spread(figures.both):6.1f} "
        f"{median(figures.exposed):9.1f} {100 * median(figures.shares()):7.2f}% {median(figures.ratios()):7.3f} {100 * median(figures.saved()):6.1f}%")
    say("ms per round, of the slowest rank; medians of pairs")


def json_line(options, figures, buckets, payloads, lab):
    median = statistics.median
    share, reached = verdict(figures)
    return {"benchmark": "overlap_bucket", "rate": options.rate, "ranks": options.ranks, "n": options.n, "buckets": buckets,
            "codec": options.codec, "backward": options.backward, "compute": options.compute, "rounds": options.rounds,
            "pairs": options.pairs, "cores": len(os.sched_getaffinity(0)), "network": lab.description,
            "pass_ms": median(figures.alone), "averages_ms": median(figures.averages), "at_once_ms": median(figures.both),
            "exposed_ms": median(figures.exposed), "exposed_share": share, "ratio": median(figures.ratios()),
            "saved": median(figures.saved()), "payload_bytes": max(p for p, _ in payloads),
            "early_payload_bytes": max(e for _, e in payloads), "row": 22, "target": OF_COMMUNICATION, "verdict": reached}


def run(options):
    """Texts of what was wrong."""
    programs = Path(options.sotto_perf).resolve().parent
    lab = overlap.make_lab(options, programs)
    figures = Figures()
    try:
        say(f"links of {options.rate}, {options.ranks} ranks on {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; "
            f"passes: {options.compute}; {lab.description}")
        side = overlap.start(lab, options)
        try:
            before = [lab.sent_bytes(pid) for pid in side.pids]
            buckets, payloads = measure_pairs(side, options, figures)
            rounds = 2 * WARM_UP + options.rounds * (1 + 2 * options.pairs)
            wrong = finish(side, lab, rounds, payloads, before)
        finally:
            side.stop()
    finally:
        lab.close()
    table(figures)
    share, reached = verdict(figures)
    say(f"row 22: exposed share of averages: {100 * share:.2f} %, target <= {100 * OF_COMMUNICATION:g} %: {reached}")
    if options.json:
        with open(options.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(json_line(options, figures, buckets, payloads, lab)) + "\n")
    return wrong


def main(arguments):
    return overlap.run_in_lab(HERE / "overlap_bucket.py", arguments, parse(arguments), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
