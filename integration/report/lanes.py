"""Time lines of a few steps: what rank 0 does and what is on its way, from the files that SOTTO_TRACE asks for."""

import json

import matplotlib.pyplot as pyplot
from matplotlib.ticker import MaxNLocator

from .figures import COLOURS, INK, PARTS, to_svg
from .logs import ReportError

STEPS = 4  # of the first run, whose time all rows show
FIRST_PEER = 100  # rows of messages; those before it, from 1 on, are of kernels
NETWORK = ("network", "network", "#2563eb")
ROWS = (PARTS[0], PARTS[1], PARTS[2], NETWORK)


def joined(intervals, gap=0.0):
    """The same times without overlaps, in order; what is no more than gap apart is one."""
    out = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1] + gap:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([begin, end])
    return [tuple(one) for one in out]


def without(intervals, holes):
    """intervals less holes. Both as joined returns them."""
    out = []
    for begin, end in intervals:
        for hole_begin, hole_end in holes:
            if hole_end <= begin or hole_begin >= end:
                continue
            out.append((begin, hole_begin))
            begin = hole_end
        out.append((begin, end))
    return [(begin, end) for begin, end in out if end > begin]


def read_lanes(path):
    """(begin of each step, {row: intervals}), in milliseconds. Errors: ReportError."""
    try:
        events = [event for event in json.loads(path.read_text(encoding="utf-8")) if event["ph"] == "X"]
        found = [(event["tid"], event["name"], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3) for event in events]
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path}: not a time line of SOTTO_TRACE: {error}") from error
    compute = [(begin, end) for _, name, begin, end in found if name == "compute"]
    if not compute:
        raise ReportError(f"{path}: the time line has no step")
    kernels = joined((begin, end) for row, _, begin, end in found if 0 < row < FIRST_PEER)
    calls = joined((begin, end) for row, name, begin, end in found if name == "sotto_optim_step")
    messages = joined((begin, end) for row, _, begin, end in found if row >= FIRST_PEER)
    lanes = (compute, kernels, without(calls, kernels), messages)
    return [begin for begin, _ in compute], {key: lane for (key, _, _), lane in zip(ROWS, lanes)}


def time_line(paths):
    """paths: {title: file of rank 0}. From the middle of each run on, for as long as STEPS steps of the first take."""
    runs = {title: read_lanes(path) for title, path in paths.items()}
    figure, all_axes = pyplot.subplots(len(runs), 1, sharex=True, squeeze=False, figsize=(10.5, 0.5 + 1.5 * len(runs)),
                                       layout="constrained")
    first = next(iter(runs.values()))[0]
    middle = len(first) // 2
    width = first[min(middle + STEPS, len(first) - 1)] - first[middle]
    for axes, colour, (title, (steps, lanes)) in zip(all_axes[:, 0], COLOURS, runs.items()):
        start = steps[len(steps) // 2]
        for row, (key, _, fill) in enumerate(ROWS):
            seen = [(max(begin - start, 0), min(end - start, width)) for begin, end in joined(lanes[key], width / 2000)
                    if end > start and begin < start + width]
            axes.broken_barh([(begin, end - begin) for begin, end in seen], (row - 0.36, 0.72), color=fill, linewidth=0)
        axes.vlines([begin - start for begin in steps if 0 <= begin - start <= width], -0.5, len(ROWS) - 0.5, color=INK,
                    linewidth=0.6)
        axes.set_yticks(range(len(ROWS)), [name for _, name, _ in ROWS], fontsize=8.5)
        axes.set_ylim(len(ROWS) - 0.5, -0.5)
        axes.set_xlim(0, width)
        axes.grid(False)
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=colour)
    all_axes[-1, 0].xaxis.set_major_locator(MaxNLocator(10))
    all_axes[-1, 0].set_xlabel("milliseconds (a thin line: a step begins)")
    return to_svg(figure)
