"""Every configuration of ../configs trains a small model for 20 steps, on 2 and on 4 ranks.

Sizes and step numbers are scaled down to that: everything else is as in the file.
"""

import math
import types
from pathlib import Path

import pytest
from ranks import run_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

import small  # noqa: E402

import sotto  # noqa: E402
import sotto.deepspeed as sd  # noqa: E402
import sotto.torch as st  # noqa: E402

torch.set_num_threads(1)
CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs").glob("*.json"))
STEPS = 20
# Step numbers of a run of 20 steps.
SCALED = {
    "freeze_step": 9,
    "var_freeze_step": 9,
    "var_update_scaler": 3,
    "local_step_scaler": 4,
    "warmup_num_steps": 4,
    "total_num_steps": 40,
    "cycle_first_step_size": 6,
    "lr_range_test_step_size": 5,
}
ARGUMENTS = types.SimpleNamespace(
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_grad_norm=1.0,
    learning_rate=2e-3,
    adam_beta1=0.9,
    adam_beta2=0.98,
    adam_epsilon=1e-6,
    weight_decay=0.01,
    warmup_steps=4,
    max_steps=40,
    fp16=False,
    bf16=True,
)


def scaled(path, world):
    """The file, as a dict, for a small model on `world` ranks. "auto" values stay as they are."""
    config = sotto.config_resolve(path)
    for section in ("optimizer", "scheduler"):
        params = config.get(section, {}).get("params", {})
        params.update({k: v for k, v in SCALED.items() if k in params and params[k] != "auto"})
    if config.get("train_batch_size", "auto") != "auto":
        config["train_batch_size"] = 8 * world
    if config.get("train_micro_batch_size_per_gpu", "auto") != "auto":
        config["train_micro_batch_size_per_gpu"] = 4
    if config.get("gradient_accumulation_steps", "auto") != "auto":
        config["gradient_accumulation_steps"] = 2
    return config


def train(engine, rank):
    """Losses and learning rates of 20 updates."""
    n, losses, rates = engine.train_micro_batch_size_per_gpu(), [], []
    while engine.global_steps < STEPS:
        if (engine.micro_steps + 1) % engine.gradient_accumulation_steps() == 0:
            rates.append(engine.get_lr()[0])
        loss = engine(*small.batch(rank, engine.micro_steps, n))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, rates


def check(comm, path):
    config = scaled(path, comm.size)
    auto = ARGUMENTS if "auto" in path.name else None
    net = small.SmallBert()
    engine, optimizer, _, _ = sd.initialize(model=net, config=config, comm=comm, auto=auto)
    before = [p.detach().clone() for p in net.parameters()]
    losses, rates = train(engine, comm.rank)
    assert all(map(math.isfinite, losses)), losses
    report = sotto.config_report(engine.config, world_size=comm.size)
    wanted = {s["update"]: s["groups"][0] for s in report["schedule"]["lr"]}
    if engine.skipped_steps == 0:
        assert rates[9] == pytest.approx(wanted[10])
    assert all((p != q).any() for p, q in zip(net.parameters(), before))
    # Between synchronisations of 0/1 Adam replicas differ; the others' are equal.
    info = optimizer.info()
    optimizer.synchronize_parameters()
    st.check_parameters(net, comm=comm)
    kind = report["optimizer"]["type"]
    compressed = kind in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
    assert info.stage == compressed
    if compressed:
        n = sum(p.numel() for p in net.parameters())
        assert info.payload_bytes_next_step < n / 8 * 2 + 4096 * comm.size
    engine.close()
    if comm.rank == 0:
        print(f"{path.name}: loss {sum(losses[:4]) / 4:.3f} to {sum(losses[-4:]) / 4:.3f}")


def rank_trains(comm):
    for path in CONFIGS:
        try:
            check(comm, path)
        except Exception as error:
            raise AssertionError(f"{path.name}: {error!r}") from error


def test_there_are_enough_of_them():
    assert len(CONFIGS) >= 12


@pytest.mark.parametrize("size", [2, 4])
def test_20_steps(size):
    lines = run_ranks(size, __file__, "rank_trains", timeout=600).splitlines()
    assert len([line for line in lines if ".json: loss" in line]) == len(CONFIGS), lines
