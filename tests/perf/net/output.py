"""Figures and rows as JSON lines with fixed columns, and as a table."""

import json
import statistics
from dataclasses import dataclass

from measure import quantile, spread
from rows import best_peer, is_ours

COLUMNS = ("benchmark", "kind", "row", "what", "side", "method", "rate", "rate_mbit", "delay", "loss", "mtu", "gap", "isolation", "ranks",
           "cores", "n", "bytes", "pairs", "operations", "dropped", "ms_p50", "ms_p99", "ms_p999", "ms_iqr", "ratio",
           "ratio_iqr", "target", "verdict", "payload_bytes", "header_bytes", "interface_bytes", "bits_per_element",
           "goodput_share", "error_max", "error_rms", "checksum", "wrong", "network", "version", "build", "processor",
           "kernel")


@dataclass
class Setting:
    """What all lines of one network have in common. common: the columns of machine and network."""

    bits_per_second: float
    common: dict


def _line(setting, **columns):
    return json.dumps({**dict.fromkeys(COLUMNS), "benchmark": "net", **setting.common, **columns})


def goodput_share(figure, setting):
    if setting.bits_per_second is None:
        return None
    return 8e3 * figure.payload / figure.median / setting.bits_per_second


def figure_line(figure, n, best, setting):
    ratios = [b / f for b, f in zip(best.ms, figure.ms)]
    ours = is_ours(figure.side)
    return _line(
        setting, kind="time", what=f"{best.name} / this", side=figure.side, method=figure.method, n=n, bytes=4 * n,
        pairs=len(figure.ms), operations=figure.operations, dropped=figure.dropped, ms_p50=figure.median,
        ms_iqr=spread(figure.ms), ratio=statistics.median(ratios), ratio_iqr=spread(ratios),
        payload_bytes=figure.payload if ours else None, header_bytes=figure.headers if ours else None,
        interface_bytes=figure.interface, bits_per_element=8 * figure.payload / n if ours else None,
        goodput_share=goodput_share(figure, setting) if ours else None, error_max=figure.error_max,
        error_rms=figure.error_rms, checksum=figure.checksum, wrong="; ".join(figure.wrong))


def latency_line(latency, setting):
    return _line(
        setting, kind="latency", side=latency.side, method=latency.method, n=latency.bytes // 4, bytes=latency.bytes,
        pairs=len(latency.medians), operations=len(latency.all), ms_p50=quantile(latency.all, 0.5),
        ms_p99=quantile(latency.all, 0.99), ms_p999=quantile(latency.all, 0.999), ms_iqr=spread(latency.medians),
        wrong="; ".join(latency.wrong))


def row_line(row, n, setting):
    return _line(setting, kind="row", row=row.row, what=row.what, n=n, ratio=row.ratio, ratio_iqr=row.iqr,
                 target=row.target, verdict=row.verdict)


def gap_line(row, ceiling, setting):
    return _line(setting, kind="gap", what=f"this / {row.best.side}", side=row.latencies[0].side, method="fp32", n=row.bytes // 4,
                 bytes=row.bytes, ms_p50=statistics.median(row.latencies[0].means), ratio=row.ratio, ratio_iqr=spread(row.ratios),
                 target=ceiling, verdict=row.verdict)


def grid(head, body):
    """Columns as wide as they need; the first `left` ones to the left."""
    cells = [head, *body]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) if i < 2 else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in cells) + "\n"


def _or_dash(value, form):
    return "-" if value is None else format(value, form)


def large_table(figures, n, setting):
    best = best_peer(figures)
    body = []
    for f in figures.values():
        ratios = [b / x for b, x in zip(best.ms, f.ms)]
        ours = is_ours(f.side)
        body.append([
            f.side, f.method, f"{f.median:.2f}", f"{100 * spread(f.ms):.1f}", f"{f.dropped}+{f.operations}",
            f"{8 * f.payload / n:.3f}" if ours else "-", _or_dash(f.interface, ".0f"),
            _or_dash(f.interface / f.on_interface if f.interface and ours else None, ".4f"),
            _or_dash(goodput_share(f, setting) if ours else None, ".3f"), f"{f.error_max:.2g}", f"{f.error_rms:.2g}",
            f"{statistics.median(ratios):.2f}", f"{100 * spread(ratios):.1f}"])
    head = ["side", "method", "ms", "IQR %", "operations", "bits/elem", "interface B", "/ formula", "goodput", "max err",
            "rms err", f"{best.name} / it", "IQR %"]
    text = (f"n = {n}: one all-reduce on the slowest rank, median of pairs. operations: not counted + counted. bits/elem "
            "and interface B: sent\nby one rank; goodput: payload / (time x rate); errors: one result, of inputs in "
            "[-1, 1)\n\n")
    return text + grid(head, body)


def small_table(latencies):
    body = [[x.side, x.method, str(x.bytes), str(len(x.all)), *(f"{1e3 * quantile(x.all, q):.0f}" for q in (0.5, 0.99, 0.999))]
            for x in latencies]
    return ("latency: a barrier, then one all-reduce; slowest rank, all pairs together\n\n" +
            grid(["side", "method", "bytes", "operations", "p50 us", "p99 us", "p99.9 us"], body))


def rows_table(rows):
    return grid(["row", "ratio of", "median", "IQR %", "target", "verdict"], [
        ["-" if r.row is None else str(r.row), r.what, f"{r.ratio:.3f}", f"{100 * r.iqr:.1f}",
         "-" if r.target is None else f"{'<=' if r.less_is_better else '>='} {r.target:.2f}", r.verdict] for r in rows])


def urgent_table(urgent):
    def quantiles(name, values):
        return [name, str(len(values)), *(f"{quantile(values, q):.3f}" for q in (0.5, 0.9, 1.0))]
    segment = "" if urgent.segment_ms is None else f"; a segment of the large one takes {urgent.segment_ms:.2f} ms on a link"
    return ("one all-reduce of 4 bytes on the slowest rank, ms" + segment + "\n\n" + grid(
        ["", "operations", "p50", "p90", "largest"],
        [quantiles("alone", urgent.alone), quantiles("beside a large one", urgent.beside),
         quantiles("the large one", urgent.bulk)]))
