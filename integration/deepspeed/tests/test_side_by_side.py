"""Sotto in mode compat against DeepSpeed's 1-bit optimizers: the same gradients, equal parameters.

DeepSpeed 0.18.9 is the last release that has them: `DS_BUILD_OPS=0 pip install deepspeed==0.18.9`
beside torch. 1-bit Adam and 0/1 Adam get one flat tensor, as DeepSpeed's fp16 wrapper hands them a
parameter group; 1-bit LAMB gets several.
"""

import importlib.util
import os
import tempfile

import pytest
from ranks import run_ranks

np = pytest.importorskip("numpy", reason="numpy is not installed in this Python")
torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

import model  # noqa: E402
import recorded  # noqa: E402
import torch.distributed as dist  # noqa: E402

import sotto.torch as st  # noqa: E402

torch.set_num_threads(1)
STEPS, MARGIN = 60, 1e-3
f32 = np.float32
COMMON = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}
# Tensors, hyper-parameters, and what the model calls the optimizer. The switch from full precision
# is after 20 updates.
CASES = {
    "OneBitAdam": ([5003], {"freeze_step": 21}, model.OnebitAdam, st.OnebitAdam),
    "ZeroOneAdam": (
        [5003],
        {
            "var_freeze_step": 20,
            "var_update_scaler": 4,
            "local_step_scaler": 8,
            "local_step_clipper": 4,
        },
        model.ZeroOneAdam,
        st.ZeroOneAdam,
    ),
    "OneBitLamb": (
        [3001, 129, 1000, 7, 866],
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
        st.OnebitLamb,
    ),
}


def reason_to_skip():
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed in this Python"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from reference import optimizer_classes

    try:
        optimizer_classes()
    except ImportError as error:
        return f"this DeepSpeed has no 1-bit optimizers: {error}"
    return None


def gloo(comm):
    place = os.environ["SOTTO_RENDEZVOUS"].removeprefix("tcp://")
    name = "sotto-reference-" + place.replace(":", "-").replace("/", "-")
    path = os.path.join(tempfile.gettempdir(), name)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size
    )
    from reference import join_deepspeed

    join_deepspeed()


def compare(comm, kind):
    from reference import Reference

    sizes, hyper, maker, mine = CASES[kind]
    start = np.random.default_rng(7).standard_normal(sum(sizes)).astype(f32)
    names = {"b1": COMMON["betas"][0], "b2": COMMON["betas"][1], "wd": COMMON["weight_decay"]}
    of_model = {**names, "lr": COMMON["lr"], "eps": COMMON["eps"], **hyper}
    gradients = recorded.record(maker, start, sizes, comm.size, of_model, STEPS)

    tensors = np.split(start, np.cumsum(sizes)[:-1])
    reference = Reference(kind, tensors, MARGIN, **COMMON, **hyper)
    params = [torch.nn.Parameter(torch.tensor(t)) for t in tensors]
    optimizer = mine(params, mode="compat", comm=comm, **COMMON, **hyper)
    worst = 0.0
    for step, of_ranks in enumerate(gradients):
        reference.step(of_ranks)
        parts = torch.from_numpy(of_ranks[comm.rank]).split(sizes)
        for p, g in zip(params, parts):
            p.grad = g.clone()
        optimizer.step()
        if kind == "ZeroOneAdam" and comm.rank != 0:
            continue  # the reference's replicas drift apart
        got, wanted = torch.cat([p.detach() for p in params]).numpy(), reference.flat()
        compared = ~reference.near.numpy()
        error = np.abs(got - wanted) / np.maximum(1, np.abs(wanted))
        worst = max(worst, float(error[compared].max()))
        assert worst <= 2e-6, f"{kind}: step {step + 1}: parameters differ by {worst}"
    left_out = int(reference.near.sum())
    assert left_out <= 1e-3 * sum(sizes), left_out
    assert optimizer.info().stage == 1
    assert not reference.engine.enable_backward_allreduce
    print(f"{kind}: equal to {worst:.1e} over {STEPS} steps, {left_out} elements left out")
    optimizer.close()


def rank_compares(comm):
    gloo(comm)
    for kind in CASES:
        compare(comm, kind)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reference():
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("size", [2, 4])
def test_parameters_are_equal_at_every_step(size):
    out = run_ranks(size, __file__, "rank_compares", timeout=300)
    print(out)
    for kind in CASES:
        assert out.count(f"{kind}: equal to") == size, out
