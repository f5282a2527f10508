"""The quickstart's figures and report: LAMB against 1-bit LAMB.

  python3 -m report.quickstart scale IN.json OUT.json --steps N
  python3 -m report.quickstart finish --dir DIR --links 100 --isolation netns --network TEXT --command TEXT ...

`finish` reads lamb.jsonl, lamb.summary.json and the same for onebit_lamb from DIR (for a further seed S:
lamb-seedS.jsonl, ...), writes summary.json and report.html there, and prints the headline.
"""

import argparse
import json
import sys
from pathlib import Path

from . import compare, figures, machine, page
from .logs import ReportError, read_json, read_run

NAMES = {"lamb": "LAMB", "onebit_lamb": "1-bit LAMB"}
EXIT_BAD_INPUT, EXIT_CHECK_FAILED = 1, 3


def scale_config(config, steps):
    """The same schedule on another number of steps: everything that is counted in steps keeps its share."""
    try:
        scheduler = config["scheduler"]["params"]
        params = config["optimizer"]["params"]
        share = steps / scheduler["total_num_steps"]
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ReportError("a configuration whose schedule is to be scaled needs optimizer.params and "
                          "scheduler.params.total_num_steps") from error
    scheduler["total_num_steps"] = steps
    for place, key in ((scheduler, "warmup_num_steps"), (params, "freeze_step")):
        if key in place:
            place[key] = max(1, round(place[key] * share))
    return config


def stem(run, seed, first_seed):
    """File name, without its end, of a run's log: the first seed's has no suffix."""
    return run if seed == first_seed else f"{run}-seed{seed}"


def read_pairs(folder, seeds):
    pairs = []
    for seed in seeds:
        names = {run: stem(run, seed, seeds[0]) for run in NAMES}
        pairs.append(tuple(read_run(NAMES[run], folder / f"{name}.jsonl", folder / f"{name}.summary.json")
                           for run, name in names.items()))
    return pairs


def percent(ratio):
    return f"{(ratio - 1) * 100:+.1f} %"


def headline(summary):
    """The result in one sentence: the time to the same loss, since at equal samples the losses differ."""
    r, base, comp = summary["ratios"], summary["lamb"], summary["onebit_lamb"]
    if r["same_loss_reached"]:
        first = (f"LAMB needed {r['time_to_same_loss']:.2f} times as long as 1-bit LAMB to reach 1-bit LAMB's last "
                 "evaluation loss")
    else:
        first = (f"LAMB did not reach 1-bit LAMB's last evaluation loss; its whole run took {r['wall']:.2f} times as "
                 "long")
    return (f"{first}. Whole runs: {base['wall_s']:.0f} s and {comp['wall_s']:.0f} s (ratio {r['wall']:.2f}); held-out "
            f"loss {base['val_loss']:.3f} and {comp['val_loss']:.3f} nats ({percent(r['val_loss'])}); 1-bit LAMB sent "
            f"{r['volume_vs_fp32']:.1f} times fewer bytes than 32-bit gradients need.")


def tiles(summary):
    r = summary["ratios"]
    same = "faster to the same loss" if r["same_loss_reached"] else "faster, whole run (LAMB did not reach the loss)"
    return page.tiles([
        (f"{r['time_to_same_loss']:.2f}×", same),
        (f"{r['wall']:.2f}×", "faster for the whole run"),
        (percent(r["val_loss"]), "held-out loss of 1-bit LAMB against LAMB (less is better)"),
        (f"{r['volume_vs_fp32']:.1f}×", f"fewer bytes than 32-bit gradients ({r['volume_vs_16bit']:.1f}× than 16-bit)"),
    ])


def plots(pairs, summary):
    reached = compare.first_at_or_below(pairs[0][0].evaluations, pairs[0][1].evaluations[-1].loss)
    entropy = summary["unigram_entropy"]
    others = " Pale lines: the other seeds." if len(pairs) > 1 else ""
    return page.figures([
        ("Loss against samples", figures.loss_against_samples(pairs, entropy),
         "What compression costs: loss on the fixed held-out subset after equally many sequences. Pale and unmarked: "
         f"training loss, smoothed.{others}"),
        ("Loss against time", figures.loss_against_time(pairs, entropy, reached),
         f"What compression gains: the same losses over the clock of the training, evaluations left out.{others}"),
        ("Bytes per step", figures.bytes_per_step(pairs),
         "Payload that rank 0 sends in each step (logarithmic). 1-bit LAMB sends full-precision gradients until its "
         "freeze_step, then one bit per parameter and direction."),
        ("Where a step's time goes", figures.time_of_a_step(pairs),
         "Rank 0, mean over the steps of a stage. Waiting is what is left of Sotto's calls after its own kernels; it "
         "includes waiting for slower ranks."),
    ])


