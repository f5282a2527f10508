"""Figures as SVG text, all in one style. Each function draws one figure.

groups: the runs to compare, a tuple per seed, in the order of COLOURS; the first two are the baseline and the compressed run.
"""

import io
import re

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as pyplot  # noqa: E402
import numpy  # noqa: E402
from matplotlib.ticker import FuncFormatter  # noqa: E402

COLOURS = ("#64748b", "#d9480f", "#2563eb", "#9333ea", "#15803d", "#b45309")  # baseline, compressed, more
PARTS = (("compute_ms", "compute", "#94a3b8"), ("codec_ms", "kernels of Sotto", "#0d9488"),
         ("comm_ms", "waiting for the network", "#f59e0b"))
INK, FAINT = "#1e293b", "#e2e8f0"
MAX_POINTS = 500
MAX_MARKS = 30
MAX_CHANGES = 20  # of the bytes from step to step, beyond which a running mean is drawn

_STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": "#94a3b8",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": FAINT, "grid.linewidth": 0.8,
    "axes.axisbelow": True, "xtick.color": "#475569", "ytick.color": "#475569", "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round", "legend.frameon": False, "svg.hashsalt": "sotto", "svg.fonttype": "path",
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
}
matplotlib.rcParams.update(_STYLE)


def bytes_text(value):
    """1234567 -> "1.2 MB" (powers of 1000, as link rates are)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.5 else f"{value:.1f} {unit}"
        value /= 1000
    return ""


def count_text(value):
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def to_svg(figure):
    """SVG text without prologue and fixed size, ready to stand inside HTML."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    pyplot.close(figure)
    text = out.getvalue()
    text = text[text.index("<svg"):]
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, 1), 1)


def start(height=3.3):
    """(figure, axes) of the width that reports have."""
    return pyplot.subplots(figsize=(6.2, height), layout="constrained")


def smooth(values, window):
    """Running mean over `window` values, each over what there is near the ends."""
    window = max(1, min(int(window), len(values)))
    sums = numpy.concatenate(([0.0], numpy.cumsum(values)))
    after = numpy.minimum(numpy.arange(len(values)) + (window + 1) // 2, len(values))
    before = numpy.maximum(after - window, 0)
    return (sums[after] - sums[before]) / (after - before)


def thin(x, y, points=MAX_POINTS):
    """At most about `points` of the pairs, the last among them."""
    pick = numpy.unique(numpy.linspace(0, len(x) - 1, min(points, len(x))).astype(int))
    return x[pick], y[pick]


def _draw_loss(axes, groups, column, attribute):
    """Held-out losses with a mark per evaluation; the training loss behind them. The first seed stands out."""
    for number, runs in enumerate(groups):
        for run, colour in zip(runs, COLOURS):
            first = number == 0
            x = [getattr(e, attribute) for e in run.evaluations]
            y = [e.loss for e in run.evaluations]
            if first:
                trained = smooth(run.columns["loss"], len(run.columns["loss"]) // 60)
                axes.plot(*thin(run.columns[column], trained), color=colour, alpha=0.3, linewidth=1)
            axes.plot(x, y, color=colour, alpha=1 if first else 0.35, label=run.name if first else None,
                      marker="o" if first and len(x) <= MAX_MARKS else "", markersize=3, linewidth=1.8 if first else 1)


def _loss_axes(axes, groups, entropy, x_label):
    lowest = min(e.loss for runs in groups for run in runs for e in run.evaluations)
    highest = max(entropy + 0.3, *(run.evaluations[0].loss for runs in groups for run in runs))
    axes.axhline(entropy, color="#475569", linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate("entropy of single bytes", (1, entropy), xycoords=("axes fraction", "data"), xytext=(0, 3),
                  textcoords="offset points", ha="right", fontsize=8.5, color="#475569")
    # The first steps, from ln(alphabet) down, would take most of the height: what matters is below.
    axes.set_ylim(min(lowest, entropy) - 0.12, min(highest + 0.1, max(lowest + 1, 1.3 * entropy)))
    axes.set_xlim(left=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel("loss (nats per masked byte)")
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.72))


def loss_against_samples(groups, entropy):
    figure, axes = start()
    _draw_loss(axes, groups, "samples", "samples")
    _loss_axes(axes, groups, entropy, "sequences seen")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    return to_svg(figure)


def loss_against_time(groups, entropy, reached):
    """reached: the baseline's first evaluation at or below the other's last, or None."""
    figure, axes = start()
    _draw_loss(axes, groups, "clock_s", "clock_s")
    _loss_axes(axes, groups, entropy, "seconds of training")
    last = groups[0][1].evaluations[-1]
    if reached:
        axes.annotate("", (reached.clock_s, last.loss), xytext=(last.clock_s, last.loss),
                      arrowprops={"arrowstyle": "<->", "color": INK, "linewidth": 1, "shrinkA": 3, "shrinkB": 3})
        axes.annotate(f"same loss: {last.clock_s:.0f} s and {reached.clock_s:.0f} s",
                      ((last.clock_s + reached.clock_s) / 2, last.loss), xytext=(0, -12),
                      textcoords="offset points", ha="center", fontsize=8.5)
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, last.loss - 0.09 * (high - low)), high)
    return to_svg(figure)


