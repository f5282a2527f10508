"""The quickstart's figures and report: LAMB against 1-bit LAMB, and one more configuration where that is wanted.

  python3 -m report.quickstart scale IN.json OUT.json --steps N
  python3 -m report.quickstart finish --dir DIR --links 100 --isolation netns --network TEXT --command TEXT ...

`finish` reads lamb.jsonl, lamb.summary.json and the same for onebit_lamb and for --extra NAME from DIR (for a further
seed S: lamb-seedS.jsonl, ...; NAME without a limit on the links: NAME-unlimited.jsonl), and trace/lamb.rank0.json, ... where
there is a folder trace. It writes summary.json and report.html there, and prints the headline.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from . import compare, config, lanes, machine, page
from .logs import ReportError, read_json, read_run
from .sections import checks_section, percent, plots, result_table

NAMES = {"lamb": "LAMB", "onebit_lamb": "1-bit LAMB"}
MEAN = "mean"  # of the seeds, as the label of a row
SAME_COMPUTE = 0.05  # what the same run's compute may differ by on an idle machine
EXIT_BAD_INPUT, EXIT_CHECK_FAILED = 1, 3


def stem(run, seed, first_seed):
    """File name, without its end, of a run's log: the first seed's has no suffix."""
    return run if seed == first_seed else f"{run}-seed{seed}"


def names_of(extra, unlimited=False):
    """File name and title of every run of a seed, in order."""
    names = {**NAMES, extra: extra} if extra else NAMES
    return {**names, compare.unlimited_key(extra): f"{extra}, no limit"} if unlimited else names


def read_runs(folder, seeds, names):
    """A tuple of runs per seed."""
    groups = []
    for seed in seeds:
        stems = {run: stem(run, seed, seeds[0]) for run in names}
        groups.append(tuple(read_run(names[run], folder / f"{name}.jsonl", folder / f"{name}.summary.json")
                            for run, name in stems.items()))
    return groups


def extra_headline(summary, extra):
    """How the additional run compares with LAMB, in sentences of its own: also at equal time, where seldom averages pay."""
    r, one = summary[compare.ratios_key(extra)], summary[extra]
    reached = f"; LAMB needed {r['time_to_same_loss']:.2f} times as long to reach its last evaluation loss"
    return (f"{extra}: {one['wall_s']:.0f} s (LAMB / {extra} {r['wall']:.2f}), held-out loss {one['val_loss']:.3f} nats "
            f"({percent(r['val_loss'])} against LAMB), {r['volume_vs_fp32']:.1f} times fewer bytes than 32-bit gradients"
            f"{reached if r['same_loss_reached'] else ''}. When it ended, its last evaluation loss was "
            f"{r['loss_at_equal_time'] * r['baseline_loss_at_equal_time']:.3f} and LAMB's {r['baseline_loss_at_equal_time']:.3f} nats "
            f"({percent(r['loss_at_equal_time'])} at equal time). {near_text(r)}")


def network_headline(summary, extra):
    """What the limit on the links costs the additional run, in sentences."""
    costs, here, away = summary["network_costs"], summary[extra], summary[compare.unlimited_key(extra)]
    disturbed = "" if abs(away["compute_s"] / here["compute_s"] - 1) <= SAME_COMPUTE else (
        f" But compute took {away['compute_s']:.1f} s without the limit and {here['compute_s']:.1f} s with it: something else used "
        "the processor, and only runs on an idle machine tell what the network costs.")
    return (f"{extra} with no limit on the links: {away['wall_s']:.1f} s, with it {here['wall_s']:.1f} s (ratio {costs['wall']:.3f}). It "
            f"waited {away['exposed_comm_s']:.1f} s without the limit ({100 * costs['exposed_share_unlimited']:.1f} % of its time), for "
            f"ranks that share the cores, and {here['exposed_comm_s']:.1f} s with it ({100 * costs['exposed_share']:.1f} %): what the "
            f"network adds is {100 * costs['exposed_share_added']:.1f} % of its time.{disturbed}")


def near_text(r):
    near = f"within {100 * compare.NEAR - 100:.0f} % of LAMB's last evaluation loss"
    if not r["near_loss_reached"]:
        return f"It did not come {near}."
    return f"It came {near} after {r['near_loss_s']:.0f} s; LAMB needed {r['time_to_near_loss']:.2f} times as long."


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


def blas_kernels(groups):
    """Of all runs; trainers without BLAS do not tell."""
    names = {str(run.summary.get("blas_kernels", "unknown")) for runs in groups for run in runs}
    return ", ".join(sorted(names))


def hierarchy_headline(summary, extra):
    """What two levels save or cost, in sentences."""
    r, flat, one = summary["hierarchy"], summary["onebit_lamb"], summary[extra]
    megabytes = [sum(figures[compare.BETWEEN_HOSTS]) / 1e6 for figures in (flat, one)]
    saved = r["wall_saved_s"]
    return (f"Between hosts 1-bit LAMB sent {megabytes[0]:.1f} MB in one level and {megabytes[1]:.1f} MB in two (ratio "
            f"{r['between_hosts']:.2f}); whole runs took {flat['wall_s']:.0f} s and {one['wall_s']:.0f} s: hierarchy "
            f"{'saves' if saved >= 0 else 'costs'} {abs(saved):.0f} s (ratio {r['wall']:.2f}).")


def share_text(summary, groups):
    """What the ratio of whole runs follows from, in sentences."""
    base = summary["lamb"]
    return (f"LAMB waited for the network in {100 * compare.network_share(summary):.0f} % of its time ({base['exposed_comm_s']:.0f} of "
            f"{base['wall_s']:.0f} s); compute took {base['compute_s']:.0f} s. Processor: {machine.processor()}; BLAS kernels: "
            f"{blas_kernels(groups)}. The ratio of whole runs follows from that share: with {summary['ratios']['volume_vs_fp32']:.1f} "
            f"times fewer bytes and the same compute it would be {compare.expected_ratio(summary):.2f}. A slower processor makes the "
            "share and the ratio smaller; bytes stay the same.")


def tiles(summary):
    r = summary["ratios"]
    same = "faster to the same loss" if r["same_loss_reached"] else "faster, whole run (LAMB did not reach the loss)"
    return page.tiles([
        (f"{r['time_to_same_loss']:.2f}×", same),
        (f"{r['wall']:.2f}×", "faster for the whole run"),
        (percent(r["val_loss"]), "held-out loss of 1-bit LAMB against LAMB (less is better)"),
        (f"{r['volume_vs_fp32']:.1f}×", f"fewer bytes than 32-bit gradients ({r['volume_vs_16bit']:.1f}× than 16-bit)"),
    ])


def seeds_row(label, one, extra):
    """One seed, or the means over them."""
    cells = [label, f"{one['lamb']['val_loss']:.4f}"]
    for name, key in [("onebit_lamb", "ratios")] + ([(extra, compare.ratios_key(extra))] if extra else []):
        r = one[key]
        reached = "" if r["same_loss_reached"] or label == MEAN else " (not reached: whole run)"
        cells += [f"{one[name]['val_loss']:.4f}", percent(r["val_loss"]), f"{r['wall']:.2f}",
                  f"{r['time_to_same_loss']:.2f}{reached}"]
    if "network_costs" in one:
        cells += [f"{one['network_costs']['wall']:.3f}", f"{100 * one['network_costs']['exposed_share_added']:.1f} %"]
    return tuple(cells)


def seeds_table(summary, extra):
    header = ["Seed", "LAMB loss"]
    for name in ["1-bit"] + ([extra] if extra else []):
        header += [f"{name} loss", "difference", "time ratio, whole run", "time ratio, same loss"]
    if "network_costs" in summary:
        header += [f"{extra} / without a limit", "waiting that the network adds"]
    rows = [seeds_row(str(one["seed"]), one, extra) for one in summary["seeds"]]
    return page.table(header, rows + [seeds_row(MEAN, summary, extra)])


def plots_of(groups, summary):
    reached = compare.first_at_or_below(groups[0][0].evaluations, groups[0][1].evaluations[-1].loss)
    return plots(groups, summary["unigram_entropy"], reached,
                 "1-bit LAMB sends full-precision gradients until its freeze_step, then one bit per parameter and direction.",
                 "Waiting is what is left of Sotto's calls after its own kernels; it includes waiting for slower ranks.")


def time_line(folder, names):
    """The figure of a few steps, where the runs' time lines are."""
    if not folder.is_dir():
        return []
    paths = {title: folder / f"{name}.rank0.json" for name, title in names.items()}
    return [page.heading("A few steps"), page.figure(
        "What rank 0 does, and what is on its way", lanes.time_line(paths),
        "From the middle of short runs with the same configurations. Network: messages from or to rank 0 are under way, which "
        "includes those that wait for a slower rank. Where it stands below compute, communication costs no time.")]


