"""What the time of one all-reduce is spent on: from the traces of all ranks (SOTTO_TRACE), segment by segment and link by link."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

SLICES = 10
SHOWN = 5  # segments
POINTS = ("encoded", "first row", "last row", "reduced", "first result", "last result", "decoded")


class TimelineError(Exception):
    """The traces do not show an all-reduce; the text says what is missing."""


@dataclass
class Event:
    """Times in ms from the begin of the operation on the first rank."""

    name: str
    begin: float
    end: float
    args: dict


def files(prefix, ranks):
    return [Path(f"{prefix}.rank{rank}.json") for rank in range(ranks)]


def read(prefix, ranks):
    """Events of the last reduction, a list per rank, and how long it took from the first begin to the last end, in ms."""
    traces = [json.loads(path.read_text(encoding="utf-8")) for path in files(prefix, ranks)]
    wanted, spans = [], []
    for rank, trace in enumerate(traces):
        reductions = [e["args"]["operation"] for e in trace if e["ph"] == "X" and "phase" in e["args"]]
        if not reductions:
            raise TimelineError(f"rank {rank} shows no message of a reduction")
        wanted.append(max(reductions))
        spans.append({e["ph"]: e["ts"] for e in trace if e["ph"] in "be" and int(e["id2"]["local"], 16) == wanted[rank]})
    start = min(span["b"] for span in spans)
    events = [[Event(e["name"], (e["ts"] - start) / 1e3, (e["ts"] + e["dur"] - start) / 1e3, e["args"])
               for e in trace if e["ph"] == "X" and e["args"]["operation"] == wanted[rank]]
              for rank, trace in enumerate(traces)]
    return events, (max(span["e"] for span in spans) - start) / 1e3


def _kernels(events, *names):
    return [e for e in events if e.name.endswith(names)]


def _done(kernels, low, high):
    """When all of these kernels that touch elements from low to below high have ended; None: there are none."""
    ends = [e.end for e in kernels if e.args["first"] < high and e.args["first"] + e.args["elements"] > low]
    return max(ends, default=None)


def _messages(events, name, phase, peer):
    """In the order of the elements: windows have ascending rounds."""
    found = [e for e in events if e.name == name and e.args.get("phase") == phase and e.args["peer"] == peer]
    return sorted(found, key=lambda e: (e.args["round"], e.args["segment"]))


def segments(events):
    """Of every rank that adds up: a list of its segments (one message each), each the times of POINTS. None: the method has
    no such step."""
    ranks = len(events)
    out, base = [], 0
    for owner in range(ranks):
        others = [r for r in range(ranks) if r != owner]
        rows = [_messages(events[owner], "recv", 1, r) for r in others]
        results = [_messages(events[r], "recv", 2, owner) for r in others]
        count = len(rows[0])
        if count == 0 or any(len(messages) != count for messages in rows + results):
            raise TimelineError(f"rank {owner} received {[len(m) for m in rows]} messages of phase 1 and sent "
                                f"{[len(m) for m in results]} of phase 2: nothing that was reduced in segments")
        servers = _kernels(events[owner], "_server", "reduce")
        begin = min(e.args["first"] for e in servers)
        elements = sum(e.args["elements"] for e in servers)
        per_byte = elements / sum(m.args["bytes"] for m in rows[0])
        out.append([])
        low = 0
        for k in range(count):
            high = low + rows[0][k].args["bytes"] * per_byte

            def all_done(word, low=base + low, high=base + high, ranks=others):
                return max((t for r in ranks if (t := _done(_kernels(events[r], word), low, high)) is not None), default=None)
            row, result = [m[k].end for m in rows], [m[k].end for m in results]
            out[-1].append((all_done("_encode"), min(row), max(row), _done(servers, begin + low, begin + high), min(result),
                            max(result), all_done("_decode")))
            low = high
        base += elements
    return out


def carried(events, name, total):
    """Bytes that a rank's messages carried in each of SLICES parts of the operation."""
    out = [0.0] * SLICES
    for e in events:
        size = e.args.get("bytes", 0)
        if e.name != name or size == 0:
            continue
        length = max(e.end - e.begin, 1e-6)
        for k in range(SLICES):
            low, high = total * k / SLICES, total * (k + 1) / SLICES
            out[k] += size * max(0.0, min(high, e.end) - max(low, e.begin)) / length
    return out


def _line(cells, widths=(16, *[13] * 10)):
    return "".join(str(cell).rjust(width) for cell, width in zip(cells, widths)).rstrip() + "\n"


def _ms(value):
    return "-" if value is None else f"{value:.2f}"


def describe(events, total, bits_per_second):
    """A table of segments of the rank whose results are last, mean gaps over all segments, and what links carried."""
    table = segments(events)
    owner = max(range(len(table)), key=lambda r: max(s[5] for s in table[r]))
    count = len(table[owner])
    text = (f"{total:.2f} ms from the first begin to the last end. Segments that rank {owner} adds up ({count}), ms from the "
            "begin; rows come\nfrom the others, results go to them:\n\n" + _line(("segment", *POINTS)))
    for k in sorted({round(i * (count - 1) / (SHOWN - 1)) for i in range(SHOWN)}):
        text += _line((k, *map(_ms, table[owner][k])))
    text += "\nmean over all segments of all ranks, ms:\n"
    every = [segment for rank in table for segment in rank]
    names = ("phase 1: encoded to first row", "barrier: first to last row", "server: last row to reduced",
             "phase 2: reduced to first result", "first to last result", "decode: last result to decoded")
    for k, name in enumerate(names):
        gaps = [s[k + 1] - s[k] for s in every if s[k] is not None and s[k + 1] is not None]
        text += f"  {name.ljust(36)}{statistics.mean(gaps) if gaps else 0.0:9.2f}\n"
    unit = "Mbit/s" if bits_per_second is None else "% of the rate"
    text += f"\nmessages in each {SLICES}th of the time, {unit} (a message counts evenly over the time it is shown):\n\n"
    scale = 8e3 * SLICES / total / (1e6 if bits_per_second is None else bits_per_second / 100)
    for rank, mine in enumerate(events):
        for name, word in (("send", "sends"), ("recv", "receives")):
            text += _line((f"{rank} {word}", *(f"{b * scale:.0f}" for b in carried(mine, name, total))), (16, *[6] * SLICES))
    kernels = {}
    for mine in events:
        for e in mine:
            if e.name not in ("send", "recv"):
                kernels[e.name] = kernels.get(e.name, 0.0) + e.end - e.begin
    text += "\nkernels, ms per rank: " + ", ".join(f"{n} {ms / len(events):.2f}" for n, ms in sorted(kernels.items())) + "\n"
    return text
