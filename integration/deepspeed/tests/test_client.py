"""DeepSpeed's own engine with an optimizer of sotto.torch, next to sotto.deepspeed's engine."""

import copy
import importlib.util
import os

import pytest
from ranks import meeting_file, run_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed in this Python", allow_module_level=True)
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import small  # noqa: E402
import torch.distributed as dist  # noqa: E402

import sotto  # noqa: E402
import sotto.deepspeed as sd  # noqa: E402
import sotto.torch as st  # noqa: E402

torch.set_num_threads(1)
STEPS = 24
COMMON = {"lr": 2e-3, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}
# Arguments by which the switch from full precision is in the middle of a run.
KINDS = {
    "OneBitAdam": (st.OnebitAdam, {"freeze_step": 12}),
    "ZeroOneAdam": (
        st.ZeroOneAdam,
        {
            "var_freeze_step": 12,
            "var_update_scaler": 4,
            "local_step_scaler": 4,
            "local_step_clipper": 2,
        },
    ),
    "OneBitLamb": (st.OnebitLamb, {"freeze_step": 12}),
}
FILE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,
    "zero_allow_untested_optimizer": True,
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 6, "warmup_type": "linear"},
    },
}
# What is added to the file on both sides, and on ours alone. With 16-bit parameters DeepSpeed's
# wrapper hands float32 gradients to the optimizer, so ours averages them in float32 too. It adds
# micro-batches up in 16 bits, ours in float32: these are compared without accumulation. On the CPU
# its engine has no float16.
TYPES = {
    "fp32": ({"gradient_accumulation_steps": 2}, {}),
    "bf16": ({"bf16": {"enabled": True}}, {"data_types": {"grad_accum_dtype": "fp32"}}),
}


def join():
    from reference import join_deepspeed

    rank, size = int(os.environ["SOTTO_RANK"]), int(os.environ["SOTTO_WORLD_SIZE"])
    os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed's engine insists
    dist.init_process_group("gloo", init_method=meeting_file(), rank=rank, world_size=size)
    return join_deepspeed()


def ranks(function):
    return run_ranks(2, __file__, function, timeout=600, imports=("deepspeed",))


def masters(engine):
    """float32 parameters of either engine, as one vector."""
    optimizer = engine.optimizer
    if isinstance(optimizer, st.SottoOptimizer):
        tensors = [t.master for t in optimizer._tensors]
    else:
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.cat([t.detach().flatten() for t in tensors])


def one_step(engine, rank, step):
    parts = engine.gradient_accumulation_steps()
    for part in range(parts):
        engine.backward(engine(*small.batch(rank, parts * step + part, 4)))
        engine.step()


def refuse_to_average(*_, **__):
    raise AssertionError("DeepSpeed's engine averaged gradients too")


def compare(deepspeed, comm, kind, dtype):
    cls, hyper = KINDS[kind]
    both, mine = TYPES[dtype]
    config = {**FILE, **both}
    net, other = small.SmallBert(), small.SmallBert()
    optimizer = cls(net.named_parameters(), comm=comm, **COMMON, **hyper)
    theirs, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=copy.deepcopy(config))
    assert theirs.basic_optimizer is optimizer
    theirs.buffered_allreduce_fallback = refuse_to_average
    whole = {"type": kind, "params": {**COMMON, **hyper}}
    ours, *_ = sd.initialize(model=other, config={**config, **mine, "optimizer": whole}, comm=comm)
    worst = 0.0
    for step in range(STEPS):
        one_step(theirs, comm.rank, step)
        one_step(ours, comm.rank, step)
        assert theirs.get_lr() == pytest.approx(ours.get_lr(), rel=1e-6)
        got, wanted = masters(theirs), masters(ours)
        error = (got - wanted).abs() / wanted.abs().clamp(min=1)
        worst = max(worst, error.max().item())
        assert worst <= 1e-6, f"step {step + 1}: parameters differ by {worst}"
    info = optimizer.info()
    assert (info.stage, info.step) == (1, ours.optimizer.info().step)
    assert theirs.enable_backward_allreduce is False
    ours.close()
    optimizer.close()
    print(f"{kind} {dtype}: equal to {worst:.1e}, {info.step} updates")