def table_of(summary, extra):
    others = [("1-bit LAMB", "1-bit", summary["onebit_lamb"])]
    if extra:
        others.append((extra, extra, summary[extra]))
    if extra and compare.unlimited_key(extra) in summary:
        others.append((f"{extra}, no limit", "no limit", summary[compare.unlimited_key(extra)]))
    return result_table(("LAMB", summary["lamb"]), others)


def links_text(links_mbit, isolation, ranks, hosts):
    rate = f"{links_mbit:g} Mbit/s"
    if hosts:
        return (f"{ranks} ranks on one machine, {hosts[1]} in each of {hosts[0]} network namespaces that stand for hosts. Their "
                f"links meet at a bridge; a token bucket at both ends of every link holds each direction to {rate}. Ranks of a "
                "host share memory, without a limit.")
    if isolation == "netns":
        return (f"{ranks} ranks on one machine, each in a network namespace of its own. Their links meet at a bridge; a "
                f"token bucket at both ends of every link holds each direction to {rate}.")
    return (f"{ranks} ranks on one machine, talking over loopback TCP. Network namespaces were not permitted here, or not "
            f"wanted, so Sotto's own rate limiter holds what each rank sends and what it receives to {rate}. There is no "
            "link to fill and no packet to lose: treat the times as a close estimate.")


