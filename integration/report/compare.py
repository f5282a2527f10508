"""A baseline run against a compressed one, and against one more: the figures of summary.json."""

from .logs import NUMBERS, PER_RANK, ReportError

# The clock's parts must add up to it within this share, and what processes that take turns may lose.
CLOCK_TOLERANCE, CLOCK_SLACK_S = 0.02, 0.05
BETWEEN_HOSTS = "payload_bytes_between_hosts"
NEAR = 1.03  # a loss that is nearly the baseline's: of its last evaluation


def first_at_or_below(evaluations, loss):
    """The first evaluation with at most this loss, or None."""
    return next((e for e in evaluations if e.loss <= loss), None)


def ratios(baseline, compressed):
    """How the compressed run compares; above 1 is in its favour, except for val_loss."""
    base, comp = baseline.summary, compressed.summary
    wall = base["wall_s"] / comp["wall_s"]
    reached = first_at_or_below(baseline.evaluations, compressed.evaluations[-1].loss)
    sent = sum(comp["payload_bytes_sent"])
    if sent <= 0:
        raise ReportError(f"{compressed.name}: no payload was sent; a comparison needs at least two ranks")
    volume = sum(base["payload_bytes_sent"]) * comp["steps"] / base["steps"] / sent
    return {
        "wall": wall,
        "time_to_same_loss": reached.clock_s / comp["wall_s"] if reached else wall,
        "same_loss_reached": reached is not None,
        "val_loss": comp["val_loss"] / base["val_loss"],
        "volume_vs_fp32": volume,
        "volume_vs_16bit": volume / 2,
    }


def at_equal_time(baseline, other):
    """What the baseline had reached when the other run ended, and who came near the baseline's last loss when."""
    last = other.evaluations[-1]
    before = [e for e in baseline.evaluations if e.clock_s <= last.clock_s] or baseline.evaluations[:1]
    near = NEAR * baseline.evaluations[-1].loss
    own = first_at_or_below(other.evaluations, near)
    clock_s = own.clock_s if own else last.clock_s
    return {
        "baseline_loss_at_equal_time": before[-1].loss,
        "loss_at_equal_time": last.loss / before[-1].loss,
        "near_loss_s": clock_s,
        "near_loss_reached": own is not None,
        "time_to_near_loss": first_at_or_below(baseline.evaluations, near).clock_s / clock_s,
    }


def network_share(summary):
    """Share of LAMB's time in which it waits for the network."""
    return summary["lamb"]["exposed_comm_s"] / summary["lamb"]["wall_s"]


def expected_ratio(summary):
    """How many times as fast a run is that computes as LAMB does and waits in proportion to what 1-bit LAMB sends."""
    return 1 / (1 - network_share(summary) * (1 - 1 / summary["ratios"]["volume_vs_fp32"]))


def figures_of(run, more=()):
    return {key: run.summary[key] for key in NUMBERS + PER_RANK + tuple(more)}


def ratios_key(name):
    """Where summary.json has the ratios of the additional run."""
    return f"ratios_{name}"


def unlimited_key(name):
    """Where summary.json has the additional run without a limit on the links; the stem of its files too."""
    return f"{name}-unlimited"


def check_same_data(runs):
    first, entropy = runs[0], runs[0].summary["unigram_entropy"]
    for run in runs[1:]:
        if entropy != run.summary["unigram_entropy"]:
            raise ReportError(f"{first.name} and {run.name} saw different data: unigram entropy {entropy} and "
                              f"{run.summary['unigram_entropy']}")


def hierarchy(flat, sharded):
    """What two levels save; above 1 is in their favour."""
    for run in (flat, sharded):
        if not sum(run.summary.get(BETWEEN_HOSTS) or [0]):
            raise ReportError(f"{run.name}: the summary has no {BETWEEN_HOSTS}; two levels need several hosts")
    return {
        "wall": flat.summary["wall_s"] / sharded.summary["wall_s"],
        "wall_saved_s": flat.summary["wall_s"] - sharded.summary["wall_s"],
        "between_hosts": sum(flat.summary[BETWEEN_HOSTS]) / sum(sharded.summary[BETWEEN_HOSTS]),
    }


