"""Any number of runs of one task, compared with the first of them: a table in Markdown, and a page."""

from html import escape
from pathlib import Path

from . import compare, figures, machine, page
from .logs import ReportError
from .sections import checks_section, percent, plots, result_table, whole

ABOUT_BYTES = "Each run sends what its method needs; steps, batches and parameters are the same."
ABOUT_WAITING = ("Waiting is what is left of the averaging after Sotto's own kernels: the network, slower ranks, and what other "
                 "libraries compute meanwhile.")


def sent(run):
    """Bytes of each rank: on its interface where that was measured, else the payload."""
    return run.summary.get("interface_bytes_sent") or run.summary["payload_bytes_sent"]


def rows(runs):
    """The table's header and rows, as text."""
    first = runs[0]
    header = ["run", "held-out loss", f"against {first.name}", "wall time", f"{first.name} / run", "payload per rank",
              "on its interface", f"{first.name} / run"]
    body = []
    for run in runs:
        s, base = run.summary, first.summary
        if s["wall_s"] <= 0 or sum(sent(run)) <= 0:
            raise ReportError(f"{run.name}: nothing was sent, or no time was taken")
        body.append([
            run.name, f"{s['val_loss']:.4f}", percent(s["val_loss"] / base["val_loss"]), f"{s['wall_s']:.1f} s",
            f"{base['wall_s'] / s['wall_s']:.2f}", whole(s["payload_bytes_sent"]),
            whole(s["interface_bytes_sent"]) if s.get("interface_bytes_sent") else "-",
            f"{sum(sent(first)) / sum(sent(run)):.2f}"])
    return header, body


def markdown(runs):
    header, body = rows(runs)
    align = ["---"] + ["---:"] * (len(header) - 1)
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (header, align, *body))


def write(path, runs, *, title, about, network, command, configs, root):
    """Writes the page. about: sentences on what was measured; configs: (title, file) of each. The checks that failed, as
    sentences. Errors: ReportError."""
    compare.check_same_data(runs)
    if len(runs) > len(figures.COLOURS):
        raise ReportError(f"{len(runs)} runs; a report has colours for {len(figures.COLOURS)}")
    problems = compare.broken_checks(runs)
    first, *others = runs
    parts = [
        f"<h1>{escape(title)}</h1>",
        page.paragraph(f"{first.ranks} ranks · {first.summary['steps']:,} steps · {first.summary['parameters']:,} parameters",
                       "subtitle"),
        page.table(*rows(runs)),
        plots([tuple(runs)], first.summary["unigram_entropy"], None, ABOUT_BYTES, ABOUT_WAITING),
        page.heading("Figures"),
        result_table((first.name, first.summary), [(run.name, run.name, run.summary) for run in others]),
        *checks_section(problems),
        page.heading("What was measured, and how"),
        page.bullets(about),
        page.pairs([("Network", network), ("Command", command)] + machine.describe(root)),
        *(page.folded(f"Configuration of {name}", Path(file).read_text(encoding="utf-8")) for name, file in configs),
    ]
    Path(path).write_text(page.document(title, parts), encoding="utf-8")
    return problems