def sequences_per_step(run):
    return int(run.columns["samples"][-1] / (run.summary["steps"] + run.summary["skipped_steps"]))


def what_differs(groups, extra):
    """What distinguishes the runs, as sentences."""
    pair = "They differ in the optimizer alone. "
    if not extra:
        return pair
    here, usual = sequences_per_step(groups[0][2]), sequences_per_step(groups[0][0])
    batch = f" and has {here} sequences a step" if here != usual else ""
    again = f", and runs again with no limit on the links (“{groups[0][3].name}”)" if len(groups[0]) > 3 else ""
    return f"LAMB and 1-bit LAMB differ in the optimizer alone; {extra} has a configuration of its own{batch}{again}. "


def method(arguments, groups):
    run, extra = groups[0][0], arguments.extra
    sequences = sequences_per_step(run)
    return [
        page.heading("What was measured, and how"),
        page.paragraph(
            f"{('Two', 'Three', 'Four')[len(groups[0]) - 2]} runs, one after the other, train the same masked language model ({run.summary['parameters']:,} parameters) "
            f"with the same seed, data and batches ({sequences} sequences a step over all ranks). "
            + what_differs(groups, extra) + links_text(arguments.links, arguments.isolation, run.ranks, arguments.hosts)),
        page.bullets([
            "Clock: rank 0's monotonic clock, started at a barrier before the first step, stopped between barriers during "
            "evaluations and checkpoints.",
            "Evaluation: a fixed subset of the held-out data with fixed masks; the held-out loss in the table is over all "
            "held-out data, once at the end.",
            "Time to the same loss: the clock of LAMB's first evaluation at or below the last one of the run that it is "
            "compared with, divided by the whole clock of that run.",
            "At equal time: LAMB's last evaluation at or before the clock of the other run's last one. Near LAMB's loss: the first "
            "evaluation at or below its last one times 1.03, of both runs.",
            "Compute, kernels and waiting are means over the ranks and add up to the clock. The ranks share this machine's "
            "cores, so compute is slower than on a machine of their own.",
            "Bytes are counted at the transport and compared with the plan's prediction. The comparison with 32 bits is "
            "with what LAMB sent in as many steps; 16 bits are half of that.",
            "Losses differ by a few percent from seed to seed: one seed is an example, not a proof.",
        ]),
        page.pairs([("Network", arguments.network), ("Command", arguments.command), ("BLAS kernels", blas_kernels(groups))]
                   + machine.describe(arguments.root)),
    ] + [page.folded(f"Configuration of {title}", Path(path).read_text(encoding="utf-8"))
         for title, path in zip(names_of(extra).values(), arguments.configs)]