def sent_per_step(run):
    """(bytes that rank 0 sent in each step, whether they are a running mean). Stages that alternate, as 0/1 Adam's do, would
    only blacken the figure."""
    sent = run.columns["payload_bytes"]
    if numpy.count_nonzero(numpy.diff(sent)) <= MAX_CHANGES:
        return sent, False
    return smooth(sent, len(sent) // 40), True


def bytes_per_step(groups):
    """What rank 0 sends in each step; a logarithmic axis, since the stages differ by a factor of 30."""
    figure, axes = start()
    drawn = [sent_per_step(run)[0] for run in groups[0]]
    highest = max(sent.max() for sent in drawn)
    lowest = min(sent[sent > 0].min() for sent in drawn if (sent > 0).any())
    for run, sent, colour in zip(groups[0], drawn, COLOURS):
        axes.step(run.columns["step"], sent, where="mid", color=colour, label=run.name)
        axes.annotate(bytes_text(sent[-1]), (run.columns["step"][-1], max(sent[-1], lowest)), xytext=(-2, 5),
                      textcoords="offset points", ha="right", fontsize=8.5, color=colour, fontweight="bold")
    axes.set_yscale("log")
    axes.set_ylim(lowest / 2, highest * 3)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    axes.set_xlim(left=0)
    axes.set_xlabel("step")
    axes.set_ylabel("payload that one rank sends")
    axes.legend(loc="center right")
    return to_svg(figure)


def stage_means(run):
    """(label, {part: milliseconds per step}, steps) for each stage of a run, in the order in which they came."""
    names = list(dict.fromkeys(run.stages))
    stages = numpy.array(run.stages)
    out = []
    for name in names:
        mask = stages == name
        label = run.name if len(names) == 1 else f"{run.name}\n{name}"
        out.append((label, {key: float(run.columns[key][mask].mean()) for key, _, _ in PARTS}, int(mask.sum())))
    return out


def time_of_a_step(groups):
    """Stacked bars: where the mean step of each stage spends its time on rank 0."""
    bars = [bar for run in groups[0] for bar in stage_means(run)]
    figure, axes = start(1.5 + 0.55 * len(bars))
    labels = [f"{label}\n({steps} steps)" for label, _, steps in bars]
    left = numpy.zeros(len(bars))
    for key, name, colour in PARTS:
        widths = numpy.array([parts[key] for _, parts, _ in bars])
        axes.barh(labels, widths, left=left, color=colour, label=name, height=0.62)
        left += widths
    for row, total in enumerate(left):
        axes.annotate(f"{total:.1f} ms", (total, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, left.max() * 1.14)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlabel("milliseconds per step")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=9, borderaxespad=0.2)
    return to_svg(figure)