def whole(values):
    """One value if all ranks have the same, else the range."""
    low, high = min(values), max(values)
    return figures.bytes_text(low) if low == high else f"{figures.bytes_text(low)} to {figures.bytes_text(high)}"


def result_table(summary):
    base, comp, r = summary["lamb"], summary["onebit_lamb"], summary["ratios"]

    def seconds(label, key):
        return (label, f"{base[key]:.1f} s", f"{comp[key]:.1f} s", f"{base[key] / comp[key]:.2f}" if comp[key] else "")

    def payload(label, key):
        return (label, whole(base[key]), whole(comp[key]), f"{sum(base[key]) / sum(comp[key]):.2f}" if sum(comp[key]) else "")

    return page.table(("", "LAMB", "1-bit LAMB", "LAMB / 1-bit"), [
        ("Steps", f"{base['steps']:,}", f"{comp['steps']:,}", ""),
        ("Held-out loss, nats per masked byte", f"{base['val_loss']:.4f}", f"{comp['val_loss']:.4f}",
         f"{1 / r['val_loss']:.3f}"),
        seconds("Clock of the whole run", "wall_s"),
        seconds("— compute, outside Sotto", "compute_s"),
        seconds("— Sotto's kernels", "codec_s"),
        seconds("— waiting for the network", "exposed_comm_s"),
        payload("Payload sent, per rank", "payload_bytes_sent"),
        payload("Payload planned, per rank", "payload_bytes_planned"),
        payload("Headers sent, per rank", "header_bytes_sent"),
    ])


def seeds_table(summary):
    rows = []
    for one in summary["seeds"]:
        r = one["ratios"]
        reached = "" if r["same_loss_reached"] else " (not reached: whole run)"
        rows.append((str(one["seed"]), f"{one['lamb']['val_loss']:.4f}", f"{one['onebit_lamb']['val_loss']:.4f}",
                     percent(r["val_loss"]), f"{r['wall']:.2f}", f"{r['time_to_same_loss']:.2f}{reached}"))
    r = summary["ratios"]
    rows.append(("mean", f"{summary['lamb']['val_loss']:.4f}", f"{summary['onebit_lamb']['val_loss']:.4f}",
                 percent(r["val_loss"]), f"{r['wall']:.2f}", f"{r['time_to_same_loss']:.2f}"))
    return page.table(("Seed", "LAMB loss", "1-bit loss", "difference", "time ratio, whole run", "time ratio, same loss"), rows)


def links_text(links_mbit, isolation, ranks):
    rate = f"{links_mbit:g} Mbit/s"
    if isolation == "netns":
        return (f"{ranks} ranks on one machine, each in a network namespace of its own. Their links meet at a bridge; a "
                f"token bucket at both ends of every link holds each direction to {rate}.")
    return (f"{ranks} ranks on one machine, talking over loopback TCP. Network namespaces were not permitted here, or not "
            f"wanted, so Sotto's own rate limiter holds what each rank sends and what it receives to {rate}. There is no "
            "link to fill and no packet to lose: treat the times as a close estimate.")


def method(arguments, pairs):
    run = pairs[0][0]
    sequences = int(run.columns["samples"][0] / run.columns["step"][0])
    return [
        page.heading("What was measured, and how"),
        page.paragraph(
            f"Two runs, one after the other, train the same masked language model ({run.summary['parameters']:,} parameters) "
            f"with the same seed, data and batches ({sequences} sequences a step over all ranks). They differ in the "
            "optimizer alone. " + links_text(arguments.links, arguments.isolation, run.ranks)),
        page.bullets([
            "Clock: rank 0's monotonic clock, started at a barrier before the first step, stopped between barriers during "
            "evaluations and checkpoints.",
            "Evaluation: a fixed subset of the held-out data with fixed masks; the held-out loss in the table is over all "
            "held-out data, once at the end.",
            "Time to the same loss: the clock of LAMB's first evaluation at or below 1-bit LAMB's last one, divided by the "
            "whole run of 1-bit LAMB.",
            "Compute, kernels and waiting are means over the ranks and add up to the clock. The ranks share this machine's "
            "cores, so compute is slower than on a machine of their own.",
            "Bytes are counted at the transport and compared with the plan's prediction. The comparison with 32 bits is "
            "with what LAMB sent in as many steps; 16 bits are half of that.",
            "Losses differ by a few percent from seed to seed: one seed is an example, not a proof.",
        ]),
        page.pairs([("Network", arguments.network), ("Command", arguments.command)] + machine.describe(arguments.root)),
    ] + [page.folded(f"Configuration of {NAMES[name]}", Path(path).read_text(encoding="utf-8"))
         for name, path in zip(NAMES, arguments.configs)]