def write_report(path, arguments, groups, summary, problems):
    seeds = f"{len(groups)} seeds" if len(groups) > 1 else f"seed {arguments.seeds[0]}"
    extra = arguments.extra
    title = f"LAMB, 1-bit LAMB and {extra}" if extra else "LAMB and 1-bit LAMB"
    parts = [f"<h1>{title} on a slow network</h1>",
             page.paragraph(f"Sotto quickstart · {groups[0][0].ranks} ranks · every link at {arguments.links:g} Mbit/s · "
                            f"{seeds}", "subtitle"),
             page.paragraph(headline(summary), "lead")]
    if extra:
        parts.append(page.paragraph(extra_headline(summary, extra)))
    if arguments.unlimited:
        parts.append(page.paragraph(network_headline(summary, extra)))
    if arguments.hosts:
        parts.append(page.paragraph(hierarchy_headline(summary, extra)))
    if arguments.quick:
        parts.append(page.note("Quick run: far too few steps for the losses to mean much. It shows that everything works, "
                               "and the times and bytes of a step."))
    parts += [tiles(summary), page.paragraph(share_text(summary, groups)), plots_of(groups, summary),
              *time_line(path.parent / "trace", names_of(extra)),
              page.heading("Figures" + (" (means over the seeds)" if len(groups) > 1 else "")), table_of(summary, extra)]
    if len(groups) > 1:
        parts += [page.heading("Seed by seed"), seeds_table(summary, extra)]
    parts += checks_section(problems) + method(arguments, groups)
    path.write_text(page.document(f"Sotto: {title}", parts), encoding="utf-8")


def finish(arguments):
    folder = Path(arguments.dir)
    groups = read_runs(folder, arguments.seeds, names_of(arguments.extra, arguments.unlimited))
    summary = compare.summary_of(arguments.links, arguments.isolation, groups,
                                 arguments.seeds if arguments.list_seeds else None, arguments.extra, arguments.hosts)
    problems = compare.broken_checks([run for runs in groups for run in runs])
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    write_report(folder / "report.html", arguments, groups, summary, problems)
    print(headline(summary))
    if arguments.extra:
        print(extra_headline(summary, arguments.extra))
    if arguments.unlimited:
        print(network_headline(summary, arguments.extra))
    if arguments.hosts:
        print(hierarchy_headline(summary, arguments.extra))
    print(share_text(summary, groups))
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


def run_name(text):
    """A word that can be a file's name and a key of summary.json next to the others."""
    taken = (*NAMES, "links_mbit", "isolation", "hosts", "hierarchy", "network_costs", "unigram_entropy", "seeds")
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]{0,39}", text) or text in taken or text.startswith("ratios"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a word of letters, digits and _, or is taken")
    return text


