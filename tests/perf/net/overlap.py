#!/usr/bin/env python3
"""sotto bench overlap: outer steps over links of a given rate, how much of their averages inner steps hide, next to the prediction."""

import argparse
import json
import math
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(ROOT / "integration/netns")]

import command_line  # noqa: E402
import lab as labs  # noqa: E402
import measure  # noqa: E402
import sides  # noqa: E402

CODECS = ("none", "onebit", "int4", "int8", "bf16", "fp16", "topk")
MEGA = 1e6
SLOWER, EXPOSED, SPREAD = 1.03, 0.02, 0.02  # row 21: steps against steps alone, exposed share of the time, spread of the ratio
OF_AVERAGE = 0.10  # exposed share of the time of averages; and exposed time at half of the delay against the formula
BOUNDS = ((100, 0.15), (1000, 0.20))  # prediction against measurement, up to this many 10^6 bit/s
SPARE = 1.1  # of tau_min
REST = 1.5  # longest times of an average

EPILOG = """\
Row 21 of the table of targets. Each rank is a process in a network namespace of its own. Its inner steps compute without
memory traffic (arithmetic, calibrated while all ranks work) or sleep, as a processor does beside a GPU, so they take the same
time with and without averages beside them unless something takes the processor away from them. A pair is: steps alone,
the same number of steps with outer steps whose delay is tau_min, and fewer with half of that delay; a period before them does not
count; times of the slowest rank. The time of a step is chosen so that tau_min is --delay, from the time of an average that sotto_predict_report predicts on these ranks; kernels are
timed there by all ranks at once, as they will run.

  ratio     overlapped steps / steps alone, median of pairs; target 1.03, exposed at most 2 % of the time, spread at most 2 %
  exposed   how long steps waited for averages, and its share of the time of averages, at most 10 % (gradients: sotto bench
            overlap_bucket)
  kappa     how much longer what an inner step computes takes than alone
  formula   at half of the delay: average - delay x step, with the step and the average at tau_min as measured; within 10 %
  predicted average and exposed time by sotto_predict_report; within 15 % up to 100mbit, 20 % up to 1gbit

Exit code 1 if parameters differ between ranks at the end, or if an average sends other bytes than were predicted.
Without namespaces ranks run on loopback, held to the rate by the TCP transport.

Examples:
  sotto bench overlap --rate 100mbit --pairs 15
  sotto bench overlap --rate 1gbit --codec onebit --rounds 3 --json overlap.jsonl
"""


def say(text):
    print(text, flush=True)


@dataclass
class Setting:
    """Outer steps of one delay. Lists: per pair; times in ms per step, exposed and average ms per average."""

    name: str
    delay: int
    predicted: dict = None  # the row of sotto_predict_report
    steps: int = 0
    ms: list = field(default_factory=list)
    ratios: list = field(default_factory=list)
    kappas: list = field(default_factory=list)
    exposed: list = field(default_factory=list)
    average: list = field(default_factory=list)
    shares: list = field(default_factory=list)  # exposed, of the time
    contention: list = field(default_factory=list)


def parse(arguments):
    parser = argparse.ArgumentParser(prog="sotto bench overlap", description=__doc__.split(": ", 1)[1], epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=labs.a_rate, default="100mbit", help="of every link, both directions (default: 100mbit)")
    parser.add_argument("--ranks", type=command_line.at_least(2), default=4, help="(default: 4)")
    parser.add_argument("--n", type=command_line.at_least(1), default=25_000_000, help="parameters (default: 25000000)")
    parser.add_argument("--codec", choices=CODECS, default="none", help="(default: none, float32)")
    parser.add_argument("--preset", default="co2", help="of outer steps, with a delay (default: co2)")
    parser.add_argument("--delay", type=command_line.at_least(2), default=8, help="tau_min in inner steps (default: 8)")
    parser.add_argument("--compute", choices=("arithmetic", "sleep"), help="(default: arithmetic with a core per rank, else sleep)")
    parser.add_argument("--rounds", type=command_line.at_least(1), default=1, help="averages that count per pair and delay (default: 1)")
    parser.add_argument("--pairs", type=command_line.at_least(1), default=7, help="pairs that count (default: 7)")
    parser.add_argument("--loopback", action="store_true", help="no namespaces, the limiter of the TCP transport")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON line per delay")
    parser.add_argument("--sotto-perf", required=True, help=argparse.SUPPRESS)  # sotto-perf passes it
    options = parser.parse_args(arguments)
    if labs.bits_per_second(options.rate) is None:
        parser.error("--rate none: there is nothing to hide; allowed are numbers with kbit, mbit or gbit")
    command_line.check_lines_file(parser, options.json)
    return options


