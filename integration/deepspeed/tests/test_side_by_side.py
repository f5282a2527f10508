"""Sotto in mode compat against DeepSpeed's 1-bit optimizers: the same gradients, equal parameters.

DeepSpeed 0.18.9 is the last release that has them: `DS_BUILD_OPS=0 pip install deepspeed==0.18.9`
beside torch. All of them get several tensors of odd sizes in two parameter groups, float32 and
float16, and the configuration says nothing about what shares a scale.
"""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
import warm
from ranks import meeting_file, run_ranks

np = pytest.importorskip("numpy", reason="numpy is not installed in this Python")
torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

import model  # noqa: E402
import recorded  # noqa: E402
import torch.distributed as dist  # noqa: E402

from sotto import optim  # noqa: E402

torch.set_num_threads(1)
STEPS, MARGIN = 60, 1e-3
f32 = np.float32
COMMON = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}
SIZES = [3001, 129, 1000, 7, 866]  # of the tensors
GROUPS = [0, 0, 0, 1, 1]
# Hyper-parameters, and what the model calls the optimizer. The switch from full precision is after
# 20 updates.
CASES = {
    "OneBitAdam": ({"freeze_step": 21}, model.OnebitAdam),
    "ZeroOneAdam": (
        {
            "var_freeze_step": 20,
            "var_update_scaler": 4,
            "local_step_scaler": 8,
            "local_step_clipper": 4,
        },
        model.ZeroOneAdam,
    ),
    "OneBitLamb": (
        {
            "freeze_step": 21,
            "max_coeff": 0.3,
            "min_coeff": 0.01,
            "coeff_beta": 0.9,
            "factor_max": 4.0,
            "factor_min": 0.5,
            "factor_threshold": 0.1,
        },
        model.OnebitLamb,
    ),
}


def reason_to_skip():
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed in this Python"
    asked = subprocess.run(
        [warm.python("torch", "deepspeed"), "-c", "import reference as r; r.optimizer_classes()"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    error = asked.stderr.strip().rpartition("\n")[2]
    if error.startswith(("ImportError", "ModuleNotFoundError")):
        return f"this DeepSpeed has no 1-bit optimizers: {error}"
    assert asked.returncode == 0, asked.stderr
    return None


def gloo(comm):
    dist.init_process_group(
        "gloo", init_method=meeting_file(), rank=comm.rank, world_size=comm.size
    )
    from reference import join_deepspeed

    join_deepspeed()


def of_groups(tensors):
    groups = [[] for _ in range(max(GROUPS) + 1)]
    for tensor, group in zip(tensors, GROUPS):
        groups[group].append(tensor)
    return groups


class Mine:
    """The library's optimizer over float32 tensors and, if half, a float16 model."""

    def __init__(self, comm, kind, tensors, half, hyper):
        self.masters = [t.copy() for t in tensors]
        self.scale = f32(reference_scale() if half else 1)
        dtype = np.float16 if half else f32
        self.gradients = [np.zeros(len(t), dtype) for t in tensors]
        copies = [t.astype(dtype) if half else None for t in tensors]
        config = {
            "optimizer": {"type": kind, "params": {**COMMON, **hyper}},
            "sotto": {"mode": "compat"},
        }
        if half:
            power = int(np.log2(self.scale))
            config["fp16"] = {"enabled": True, "initial_scale_power": power}
        params = [
            optim.Param(p, g, f"t{i}", GROUPS[i], c)
            for i, (p, g, c) in enumerate(zip(self.masters, self.gradients, copies))
        ]
        self.optimizer = optim.Optimizer(params, config, comm=comm)

    def step(self, flat):
        for g, part in zip(self.gradients, np.split(flat * self.scale, np.cumsum(SIZES)[:-1])):
            g[:] = part
        self.optimizer.step().wait()
        return np.concatenate(self.masters)


def reference_scale():
    from reference import LOSS_SCALE

    return LOSS_SCALE


def start_of(half):
    dtype = np.float16 if half else f32
    return np.random.default_rng(7).standard_normal(sum(SIZES)).astype(dtype).astype(f32)


def recording(kind, half):
    return Path(os.environ["RECORDED_GRADIENTS"]) / f"{kind}-{'fp16' if half else 'fp32'}.npy"


def record(kind, half, size):
    """The gradients of all ranks in a file: every rank reads it, since recording takes longest."""
    hyper, maker = CASES[kind]
    start = start_of(half)
    names = {"b1": COMMON["betas"][0], "b2": COMMON["betas"][1], "wd": COMMON["weight_decay"]}
    of_model = {**names, "lr": COMMON["lr"], "eps": COMMON["eps"], **hyper}
    if half:
        of_model["wire"] = "fp16"
        tensors = np.split(start, np.cumsum(SIZES)[:-1])
        of_model["units"] = [sum(len(t) for t in group) for group in of_groups(tensors)]
    gradients = recorded.record(maker, start, SIZES, size, of_model, STEPS)
    np.save(recording(kind, half), np.array(gradients, f32))


def compare(comm, kind, half):
    from reference import Reference

    hyper = CASES[kind][0]
    tensors = np.split(start_of(half), np.cumsum(SIZES)[:-1])
    gradients = np.load(recording(kind, half))

    reference = Reference(kind, of_groups(tensors), MARGIN, half, **COMMON, **hyper)
    mine = Mine(comm, kind, tensors, half, hyper)
    name = f"{kind} {'fp16' if half else 'fp32'}"
    worst = 0.0
    for step, of_ranks in enumerate(gradients):
        reference.step(of_ranks)
        got = mine.step(of_ranks[comm.rank])
        if kind == "ZeroOneAdam" and comm.rank != 0:
            continue  # the reference's replicas drift apart
        wanted = reference.flat()
        compared = ~reference.near.numpy()
        error = np.abs(got - wanted) / np.maximum(1, np.abs(wanted))
        worst = max(worst, float(error[compared].max()))
        assert worst <= 2e-6, f"{name}: step {step + 1}: parameters differ by {worst}"
    left_out = int(reference.near.sum())
    assert left_out <= 1e-3 * sum(SIZES), left_out
    assert mine.optimizer.info().stage == 1
    assert not reference.engine.enable_backward_allreduce
    print(f"{name}: equal to {worst:.1e} over {STEPS} steps, {left_out} elements left out")
    mine.optimizer.close()


def rank_compares(comm):
    # gloo's thread spins while another one, which it would interrupt otherwise, holds its lock.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gloo(comm)
    for kind in CASES:
        for half in (False, True):
            compare(comm, kind, half)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reference():
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_parameters_are_equal_at_every_step(size, tmp_path, monkeypatch):
    monkeypatch.setenv("RECORDED_GRADIENTS", str(tmp_path))
    for kind in CASES:
        for half in (False, True):
            record(kind, half, size)
    out = run_ranks(size, __file__, "rank_compares", timeout=600, imports=("deepspeed",))
    print(out)
    for kind in CASES:
        for dtype in ("fp32", "fp16"):
            assert out.count(f"{kind} {dtype}: equal to") == size, out