def parse(words):
    parser = argparse.ArgumentParser(prog="report.quickstart", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    scale = commands.add_parser("scale", help="a configuration for another number of steps")
    scale.add_argument("source")
    scale.add_argument("target")
    scale.add_argument("--steps", type=int, required=True)
    scale.add_argument("--if-it-has-a-length", action="store_true",
                       help="a configuration without scheduler.params.total_num_steps stays as it is, and that is said")
    scale.add_argument("--hierarchy", help="the configuration's averages get two levels")
    settle = commands.add_parser("settle", help='a configuration whose outer period "auto" is the one that a run has chosen')
    settle.add_argument("source")
    settle.add_argument("summary", help="of that run")
    settle.add_argument("target")
    done = commands.add_parser("finish", help="summary.json, report.html and the headline")
    done.add_argument("--dir", required=True, help="holds the runs' files; the results go there")
    done.add_argument("--root", required=True, help="of the repository")
    done.add_argument("--links", type=number, required=True, help="Mbit/s")
    done.add_argument("--isolation", choices=("netns", "rate_limiter"), required=True)
    done.add_argument("--network", required=True, help="how the links were made, for the report")
    done.add_argument("--command", required=True, help="what was started, for the report")
    done.add_argument("--configs", nargs="+", required=True, help="of lamb, onebit_lamb and the additional run")
    done.add_argument("--extra", type=run_name, help="name of an additional run")
    done.add_argument("--unlimited", action="store_true", help="the additional run has one without a limit on the links beside it")
    done.add_argument("--hosts", type=int, nargs=2, help="their number, and ranks on each; the additional run has two levels")
    done.add_argument("--seeds", type=seed_list, default=[1])
    done.add_argument("--list-seeds", action="store_true", help="seeds and means in summary.json")
    done.add_argument("--quick", action="store_true")
    arguments = parser.parse_args(words)
    if arguments.action == "finish" and arguments.hosts and not arguments.extra:
        parser.error("--hosts: needs --extra, the run in two levels")
    if arguments.action == "finish" and arguments.unlimited and not arguments.extra:
        parser.error("--unlimited: needs --extra, the run that has a limit")
    if arguments.action == "finish" and len(arguments.configs) != len(names_of(arguments.extra)):
        parser.error(f"--configs: {len(arguments.configs)} files for {len(names_of(arguments.extra))} runs")
    return arguments


def settle_file(source, summary, target):
    chosen = read_json(summary)
    if not isinstance(chosen, dict):
        raise ReportError(f"{summary}: expected an object")
    content = config.settle_period(config.read_config(source), chosen.get("outer_period"))
    Path(target).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def scale_file(source, target, steps, if_it_has_a_length, hierarchy):
    """Writes the configuration for that number of steps."""
    content = config.read_config(source)
    if if_it_has_a_length and not config.has_length(content):
        print(f"report: {Path(source).name} has no scheduler.params.total_num_steps: it is not scaled to {steps} steps")
    else:
        try:
            config.scale_config(content, steps)
        except ReportError as error:
            raise ReportError(f"{source}: {error}") from error
    if hierarchy:
        section = content.setdefault("sotto", {})
        if not isinstance(section, dict):
            raise ReportError(f"{source}: 'sotto' is {section!r}, expected an object")
        section["hierarchy"] = hierarchy
    Path(target).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(words=None):
    arguments = parse(words)
    try:
        if arguments.action == "finish":
            return finish(arguments)
        if arguments.action == "settle":
            settle_file(arguments.source, arguments.summary, arguments.target)
            return 0
        scale_file(arguments.source, arguments.target, arguments.steps, arguments.if_it_has_a_length, arguments.hierarchy)
        return 0
    except (ReportError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
