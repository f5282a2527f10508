"""Every variant trains, counts what it sends, and writes what the report reads."""

import sys
from pathlib import Path

import pytest
import warm

pytest.importorskip("torch", reason="torch is not installed in this Python")

from launched import (
    SMALL,
    TRAINER,
    VARIANTS,
    read_json,
    read_log,
    train_in_turn,
    train_well,
    write_config,
    write_text,
)
from ranks import ROOT

STEPS = 12


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(log, summary) of all variants, by name, and the folder with the files of both."""
    folder = tmp_path_factory.mktemp("variants")
    text = write_text(folder)
    files = {n: (folder / f"{n}.jsonl", folder / f"{n}.summary.json") for n in VARIANTS}
    train_in_turn(
        *(
            [
                *("--deepspeed_config", write_config(folder, config), "--variant", variant),
                *(*SMALL, "--data", text, "--steps", STEPS, "--eval-every", 6),
                *("--log-file", files[name][0], "--summary", files[name][1]),
                *("--powersgd-start", 3),
            ]
            for name, (variant, config) in VARIANTS.items()
        )
    )
    made = {name: (read_log(log), read_json(summary)) for name, (log, summary) in files.items()}

    def run(name):
        return made[name]

    run.folder = folder
    return run


@pytest.mark.parametrize("name", VARIANTS)
def test_it_learns_and_counts(runs, name):
    log, summary = runs(name)
    steps = [record for record in log if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert summary["payload_bytes_sent"] == summary["payload_bytes_planned"]
    assert sum(record["payload_bytes"] for record in steps) == summary["payload_bytes_sent"][0]
    assert [record["eval_loss"] for record in log if "eval_loss" in record][-1] < steps[0]["loss"]
    parts = summary["compute_s"] + summary["codec_s"] + summary["exposed_comm_s"]
    # Parts are means over ranks, whose clocks start a moment apart.
    clocks = summary["rank_wall_s"]
    assert parts == pytest.approx(sum(clocks) / len(clocks), rel=1e-6)
    assert clocks[0] == summary["wall_s"]


def test_bytes_and_stages(runs):
    full = 4 * runs("lamb-gloo")[1]["parameters"]  # 2 (W - 1) / W = 1 with two ranks
    for name, first_compressed, at_most in (
        ("lamb-gloo", None, 1.0),
        ("lamb-sotto", None, 1.0),
        ("onebit-lamb", 4, 1 / 25),
        ("powersgd", 4, 1.0),
        ("onebit-hook", 1, 1 / 25),
    ):
        for record in runs(name)[0]:
            if "stage" not in record:
                continue
            compressed = first_compressed is not None and record["step"] >= first_compressed
            expected = "compressed" if compressed else "full precision"
            assert record["stage"] == expected, (name, record)
            if compressed:
                assert 0 < record["payload_bytes"] < at_most * full, (name, record)
            else:
                assert full <= record["payload_bytes"] < 1.01 * full + 500, (name, record)


def test_both_lambs_learn_alike(runs):
    for a, b in zip(runs("lamb-gloo")[0], runs("lamb-sotto")[0]):
        key = "loss" if "loss" in a else "eval_loss"
        assert a[key] == pytest.approx(b[key], rel=1e-4)
        if "lr" in a:
            assert a["lr"] == pytest.approx(b["lr"], rel=1e-9)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


def test_the_report_reads_them(runs, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed in this Python")
    sys.path.append(str(ROOT / "integration"))
    from report import several
    from report.logs import read_run

    read = [
        read_run(name, runs.folder / f"{name}.jsonl", runs.folder / f"{name}.summary.json")
        for name in VARIANTS
    ]
    problems = several.write(
        tmp_path / "report.html",
        read,
        title="A test",
        about=["nothing"],
        network="none",
        command="none",
        configs=[],
        root=ROOT,
    )
    assert problems == []
    table = several.markdown(read).splitlines()
    assert len(table) == 2 + len(VARIANTS)
    assert len({line.count("|") for line in table}) == 1


def test_torchrun_and_accumulation(runs, tmp_path):
    """Started by torchrun; micro-batches add up to the same step."""
    torchrun = Path(sys.executable).with_name("torchrun")
    if not torchrun.exists():
        pytest.skip("torchrun is not installed next to this Python")
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    text = write_text(tmp_path)
    losses = []
    for variant in ("sotto", "ddp"):
        log = tmp_path / f"{variant}.jsonl"
        train_well(
            *("--deepspeed_config", write_config(tmp_path, "lamb", **config)),
            *("--variant", variant, *SMALL, "--data", text, "--steps", 6, "--log-file", log),
            launcher=(warm.python("torch"), torchrun, "--standalone", "--nproc-per-node", 2),
            program=(TRAINER,),
        )
        losses.append([record["loss"] for record in read_log(log) if "loss" in record])
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_bar_is_tqdms(tmp_path):
    pytest.importorskip("tqdm", reason="tqdm is not installed in this Python")
    out = train_well(
        *("--deepspeed_config", write_config(tmp_path, "lamb"), *SMALL),
        *("--data", write_text(tmp_path), "--steps", 3, "--progress", "bar"),
        ranks=1,
    )
    assert "3/3" in out
    assert "step/s" in out or "s/step" in out