def configuration(options, delay):
    outer = {"preset": options.preset, "period": delay, "dense_rounds": 0}
    if options.codec == "none":
        del outer["dense_rounds"]
    else:
        outer["codec"] = options.codec
    return outer


def request(options, delay, step_ms, rates):
    """Of sotto_predict_report. rates: measured before, nanoseconds per element."""
    bits = labs.bits_per_second(options.rate)
    json_object = {"config": configuration(options, delay), "params": options.n, "ranks": options.ranks,
                   "bandwidth_mbit": bits / MEGA, "step_ms": step_ms, "threads": 1}
    if options.loopback:
        json_object["efficiency"] = 1.0
    if rates:
        json_object["rates"] = rates
    return json.dumps(json_object)


def rates_of(replies):
    """The mean over ranks of what each has measured."""
    names = replies[0]["rates"]
    mean = {name: statistics.mean(reply["rates"][name]["ns_per_element"] for reply in replies) for name in names}
    own = {name: value for name, value in mean.items() if " " not in name}  # those of the presets are others
    own["outer"] = mean.get("outer configuration", mean.get("outer"))
    return own


def slowest(replies, key="ns"):
    return max(reply[key] for reply in replies)


def take(setting, replies, alone_ns):
    """Figures of one turn. alone_ns: of one step alone."""
    ns = slowest(replies)
    step_ns = ns / setting.steps
    averages = replies[0]["averages"]
    exposed = slowest(replies, "exposed_ns")
    setting.ms.append(step_ns / 1e6)
    setting.ratios.append(step_ns / alone_ns)
    setting.kappas.append(statistics.mean(r["compute_ns"] for r in replies) / setting.steps / alone_ns - 1)
    setting.exposed.append(exposed / averages / 1e6)
    setting.average.append(slowest(replies, "network_ns") / averages / 1e6)
    setting.shares.append(exposed / ns)
    setting.contention += [r["contention"] for r in replies if r["contention"] is not None]


def check_bytes(setting, replies):
    """What is wrong with the bytes and the memory of the ranks: they are those of the prediction."""
    wrong = []
    payload, memory = setting.predicted["payload_bytes_per_launch"], setting.predicted["memory_bytes"]
    if replies[0]["payload"] != payload:
        wrong.append(f"delay {setting.delay}: an average sends {replies[0]['payload']} bytes, predicted {payload}")
    for rank, reply in enumerate(replies):
        if reply["state_bytes"] != memory:
            wrong.append(f"delay {setting.delay}: rank {rank} holds {reply['state_bytes']} bytes, predicted {memory}")
    return wrong


def formula_ms(average_ms, delay, step_ms, kappa):
    """Exposed time of section 12.4."""
    return max(0.0, average_ms - delay * step_ms * (1 + kappa))


def off(found, expected):
    return abs(found - expected) / expected if expected else (0.0 if not found else math.inf)


def bound_of(bits):
    """The largest difference between prediction and measurement; None: there is no target."""
    return next((bound for mbit, bound in BOUNDS if bits <= mbit * MEGA), None)


def result(reached, settled=True):
    if not reached:
        return "not reached"
    return "reached" if settled else "not settled: the spread is too large"


