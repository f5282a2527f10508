"""Parts that reports of runs share: tables, figures with their captions, and what was checked."""

from . import figures, page
from .compare import BETWEEN_HOSTS

INSIDE_HOSTS = "payload_bytes_inside_hosts"


def percent(ratio):
    return f"{(ratio - 1) * 100:+.1f} %"


def bytes_caption(groups, about):
    means = [run.name for run in groups[0] if figures.sent_per_step(run)[1]]
    mean = f" {' and '.join(means)}: a running mean, since the bytes change from step to step." if means else ""
    return f"Payload that rank 0 sends in each step (logarithmic). {about}{mean}"


def plots(groups, entropy, reached, about_bytes, about_waiting):
    """groups: the runs of each seed. reached: what figures.loss_against_time marks, or None. The last two are sentences of the
    captions."""
    others = " Pale lines: the other seeds." if len(groups) > 1 else ""
    return page.figures([
        ("Loss against samples", figures.loss_against_samples(groups, entropy),
         "What compression costs: loss on the fixed held-out subset after equally many sequences. Pale and unmarked: "
         f"training loss, smoothed.{others}"),
        ("Loss against time", figures.loss_against_time(groups, entropy, reached),
         f"What compression gains: the same losses over the clock of the training, evaluations left out.{others}"),
        ("Bytes per step", figures.bytes_per_step(groups), bytes_caption(groups, about_bytes)),
        ("Where a step's time goes", figures.time_of_a_step(groups),
         f"Rank 0, mean over the steps of a stage. {about_waiting}"),
    ])


def whole(values):
    """One value if all ranks have the same in the digits that are shown, else the range."""
    low, high = figures.bytes_text(min(values)), figures.bytes_text(max(values))
    return low if low == high else f"{low} to {high}"


def with_inside(one):
    """The figures of a run, with what ranks have sent to ranks of their own hosts if they tell of hosts."""
    if BETWEEN_HOSTS not in one:
        return one
    pairs = zip(one["payload_bytes_sent"], one[BETWEEN_HOSTS])
    return {**one, INSIDE_HOSTS: [sent - between for sent, between in pairs]}


def result_table(first, others):
    """A column per run; behind each but the first, what the first has divided by it. first: (title, figures of the run);
    others: (title, short title, figures)."""
    title, base = first[0], with_inside(first[1])
    others = [(name, short, with_inside(one)) for name, short, one in others]

    def row(label, key, show, amount=lambda value: value, digits=2):
        cells = [label, show(base[key])]
        for _, _, one in others:
            value = amount(one[key])
            cells += [show(one[key]), f"{amount(base[key]) / value:.{digits}f}" if value else ""]
        return tuple(cells)

    def seconds(label, key):
        return row(label, key, lambda value: f"{value:.1f} s")

    def payload(label, key):
        return row(label, key, whole, sum)

    rows = [
        row("Steps", "steps", lambda value: f"{value:,}", lambda _: 0),
        row("Held-out loss, nats per masked byte", "val_loss", lambda value: f"{value:.4f}", digits=3),
        seconds("Clock of the whole run", "wall_s"),
        seconds("— compute, outside Sotto", "compute_s"),
        seconds("— Sotto's kernels", "codec_s"),
        seconds("— waiting for the network", "exposed_comm_s"),
        payload("Payload sent, per rank", "payload_bytes_sent"),
        payload("Payload planned, per rank", "payload_bytes_planned"),
        payload("Headers sent, per rank", "header_bytes_sent"),
    ]
    if BETWEEN_HOSTS in base:
        rows[-2:-2] = [payload("— to ranks of other hosts", BETWEEN_HOSTS), payload("— inside hosts", INSIDE_HOSTS)]
    if all(one.get("interface_bytes_sent") for one in (base, *(one for _, _, one in others))):
        rows.append(payload("Sent by the interface, per rank", "interface_bytes_sent"))
    skipped = [one.get("skipped_steps", 0) for _, _, one in others]
    if any(skipped):
        cells = [cell for n in skipped for cell in (f"{n:g}" if n else "", "")]
        rows.insert(1, ("— and left out by loss scaling", "", *cells))
    return page.table(["", title] + [cell for name, short, _ in others for cell in (name, f"{title} / {short}")], rows)


def checks_section(problems):
    if problems:
        return [page.heading("Checks"), page.note("Something is wrong with these figures:"), page.bullets(problems)]
    return [page.heading("Checks"), page.bullets([
        "On every rank the payload bytes sent equal those that the plans predicted.",
        "In every run compute, kernels and waiting add up to the clock within 2 %."])]