def rank_compares(comm):
    deepspeed = join()
    for kind in KINDS:
        for dtype in TYPES:
            try:
                compare(deepspeed, comm, kind, dtype)
            except Exception as error:
                raise AssertionError(f"{kind} {dtype}: {error!r}") from error
    dist.destroy_process_group()


def test_the_same_parameters_as_from_the_engine_here():
    out = ranks("rank_compares")
    print(out)
    for kind in KINDS:
        for dtype in TYPES:
            assert out.count(f"{kind} {dtype}: equal to") == 2, out


class Branches(torch.nn.Module):
    """A layer for all batches and one for each rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.trunk = torch.nn.Linear(4, 4)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](self.trunk(x)).square().mean()


def batch_of(rank, step):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def rank_uses_layers_of_its_own(comm):
    """Gradients of layers that only another rank has used are that rank's, over their number."""
    deepspeed = join()
    net, alone = Branches(), Branches()
    optimizer = st.Adam(net.named_parameters(), comm=comm, lr=1e-2)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    plain = torch.optim.Adam(alone.parameters(), lr=1e-2)
    for step in range(4):
        engine.backward(engine(batch_of(comm.rank, step), comm.rank))
        engine.step()
        plain.zero_grad()
        (sum(alone(batch_of(r, step), r) for r in range(2)) / 2).backward()
        plain.step()
        for got, wanted in zip(net.parameters(), alone.parameters()):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    optimizer.close()
    dist.destroy_process_group()
    print("the same parameters")


def test_layers_that_only_some_ranks_use():
    assert ranks("rank_uses_layers_of_its_own").count("the same parameters") == 2


# ---- what cannot work ----------------------------------------------------------------------------


def rank_is_refused():
    """DeepSpeed's process group is all there is: the optimizers adopt it."""
    deepspeed = join()

    def train(net, optimizer, config):
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
        one_step(engine, dist.get_rank(), 0)

    for stage in (1, 2, 3):
        for section in ({}, {"bf16": {"enabled": True}}):
            config = {**FILE, **section, "zero_optimization": {"stage": stage}}
            net = small.SmallBert()
            optimizer = st.OnebitLamb(net.parameters(), **COMMON)
            with pytest.raises(sotto.SottoError, match="ZeRO gives every rank a shard of its own"):
                train(net, optimizer, config)
            assert sotto.default_comm().size == dist.get_world_size()
    net = small.SmallBert()
    with sotto.default_comm().split(dist.get_rank()) as alone:
        optimizer = st.OnebitLamb(net.parameters(), comm=alone, **COMMON)
        with pytest.raises(sotto.SottoError, match="comm has 1 rank, DeepSpeed's engine 2 data-"):
            train(net, optimizer, dict(FILE))
    sotto.default_comm().close()
    dist.destroy_process_group()
    print("refused")


def test_what_cannot_work_is_refused():
    assert ranks("rank_is_refused").count("refused") == 2


def rank_of_a_pipeline():
    """Two stages of one rank each: the ranks hold other parameters and must not be averaged."""
    deepspeed = join()
    from deepspeed.pipe import PipelineModule

    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    net = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    optimizer = st.OnebitAdam(net.parameters(), **COMMON)
    config = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 4}
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    batches = iter([(torch.randn(4, 8), torch.randn(4, 8))] * 4)
    # The last stage makes the first gradients; the other one waits for its share of them.
    refused = (sotto.SottoError, "comm has 2 ranks, DeepSpeed's engine 1 data-parallel")
    error, text = refused if dist.get_rank() == 1 else (RuntimeError, ".")
    with pytest.raises(error, match=text):
        engine.train_batch(batches)
    print("refused", dist.get_rank(), flush=True)
    os._exit(0)


def test_pipeline_stages_need_a_group_of_their_own():
    assert "refused 1" in ranks("rank_of_a_pipeline")