def verdicts(full, half, alone_ms, bits):
    """(row, what, value, target, verdict) of every target."""
    ratio, spread = statistics.median(full.ratios), measure.spread(full.ratios)
    share = statistics.median(full.shares)
    of_average = statistics.median(e / a for e, a in zip(full.exposed, full.average))
    step_ms = statistics.median(alone_ms)
    formulas = [formula_ms(a, half.delay, s, max(0.0, k)) for a, s, k in zip(full.average, alone_ms, half.kappas)]
    difference = statistics.median(off(e, f) for e, f in zip(half.exposed, formulas))
    average = off(full.predicted["average_ms"], statistics.median(full.average))
    period = full.predicted["period_ms"] / full.predicted["period"]
    bound = bound_of(bits)
    settled = spread <= SPREAD
    lines = [
        (21, "overlapped / alone", f"{ratio:.3f} (spread {100 * spread:.1f} %)", f"<= {SLOWER}", result(ratio <= SLOWER, settled)),
        (21, "exposed share of the time", f"{100 * share:.2f} %", f"<= {100 * EXPOSED:g} %", result(share <= EXPOSED)),
        (21, f"exposed at delay {half.delay}: off the formula", f"{100 * difference:.1f} %", f"<= {100 * OF_AVERAGE:g} %",
         result(difference <= OF_AVERAGE)),
        (None, "exposed share of averages", f"{100 * of_average:.2f} %", f"<= {100 * OF_AVERAGE:g} %", result(of_average <= OF_AVERAGE)),
    ]
    for what, value in (("average", average),
                        ("step", off(period, statistics.median(full.ms)))):
        target = "-" if bound is None else f"<= {100 * bound:g} %"
        lines.append((None, what, f"off by {100 * value:.1f} %", target, "no target" if bound is None else result(value <= bound)))
    say(f"\nsteps alone {step_ms:.2f} ms, spread {100 * measure.spread(alone_ms):.1f} %")
    return lines


def table(settings):
    say(f"\n{'delay':>6} {'ms / step':>10} {'IQR %':>6} {'/ alone':>8} {'IQR %':>6} {'average':>9} {'predicted':>9} {'exposed':>9} "
        f"{'predicted':>9} {'of time':>8} {'kappa':>7} {'in it':>7}")
    for s in settings:
        inside = f"{statistics.median(s.contention):7.3f}" if s.contention else f"{'-':>7}"
        say(f"{s.delay:6} {statistics.median(s.ms):10.2f} {100 * measure.spread(s.ms):6.1f} {statistics.median(s.ratios):8.3f} "
            f"{100 * measure.spread(s.ratios):6.1f} {statistics.median(s.average):9.1f} {s.predicted['average_ms']:9.1f} "
            f"{statistics.median(s.exposed):9.1f} {s.predicted['exposed_ms_per_period']:9.1f} "
            f"{100 * statistics.median(s.shares):7.2f}% {statistics.median(s.kappas):7.3f} {inside}")
    say("average, exposed, predicted: ms per average; kappa: what inner steps compute, against steps alone; in it: contention as\n"
        "sotto_outer_info has it, inner steps beside an average against those of the same run without one")


def json_lines(options, settings, lines, lab):
    if not options.json:
        return
    common = {"benchmark": "overlap", "rate": options.rate, "ranks": options.ranks, "n": options.n, "codec": options.codec,
              "preset": options.preset, "pairs": options.pairs, "rounds": options.rounds, "compute": options.compute,
              "cores": len(os.sched_getaffinity(0)), "network": lab.description}
    with open(options.json, "a", encoding="utf-8") as file:
        for s in settings:
            file.write(json.dumps({**common, "kind": "time", "delay": s.delay, "ms_p50": statistics.median(s.ms),
                                   "ms_iqr": measure.spread(s.ms), "ratio": statistics.median(s.ratios),
                                   "ratio_iqr": measure.spread(s.ratios), "average_ms": statistics.median(s.average),
                                   "exposed_ms": statistics.median(s.exposed), "exposed_share": statistics.median(s.shares),
                                   "kappa": statistics.median(s.kappas), "predicted": s.predicted}) + "\n")
        for row, what, value, target, verdict in lines:
            file.write(json.dumps({**common, "kind": "row", "row": row, "what": what, "value": value, "target": target,
                                   "verdict": verdict}) + "\n")


def make_lab(options, programs):
    return labs.Loopback(options.rate) if options.loopback else labs.Lab(options.ranks, options.rate, programs)


def start(lab, options):
    rendezvous = f"tcp://{lab.address(0)}:{sides.free_port()}"
    side = sides.Side("overlap", options.ranks, [
        ([*lab.inside(r), options.sotto_perf, "overlap_rank", "CONTROL"],
         {**lab.environment, "SOTTO_RANK": str(r), "SOTTO_WORLD_SIZE": str(options.ranks), "SOTTO_RENDEZVOUS": rendezvous,
          "SOTTO_LISTEN": lab.address(r), "SOTTO_TRANSPORT": "tcp"}) for r in range(options.ranks)])
    side.start()
    return side


