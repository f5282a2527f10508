"""The files of one run: a log (JSON lines: one per step, one per evaluation) and a summary.

What is missing or wrong is an error that names the file, the line and the key.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy

NUMBERS = ("val_loss", "wall_s", "steps", "compute_s", "codec_s", "exposed_comm_s")
PER_RANK = ("payload_bytes_sent", "payload_bytes_planned", "header_bytes_sent")
STEP_FIELDS = ("step", "samples", "loss", "clock_s", "payload_bytes", "compute_ms", "codec_ms", "comm_ms")
EVALUATION_FIELDS = ("step", "samples", "clock_s", "eval_loss")


class ReportError(Exception):
    """Something in the input is missing or wrong; the text says what and where."""


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read_json(path):
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ReportError(f"{path}: not JSON: {error}") from error


def read_summary(path):
    """A run's summary, with every figure that a report needs."""
    summary = read_json(path)
    if not isinstance(summary, dict):
        raise ReportError(f"{path}: expected an object")
    summary.setdefault("skipped_steps", 0)
    for key in NUMBERS + ("unigram_entropy", "parameters", "skipped_steps"):
        if not _is_number(summary.get(key)):
            raise ReportError(f"{path}: '{key}' is {summary.get(key)!r}, expected a finite number")
    ranks = None
    for key in PER_RANK:
        values = summary.get(key)
        if not isinstance(values, list) or not values or not all(_is_number(v) for v in values):
            raise ReportError(f"{path}: '{key}' is {values!r}, expected a list with a number per rank")
        if ranks is not None and len(values) != ranks:
            raise ReportError(f"{path}: '{key}' has {len(values)} ranks, the others {ranks}")
        ranks = len(values)
    if summary["steps"] < 1 or summary["wall_s"] <= 0:
        raise ReportError(f"{path}: a run of {summary['steps']} steps and {summary['wall_s']} s is no run")
    return summary


@dataclass
class Evaluation:
    """One evaluation on the fixed held-out subset."""

    step: int
    samples: int
    clock_s: float
    loss: float


@dataclass
class Run:
    """One training run.

    columns: a numpy array per field of STEP_FIELDS, one entry per step. stages: the text of each step's stage. Steps that a
    dynamic loss scale left out are in neither: summary["skipped_steps"] counts them.
    """

    name: str
    columns: dict
    stages: list
    evaluations: list
    summary: dict

    @property
    def ranks(self):
        return len(self.summary["payload_bytes_sent"])


def read_records(path):
    """(line number, object) of every line of a file of JSON lines that is not empty."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{path}: not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ReportError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ReportError(f"{path}:{number}: expected an object")
        records.append((number, record))
    return records


def _checked(path, number, record):
    is_evaluation = "eval_loss" in record
    for key in EVALUATION_FIELDS if is_evaluation else STEP_FIELDS:
        if not _is_number(record.get(key)):
            raise ReportError(f"{path}:{number}: '{key}' is {record.get(key)!r}, expected a finite number")
    if not is_evaluation and not isinstance(record.get("stage"), str):
        raise ReportError(f"{path}:{number}: 'stage' is {record.get('stage')!r}, expected a text")
    return record


def read_log(path):
    """(columns, stages, evaluations, number of skipped steps) of a log."""
    records = [_checked(path, number, record) for number, record in read_records(path)]
    skipped = sum(r.get("skipped") is True for r in records)
    steps = [r for r in records if "eval_loss" not in r and r.get("skipped") is not True]
    if not steps:
        raise ReportError(f"{path}: no step in it")
    columns = {key: numpy.array([r[key] for r in steps], dtype=float) for key in STEP_FIELDS}
    if (numpy.diff(columns["step"]) <= 0).any():
        raise ReportError(f"{path}: steps are not in ascending order")
    evaluations = [Evaluation(int(r["step"]), int(r["samples"]), float(r["clock_s"]), float(r["eval_loss"]))
                   for r in records if "eval_loss" in r]
    if not evaluations:
        raise ReportError(f"{path}: no evaluation in it (a line with 'eval_loss')")
    return columns, [r["stage"] for r in steps], evaluations, skipped


def read_run(name, log_path, summary_path):
    columns, stages, evaluations, skipped = read_log(log_path)
    summary = read_summary(summary_path)
    if len(stages) != summary["steps"]:
        raise ReportError(f"{log_path}: {len(stages)} steps, but {summary_path} says {summary['steps']}")
    if skipped != summary["skipped_steps"]:
        raise ReportError(f"{log_path}: {skipped} skipped steps, but {summary_path} says {summary['skipped_steps']}")
    return Run(name, columns, stages, evaluations, summary)