def checks_section(problems):
    if problems:
        return [page.heading("Checks"), page.note("Something is wrong with these figures:"), page.bullets(problems)]
    return [page.heading("Checks"), page.bullets([
        "On every rank the payload bytes sent equal those that the plans predicted.",
        "In every run compute, kernels and waiting add up to the clock within 2 %."])]


def write_report(path, arguments, pairs, summary, problems):
    seeds = f"{len(pairs)} seeds" if len(pairs) > 1 else f"seed {arguments.seeds[0]}"
    parts = ["<h1>LAMB and 1-bit LAMB on a slow network</h1>",
             page.paragraph(f"Sotto quickstart · {pairs[0][0].ranks} ranks · every link at {arguments.links:g} Mbit/s · "
                            f"{seeds}", "subtitle"),
             page.paragraph(headline(summary), "lead")]
    if arguments.quick:
        parts.append(page.note("Quick run: far too few steps for the losses to mean much. It shows that everything works, "
                               "and the times and bytes of a step."))
    parts += [tiles(summary), plots(pairs, summary),
              page.heading("Figures" + (" (means over the seeds)" if len(pairs) > 1 else "")), result_table(summary)]
    if len(pairs) > 1:
        parts += [page.heading("Seed by seed"), seeds_table(summary)]
    parts += checks_section(problems) + method(arguments, pairs)
    path.write_text(page.document("Sotto: LAMB and 1-bit LAMB", parts), encoding="utf-8")


def finish(arguments):
    folder = Path(arguments.dir)
    pairs = read_pairs(folder, arguments.seeds)
    summary = compare.summary_of(arguments.links, arguments.isolation, pairs,
                                 arguments.seeds if arguments.list_seeds else None)
    problems = compare.broken_checks([run for pair in pairs for run in pair])
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    write_report(folder / "report.html", arguments, pairs, summary, problems)
    print(headline(summary))
    for problem in problems:
        print(f"CHECK FAILED: {problem}")
    return EXIT_CHECK_FAILED if problems else 0


def number(text):
    """An integer where the text is one, so that JSON shows 100 rather than 100.0."""
    return int(text) if text.isdigit() else float(text)


def seed_list(text):
    seeds = [int(part) for part in text.split(",")]
    if len(set(seeds)) != len(seeds):
        raise argparse.ArgumentTypeError("a seed is given twice")
    return seeds


def parse(words):
    parser = argparse.ArgumentParser(prog="report.quickstart", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    scale = commands.add_parser("scale", help="a configuration for another number of steps")
    scale.add_argument("source")
    scale.add_argument("target")
    scale.add_argument("--steps", type=int, required=True)
    done = commands.add_parser("finish", help="summary.json, report.html and the headline")
    done.add_argument("--dir", required=True, help="holds the runs' files; the results go there")
    done.add_argument("--root", required=True, help="of the repository")
    done.add_argument("--links", type=number, required=True, help="Mbit/s")
    done.add_argument("--isolation", choices=("netns", "rate_limiter"), required=True)
    done.add_argument("--network", required=True, help="how the links were made, for the report")
    done.add_argument("--command", required=True, help="what was started, for the report")
    done.add_argument("--configs", nargs=2, required=True, help="of lamb and onebit_lamb")
    done.add_argument("--seeds", type=seed_list, default=[1])
    done.add_argument("--list-seeds", action="store_true", help="seeds and means in summary.json")
    done.add_argument("--quick", action="store_true")
    return parser.parse_args(words)


def main(words=None):
    arguments = parse(words)
    try:
        if arguments.action == "finish":
            return finish(arguments)
        config = scale_config(read_json(arguments.source), arguments.steps)
        Path(arguments.target).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return 0
    except (ReportError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
