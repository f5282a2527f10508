"""Times of network benchmarks (`sotto bench net --json`) against the rate of the links."""

import statistics

from report.figures import COLOURS, INK, start, to_svg
from report.logs import ReportError, read_records

OURS = {"fp32": "#1e293b", "bf16": "#2563eb", "int8": "#0d9488", "int4": "#65a30d", "topk": "#7c3aed", "1bit": COLOURS[1]}
PEERS = {"gloo": "#94a3b8", "openmpi": "#f59e0b", "openmpi-ring": "#d97706", "mpich": "#a855f7"}
UNLIMITED = "none"


def read_times(path):
    """{(side, method): {rate: median of ms}}, ranks, n, {rate: its number in 10^6 bit/s, None}. Lines of links with
    a delay or loss are left out; lines of several runs of a rate give their median."""
    times, sizes, mbit = {}, set(), {}
    for number, record in read_records(path):
        if record.get("benchmark") != "net" or record.get("kind") != "time" or record.get("delay") or record.get("loss"):
            continue
        try:
            times.setdefault((record["side"], record["method"]), {}).setdefault(record["rate"], []).append(record["ms_p50"])
            sizes.add((record["ranks"], record["n"]))
            mbit[record["rate"]] = record["rate_mbit"]
        except KeyError as error:
            raise ReportError(f"{path}:{number}: {error} is missing") from error
    if not times:
        raise ReportError(f"{path}: no times of sotto bench net without delay and loss")
    if len(sizes) > 1:
        found = ", ".join(f"{ranks} ranks with n = {n}" for ranks, n in sorted(sizes))
        raise ReportError(f"{path}: times of different runs cannot share a figure: {found}")
    medians = {key: {rate: statistics.median(ms) for rate, ms in rates.items()} for key, rates in times.items()}
    return medians, *sizes.pop(), mbit


def time_against_rate(found):
    """found: what read_times returns. Both axes logarithmic; links without a limit stand at the right."""
    times, ranks, n, mbit = found
    rates = sorted(mbit, key=lambda rate: mbit[rate] or float("inf"))
    limited = [mbit[rate] for rate in rates if mbit[rate]]
    place = {rate: mbit[rate] or 10 * (limited[-1] if limited else 1) for rate in rates}
    figure, axes = start(4.2)
    for (side, method), at in sorted(times.items()):
        ours = side == "sotto"
        x = [rate for rate in rates if rate in at]
        axes.plot([place[rate] for rate in x], [at[rate] for rate in x], marker="o", markersize=3.5,
                  color=OURS[method] if ours else PEERS.get(side, INK), linestyle="-" if ours else (0, (4, 2)),
                  label=f"{'Sotto' if ours else side} {method}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([place[rate] for rate in rates], ["no limit" if rate == UNLIMITED else rate for rate in rates])
    axes.minorticks_off()
    axes.set_xlabel("rate of every link")
    axes.set_ylabel(f"ms per all-reduce of {n / 1e6:g} million, {ranks} ranks")
    axes.legend(loc="upper right", ncols=2, fontsize=8.5)
    return to_svg(figure)