def network_costs(limited, unlimited):
    """What a limit on the links costs the same run. On fewer cores than ranks, ranks wait for each other anyway: what the
    network adds is the difference."""
    there, away = limited.summary, unlimited.summary
    return {
        "wall": there["wall_s"] / away["wall_s"],
        "exposed_share": there["exposed_comm_s"] / there["wall_s"],
        "exposed_share_unlimited": away["exposed_comm_s"] / away["wall_s"],
        "exposed_share_added": (there["exposed_comm_s"] - away["exposed_comm_s"]) / there["wall_s"],
    }


def compare(runs, extra=None, levels=False):
    """unigram_entropy, lamb, onebit_lamb and ratios of one seed; with a third run, named extra, that one's too, and with
    a fourth, which is the third without a limit on the links, what the network costs. levels: the third is the second one in
    two levels."""
    baseline, compressed = runs[:2]
    check_same_data(runs)
    more = (BETWEEN_HOSTS,) if levels else ()
    figures = {
        "unigram_entropy": baseline.summary["unigram_entropy"],
        "lamb": figures_of(baseline, more),
        "onebit_lamb": figures_of(compressed, more),
    }
    if extra:
        figures[extra] = figures_of(runs[2], ("skipped_steps", *more))
    figures["ratios"] = ratios(baseline, compressed)
    if extra:
        figures[ratios_key(extra)] = {**ratios(baseline, runs[2]), **at_equal_time(baseline, runs[2])}
    if len(runs) > 3:
        figures[unlimited_key(extra)] = figures_of(runs[3], ("skipped_steps",))
        figures["network_costs"] = network_costs(*runs[2:])
    if levels:
        figures["hierarchy"] = hierarchy(compressed, runs[2])
    return figures


def mean(values):
    """Mean of numbers, of lists entry by entry, of objects key by key; of truths: whether all are true."""
    first = values[0]
    if isinstance(first, bool):
        return all(values)
    if isinstance(first, dict):
        return {key: mean([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [mean(list(entries)) for entries in zip(*values)]
    total = sum(values)
    whole = isinstance(total, int) and total % len(values) == 0
    return total // len(values) if whole else total / len(values)


def summary_of(links_mbit, isolation, groups, seeds=None, extra=None, hosts=None):
    """The content of summary.json. groups: (baseline, compressed) per seed, and the runs named extra if there are some;
    seeds: given if they were asked for. hosts: their number and that of ranks on each; extra is then in two levels."""
    compared = [compare(runs, extra, hosts is not None) for runs in groups]
    summary = {"links_mbit": links_mbit, "isolation": isolation, **({"hosts": hosts} if hosts else {}), **mean(compared)}
    if seeds is not None:
        summary["seeds"] = [{"seed": seed, **one} for seed, one in zip(seeds, compared)]
    return summary


def broken_checks(runs):
    """What must hold in every run and does not, as sentences."""
    problems = []
    for run in runs:
        s = run.summary
        if s["payload_bytes_sent"] != s["payload_bytes_planned"]:
            problems.append(f"{run.name}: payload bytes sent {s['payload_bytes_sent']} differ from those planned "
                            f"{s['payload_bytes_planned']}")
        parts = s["compute_s"] + s["codec_s"] + s["exposed_comm_s"]
        # Parts are means over ranks, whose clocks start a moment apart.
        clocks = s.get("rank_wall_s") or [s["wall_s"]]
        wall = sum(clocks) / len(clocks)
        if abs(parts - wall) > CLOCK_TOLERANCE * wall + CLOCK_SLACK_S:
            problems.append(f"{run.name}: compute + codec + exposed communication = {parts:.2f} s, but the clock says "
                            f"{wall:.2f} s")
    return problems
