"""Runs as the trainer writes them, made up: known figures for the tests of the report."""

import json
import math
from pathlib import Path

ENTROPY = 3.16
PARAMETERS = 155_000
FULL_BYTES = 6 * PARAMETERS  # 2 (W - 1) / W * 4 bytes per parameter at W = 4
ONE_BIT_BYTES = FULL_BYTES // 32


def loss_at(step, floor, scale=600.0):
    return floor + (5.2 - floor) * math.exp(-step / scale)


def write_run(folder, stem, *, steps=400, freeze=None, floor=1.2, evaluate_every=40, sent_off_by=0, seed=1, skipped=0,
              between=1):
    """Writes stem.jsonl and stem.summary.json. freeze: the first step, from 1, whose payload is compressed. skipped: steps that
    a loss scale leaves out at the start; each costs as much as one at full precision. between: share of the bytes that goes
    to other hosts."""
    clock, total, lines = 0.0, 0, []
    parts = {"compute_s": 0.0, "codec_s": 0.0, "exposed_comm_s": 0.0}
    for step in range(1 - skipped, steps + 1):
        compressed = freeze is not None and step > freeze
        cost = {"compute_s": 0.015, "codec_s": 0.001 if compressed else 0.0005,
                "exposed_comm_s": 0.0025 if compressed else 0.0745}
        sent = ONE_BIT_BYTES if compressed else FULL_BYTES
        clock += sum(cost.values())
        total += sent
        for key, value in cost.items():
            parts[key] += value
        noise = 0.2 * math.sin(step * 12.9898 + seed)
        stage = "skipped" if step < 1 else "compressed" if compressed else "full precision"
        lines.append({"step": max(step, 0), "samples": 24 * (step + skipped), "loss": loss_at(step, floor) + noise,
                      "stage": stage, **({"skipped": True} if step < 1 else {}), "clock_s": clock,
                      "payload_bytes": sent, "compute_ms": cost["compute_s"] * 1e3, "codec_ms": cost["codec_s"] * 1e3,
                      "comm_ms": cost["exposed_comm_s"] * 1e3})
        if step > 0 and (step % evaluate_every == 0 or step == steps):
            lines.append({"step": step, "samples": 24 * (step + skipped), "clock_s": clock, "eval_loss": loss_at(step, floor)})
    Path(folder, f"{stem}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    summary = {"name": stem, "val_loss": loss_at(steps, floor), "wall_s": clock, "steps": steps,
               "skipped_steps": skipped, **parts,
               "payload_bytes_sent": [total + sent_off_by] + [total] * 3, "payload_bytes_planned": [total] * 4,
               "header_bytes_sent": [steps * 400] * 4,
               "payload_bytes_between_hosts": [int(total * between)] * 4, "unigram_entropy": ENTROPY, "parameters": PARAMETERS,
               "blas_kernels": "Haswell"}
    Path(folder, f"{stem}.summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return summary


def write_time_line(path, steps=60, period=0):
    """Writes what SOTTO_TRACE makes rank 0 write, in microseconds: steps of 15 ms of compute, then 70 ms of waiting for
    messages and 1 ms of kernels. period: the messages of so many steps, 60 ms of them, travel during the next ones instead, and
    nothing is waited for."""
    events, now = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": -1, "args": {"name": "trainer"}}], 5e6

    def add(row, name, begin, duration):
        events.append({"ph": "X", "name": name, "pid": 0, "tid": row, "ts": begin, "dur": duration})

    for step in range(steps):
        waits = 0 if period else 70_000
        add(-1, "compute", now, 15_000)
        add(-1, "sotto_optim_step", now + 15_000, waits + 1000)
        add(1, "lamb_update", now + 15_000 + waits, 1000)
        if not period:
            add(102, "send", now + 15_000, 40_000)
            add(105, "recv", now + 45_000, 40_000)
        elif step % period == period - 1:
            add(102, "send", now + 16_000, 60_000)
        now += 16_000 + waits
    Path(path).write_text(json.dumps(events), encoding="utf-8")


def write_pair(folder, suffix="", **options):
    """LAMB and 1-bit LAMB; the second ends a little higher and freezes after a fifth."""
    steps = options.pop("steps", 400)
    base = write_run(folder, f"lamb{suffix}", steps=steps, **options)
    comp = write_run(folder, f"onebit_lamb{suffix}", steps=steps, freeze=steps // 5, **{**options, "floor": 1.25})
    return base, comp