def prepare(side, options):
    """Both settings, and the time of a step in ms with which the first one's delay is tau_min."""
    replies = side.tell("predict " + request(options, options.delay, 1.0, None), 600)
    rates = rates_of(replies)
    average_ms = side.tell("predict " + request(options, options.delay, 1.0, rates))[0]["configuration"]["average_ms"]
    step_ms = SPARE * average_ms / options.delay
    settings = [Setting("full", options.delay), Setting("half", options.delay // 2)]
    for s in settings:
        s.predicted = side.tell("predict " + request(options, s.delay, step_ms, rates))[0]["configuration"]
        s.steps = options.rounds * s.delay
        side.tell(f"create {s.name} {options.n} {json.dumps(configuration(options, s.delay))}", 600)
    return settings, step_ms


def rest(setting):
    """Until the average has ended that a run has launched last: nothing else is to share the links with it."""
    longest_ms = max([setting.predicted["average_ms"], *setting.average])
    time.sleep(REST * longest_ms / 1e3)


def measure_pairs(side, options, settings, step_ms):
    """Times of a step alone in ms, per pair."""
    side.tell(f"calibrate {round(step_ms * 1e6)} {options.compute}", 600)
    limit_s = 60 + 20 * step_ms / 1e3 * settings[0].steps
    for s in settings:  # until an average is under way, and codecs have their residuals
        side.tell(f"run {s.name} 0 {2 * s.delay}", limit_s)
        rest(s)
    alone_ms = []
    for _ in range(options.pairs):
        alone = slowest(side.tell(f"compute {settings[0].steps}", limit_s)) / settings[0].steps
        alone_ms.append(alone / 1e6)
        for s in settings:
            take(s, side.tell(f"run {s.name} {s.delay} {s.steps}", limit_s), alone)
            rest(s)
    return alone_ms


def finish(side, settings):
    """What is wrong at the end."""
    wrong = []
    for s in settings:
        wrong += check_bytes(s, side.tell(f"run {s.name} 0 {s.delay}", 600))
        if len({reply["digest"] for reply in side.tell(f"finish {s.name}", 600)}) != 1:
            wrong.append(f"delay {s.delay}: parameters differ between ranks")
    return wrong


def run(options):
    """Texts of what was wrong."""
    programs = Path(options.sotto_perf).resolve().parent
    lab = make_lab(options, programs)
    cores = len(os.sched_getaffinity(0))
    options.compute = options.compute or ("arithmetic" if cores >= options.ranks else "sleep")
    try:
        say(f"links of {options.rate}, {options.ranks} ranks on {cores} cores, load {os.getloadavg()[0]:.1f}; steps: {options.compute}; "
            f"{lab.description}")
        side = start(lab, options)
        try:
            settings, step_ms = prepare(side, options)
            pair_s = step_ms / 1e3 * (2 * settings[0].steps + 2 * settings[1].steps + 2 * settings[0].delay) + 2 * REST * settings[0].predicted["average_ms"] / 1e3
            say(f"{options.n} parameters, {options.codec}, preset {options.preset}; steps of {step_ms:.1f} ms; {options.pairs} pairs "
                f"take about {measure.duration(options.pairs * pair_s)}")
            alone_ms = measure_pairs(side, options, settings, step_ms)
            wrong = finish(side, settings)
        finally:
            side.stop()
    finally:
        lab.close()
    table(settings)
    lines = verdicts(*settings, alone_ms, lab.bits_per_second)
    for row, what, value, target, verdict in lines:
        say(f"{'besides' if row is None else f'row {row}'}: {what}: {value}, target {target}: {verdict}")
    json_lines(options, settings, lines, lab)
    return wrong


def run_in_lab(script, arguments, options, measured):
    """The exit code of measured(options), which returns what was wrong, in a lab where that is possible. script: its path."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if not options.loopback:
            how, reason = labs.enter(["-B", str(script), *arguments])
            if not how:
                say(f"network namespaces are not possible here ({reason}): loopback")
                options.loopback = True
        wrong = measured(options)
    except (labs.LabError, sides.SideError) as error:
        say(f"sotto bench {script.stem}: {error}")
        return 2
    for text in wrong:
        say(f"wrong: {text}")
    return 1 if wrong else 0


def main(arguments):
    return run_in_lab(HERE / "overlap.py", arguments, parse(arguments), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
