"""What sotto.deepspeed's engine writes and prints beside training."""

import csv
import re
import sys
import types

import pytest
from ranks import thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from deepspeed_support import run, start  # noqa: E402

import sotto  # noqa: E402
import sotto.deepspeed as sd  # noqa: E402

ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
BATCH = {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 2}


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


def rows(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_csv_files(tmp_path):
    config = {
        **ADAM,
        **BATCH,
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "wall_clock_breakdown": True,
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
    }

    def body(comm):
        engine, *_ = start(comm, config)
        assert engine.monitor.enabled
        run(engine, comm.rank, range(6), torch.float16)
        assert len(engine.summary_events) == 5
        engine.monitor.write_events([("Mine/of the program", 2.5 + comm.rank, 7)])
        engine.close()

    thread_ranks(2, body)
    folder = tmp_path / "job"
    assert rows(folder / "Train_Samples_lr.csv") == [
        ["step", "lr"],
        ["64", "0.01"],
        ["128", "0.01"],
        ["192", "0.01"],
    ]
    assert rows(folder / "Train_Samples_loss_scale.csv")[1] == ["64", "16.0"]
    assert rows(folder / "Mine_of_the_program.csv") == [["step", "of the program"], ["7", "2.5"]]
    times = sorted(path.name for path in folder.glob("*elapsed_time_ms*"))
    assert [name[len("Train_Samples_elapsed_time_ms_") : -4] for name in times] == [
        "backward",
        "backward_allreduce",
        "backward_inner",
        "forward",
        "step",
    ]
    for name in times:
        assert [row[0] for row in rows(folder / name)] == ["step", "64", "128", "192"]


def test_tensorboard(tmp_path, comm, monkeypatch):
    config = {**ADAM, "tensorboard": {"enabled": True, "output_path": str(tmp_path)}, **BATCH}
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(sotto.UnsupportedError, match="pip install tensorboard"):
        start(comm, config)
    written = []

    class SummaryWriter:
        def __init__(self, log_dir):
            written.append(log_dir)

        def add_scalar(self, *event):
            written.append(event)

        def flush(self):
            written.append("flush")

    package = types.ModuleType("tensorboard")
    package.__spec__ = types.SimpleNamespace(name="tensorboard")
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    writers = types.ModuleType("torch.utils.tensorboard")
    writers.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writers)
    engine, *_ = start(comm, config)
    run(engine, 0, range(2))
    assert written == [
        str(tmp_path / "DeepSpeedJobName"),
        ("Train/Samples/lr", 0.01, 32),
        "flush",
    ]
    engine.close()


@pytest.mark.parametrize("name", ["wandb", "comet"])
def test_other_monitors_are_refused(name, comm):
    with pytest.raises(sotto.UnsupportedError, match=f"{name}.enabled is true: this engine writes"):
        start(comm, {**ADAM, name: {"enabled": True}})
    engine, *_ = start(comm, {**ADAM, name: {"enabled": False}})
    assert not engine.monitor.enabled
    engine.close()


LINE = r"\[Rank -?\d+\] time \(ms\)" + "".join(
    rf" \| {name}: (\d+\.\d\d)" for name in ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")
)


def test_times_are_printed(comm, capfd):
    """As DeepSpeed 0.18.9 does: a line for every step(), and one for every update."""
    engine, *_ = start(comm, {**ADAM, **BATCH, "wall_clock_breakdown": True})
    assert engine.wall_clock_breakdown()
    run(engine, 0, range(4))
    lines = [line for line in capfd.readouterr().out.splitlines() if "time (ms)" in line]
    assert len(lines) == 6
    for i, line in enumerate(lines):
        of_update = re.fullmatch(LINE, line)
        assert bool(of_update) == (i in (2, 5)), lines
        if not of_update:
            assert "fwd_microstep" in line
    assert float(of_update[2]) >= float(of_update[3])
    assert float(of_update[4]) == 0
    times = engine.get_wall_clock_timers()
    assert len(times) == 10
    assert times["step"] > 0
    assert engine.timers("fwd").elapsed() == 0  # printed, and begun anew
    engine.close()


def test_no_times_without_the_key(comm, capfd):
    engine, *_ = start(comm, {**ADAM, **BATCH})
    run(engine, 0, range(2))
    assert "time (ms)" not in capfd.readouterr().out
    assert engine.get_wall_clock_timers() == {}
    timer = engine.timers("of the program")
    timer.start()
    timer.stop()
    assert timer.elapsed(reset=False) > 0
    assert timer.mean() > 0
    engine.close()


def test_names_of_deepspeed():
    from sotto.deepspeed.monitor.monitor import MonitorMaster
    from sotto.deepspeed.utils.timer import SynchronizedWallClockTimer

    assert MonitorMaster({}, 0).enabled is False
    assert SynchronizedWallClockTimer().get_timers() == {}
    assert sd.__version__
