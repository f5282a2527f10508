"""Optimizers of PyTorch's behind the average of the library, under sotto.deepspeed's engine."""

import math

import pytest
from ranks import run_ranks, thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from deepspeed_support import Loss, batch, parameters, run, start  # noqa: E402

import sotto  # noqa: E402
import sotto.deepspeed as sd  # noqa: E402

SGD = {"lr": 0.05, "momentum": 0.9, "nesterov": True}


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


def by_hand(make, ranks, steps, parts=1, clip=0.0):
    """The same training in one process: the mean over ranks and micro-batches, clipped."""
    net = Loss()
    optimizer = make(net.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            for part in range(parts):
                (net(*batch(rank, parts * step + part)) / (ranks * parts)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def close(got, wanted):
    for p, q in zip(got, wanted):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_is_one_larger_batch(kind):
    hyper = SGD if kind == "SGD" else {"lr": 0.05}
    make = lambda params: getattr(torch.optim, kind)(params, **hyper)  # noqa: E731

    def body(comm):
        net = Loss()
        mine = make(net.parameters())
        config = {
            "train_micro_batch_size_per_gpu": 16,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.2,
        }
        engine, optimizer, _, _ = start(comm, config, net, optimizer=mine)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert (optimizer.optimizer, engine.basic_optimizer) == (mine, mine)
        assert optimizer.param_groups is mine.param_groups
        assert engine.optimizer_name() == kind
        run(engine, comm.rank, range(8))
        assert engine.get_global_grad_norm() > 0
        engine.close()
        return parameters(engine)

    wanted = by_hand(make, 2, 4, parts=2, clip=0.2)
    for got in thread_ranks(2, body):
        close(got, wanted)


def test_the_file_may_name_one_of_pytorchs(comm):
    config = {
        "optimizer": {"type": "SGD", "params": SGD},
        "scheduler": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}},
    }
    engine, optimizer, _, schedule = start(comm, config)
    assert type(optimizer.optimizer) is torch.optim.SGD
    assert type(schedule) is torch.optim.lr_scheduler.StepLR
    run(engine, 0, range(5))
    assert engine.get_lr() == [pytest.approx(0.05 / 4)]
    assert engine.get_mom() == [0.9]
    engine.close()
    for section, text in (
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9, "lrr": 1}}}, "lrr"),
        ({**config, "scheduler": {"type": "StepLR", "params": {}}}, "step_size"),
        ({**config, "zero_optimization": {"stage": 2}}, "stage 2"),
    ):
        with pytest.raises(sotto.SottoError, match=text):
            start(comm, section)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_16_bits_have_float32_masters(dtype, comm):
    section = {"enabled": True, "initial_scale_power": 8} if dtype == "fp16" else {"enabled": True}
    net = Loss()
    mine = torch.optim.AdamW(net.parameters(), lr=1e-4)
    engine, optimizer, _, _ = start(comm, {dtype: section}, net, optimizer=mine)
    half = torch.float16 if dtype == "fp16" else torch.bfloat16
    assert {p.dtype for p in engine.parameters()} == {half}
    masters = [p for group in mine.param_groups for p in group["params"]]
    assert {p.dtype for p in masters} == {torch.float32}
    x, y = batch(0, 1)
    before = [p.clone() for p in masters]
    losses = run(engine, 0, [1] * 20, half)
    assert losses[-1] < losses[0]
    for p, master, first in zip(engine.parameters(), masters, before):
        assert torch.equal(p, master.to(half))
        assert not torch.equal(master, first)
    if dtype == "fp16":
        kept = [p.clone() for p in masters]
        engine.backward(engine(x.half(), y) * 1e30)
        engine.step()
        assert (engine.skipped_steps, engine.was_step_applied()) == (1, False)
        assert (optimizer.overflow, optimizer.cur_scale, engine.cur_scale) == (True, 128, 128)
        assert all(torch.equal(p, q) for p, q in zip(kept, masters))
    engine.close()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_state_that_is_there_before_the_masters_is_float32_too(dtype, comm):
    """Adagrad makes its sums with itself: of small gradients they vanish in 16 bits."""
    net = torch.nn.Linear(4, 1, bias=False)
    section = {"enabled": True, "loss_scale": 128} if dtype == "fp16" else {"enabled": True}
    config = {dtype: section, "optimizer": {"type": "Adagrad", "params": {"lr": 0.01}}}
    engine, optimizer, _, _ = start(comm, config, net)
    x = torch.tensor([[1, 0.01, 1e-4, 1e-5]], dtype=net.weight.dtype)
    (master,) = optimizer.masters().values()
    truth = master.clone().requires_grad_()
    by_hand_ = torch.optim.Adagrad([truth], lr=0.01)
    for _ in range(20):
        engine.backward(engine(x).sum())
        engine.step()
        truth.grad = x.float()
        by_hand_.step()
    assert {v.dtype for v in next(iter(optimizer.state.values())).values()} == {torch.float32}
    torch.testing.assert_close(master, truth.detach(), rtol=1e-4, atol=1e-4)
    engine.close()


def test_a_schedule_of_the_file_and_one_of_the_program(comm):
    warm = {"warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}
    config = {"scheduler": {"type": "WarmupLR", "params": warm}}
    net = Loss()
    mine = torch.optim.SGD(net.parameters(), lr=0.1)
    engine, _, _, schedule = start(comm, config, net, optimizer=mine)
    assert isinstance(schedule, sd.runtime.lr_schedules.WarmupLR)
    run(engine, 0, range(3))
    assert mine.param_groups[0]["lr"] == pytest.approx(0.25)
    engine.close()
    net = Loss()
    mine = torch.optim.SGD(net.parameters(), lr=0.1)
    made = torch.optim.lr_scheduler.ExponentialLR(mine, 0.5)
    engine, _, _, schedule = start(comm, config, net, optimizer=mine, lr_scheduler=made)
    assert schedule is made
    run(engine, 0, range(2))
    assert engine.get_lr() == [pytest.approx(0.025)]
    engine.close()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_checkpoints_go_on_bit_for_bit(dtype, comm, tmp_path):
    config = {"train_batch_size": 16}
    half = torch.float32
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}
        half = torch.float16

    def fresh():
        net = Loss()
        mine = torch.optim.Adam(net.parameters(), lr=0.01)
        return start(comm, config, net, optimizer=mine)[0]

    engine = fresh()
    run(engine, 0, range(5), half)
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    behind = run(engine, 0, range(5, 10), half)
    other = fresh()
    _, state = other.load_checkpoint(tmp_path)
    assert state == {"epoch": 3}
    assert other.cur_scale == (512.0 if dtype == "fp16" else 1.0)
    assert run(other, 0, range(5, 10), half) == behind
    assert other.cur_scale == engine.cur_scale
    wrong = Loss()
    wrong, *_ = start(comm, config, wrong, optimizer=torch.optim.SGD(wrong.parameters(), lr=1))
    with pytest.raises(sotto.InvalidArgumentError, match="the state is of Adam"):
        wrong.load_checkpoint(tmp_path)
    for made in (engine, other, wrong):
        made.close()


def test_what_is_refused(comm):
    net = Loss()
    engine, optimizer, _, _ = start(comm, {}, net, optimizer=torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(sotto.UnsupportedError, match="closure"):
        optimizer.step(lambda: 0.0)
    before = parameters(engine)
    engine.backward(engine(*batch(0, 0)) * math.nan)
    with pytest.raises(sotto.NonfiniteError):
        engine.step()
    assert all(torch.equal(p, q) for p, q in zip(before, parameters(engine)))
    engine.zero_grad()
    run(engine, 0, range(2))
    engine.close()
    wide = Loss().double()
    with pytest.raises(sotto.UnsupportedError, match=r'"net.0.weight" is torch.float64'):
        start(comm, {}, wide, optimizer=torch.optim.SGD(wide.parameters(), 0.1))


# ---- gradient accumulation -----------------------------------------------------------------------


@pytest.mark.parametrize("of_the_library", [True, False])
def test_boundaries_that_the_program_sets(of_the_library, comm):
    """One step() behind several backward passes is the same update."""
    results = []
    for by_hand_ in (False, True):
        net = Loss()
        config = {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 3}
        mine = None
        if of_the_library:
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
        else:
            mine = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
        engine, *_ = start(comm, config, net, optimizer=mine)
        for update in range(4):
            for part in range(3):
                if by_hand_:
                    engine.set_gradient_accumulation_boundary(part == 2)
                engine.backward(engine(*batch(0, 3 * update + part)))
                if part == 2 or not by_hand_:
                    engine.step()
        assert engine.global_steps == 4
        results.append(parameters(engine))
        engine.close()
    close(*results)


@pytest.mark.parametrize("scaled", [True, False])
def test_what_a_parameters_gradient_is_between_backward_and_step(scaled, comm):
    """Of one micro-batch where the library adds, else the sum of those so far over their number."""
    net = Loss()
    micro = []
    for part in range(2):
        net.zero_grad()
        net(*batch(0, part)).backward()
        micro.append(net.net[0].weight.grad.clone())
    config = {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 2}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    if scaled:
        config["fp16"] = {"enabled": True, "loss_scale": 8}
    for by_hand_ in (False, True):
        engine, *_ = start(comm, config)
        for part in range(2):
            if by_hand_:
                engine.set_gradient_accumulation_boundary(part == 1)
            x, y = batch(0, part)
            engine.backward(engine(x.half() if scaled else x, y))
            got = engine.net[0].weight.grad.float() / (8 if scaled else 1)
            wanted = sum(micro[: part + 1]) / 2 if by_hand_ else micro[part]
            torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-4)
            engine.step()
            assert (engine.net[0].weight.grad is None) == (not by_hand_ or part == 1)
        engine.close()


def test_another_batch_size_between_updates(comm):
    results = []
    for steps in (1, 2):
        net = Loss()
        config = {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": steps}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
        engine, *_ = start(comm, config, net)
        engine.set_train_batch_size(32)
        assert engine.get_batch_info() == (32, 16, 2)
        run(engine, 0, range(6))
        assert engine.global_steps == 3
        engine.backward(engine(*batch(0, 6)))
        engine.step()
        if steps == 2:
            with pytest.raises(sotto.InvalidStateError, match="1 of 2 micro-batches of the next"):
                engine.set_train_batch_size(16)
        with pytest.raises(sotto.InvalidArgumentError, match="multiples of 16"):
            engine.set_train_batch_size(20)
        engine.backward(engine(*batch(0, 7)))
        engine.step()
        results.append(parameters(engine))
        engine.close()
    close(*results)


def test_lion_of_a_configuration_is_the_one_by_name(comm):
    from sotto.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    numbers = {"lr": 0.01, "betas": [0.9, 0.99], "weight_decay": 0.1}
    engine, *_ = start(comm, {"optimizer": {"type": "Lion", "params": numbers}})
    run(engine, 0, range(4))
    for kind in (FusedLion, DeepSpeedCPULion):
        close(parameters(engine), by_hand(lambda p, k=kind: k(p, **numbers, comm=comm), 1, 4))
    engine.close()
    with pytest.raises(sotto.UnsupportedError, match="fp32_optimizer_states"):
        DeepSpeedCPULion(Loss().parameters(), fp32_optimizer_states=False, comm=comm)


# ---- checkpoints of any engine -------------------------------------------------------------------


def test_frozen_parameters_and_a_loader_of_the_caller(comm, tmp_path):
    net = Loss()
    net.net[0].weight.requires_grad_(False)
    config = {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}
    engine, *_ = start(comm, config, net)
    run(engine, 0, range(2))
    engine.save_checkpoint(tmp_path, "less", exclude_frozen_parameters=True)
    engine.save_16bit_model(tmp_path, "weights.bin", exclude_frozen_parameters=True)
    assert "net.0.weight" not in torch.load(tmp_path / "weights.bin", weights_only=True)
    with pytest.raises(RuntimeError, match=r"net\.0\.weight"):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_module_strict=False)
    seen = []
    engine.load_checkpoint(
        tmp_path, custom_load_fn=lambda src, dst: seen.append((sorted(src), dst))
    )
    assert seen == [(["net.0.bias", "net.2.bias", "net.2.weight"], net)]
    state = sd.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert torch.equal(state["net.2.bias"], net.net[2].bias)
    engine.close()


def test_client_state_of_megatron(comm, tmp_path):
    import argparse

    np = pytest.importorskip("numpy", reason="numpy is not installed in this Python")
    engine, *_ = start(comm, {"optimizer": {"type": "Lamb"}})
    given = {
        "args": argparse.Namespace(lr=0.1, names=["a"]),
        "np_rng_state": np.random.RandomState(3).get_state(),
        "loss": np.float64(2.5),
        "mean": np.arange(3, dtype=np.float32),
    }
    engine.save_checkpoint(tmp_path, client_state=given)
    _, taken = engine.load_checkpoint(tmp_path)
    assert taken["args"] == given["args"]
    assert taken["loss"] == 2.5
    assert (taken["mean"] == given["mean"]).all()
    np.random.RandomState(0).set_state(taken["np_rng_state"])
    with pytest.raises(
        sotto.InvalidArgumentError, match=r"client_state\['f'\] is of type function"
    ):
        engine.save_checkpoint(tmp_path, client_state={"f": by_hand})
    engine.close()


def rank_saves_other_tags(comm):
    engine, *_ = start(comm, {"optimizer": {"type": "Lamb"}})
    with pytest.raises(sotto.InvalidArgumentError, match="tag is"):
        engine.save_checkpoint("unused", tag=f"of_{comm.rank}")
    engine.close()
    print("refused")


def test_other_tags_on_other_ranks():
    assert run_ranks(2, __file__, "rank_saves_other_tags").count("refused") == 2


def copied(net, values):
    net.load_state_dict(values)


def assigned(net, values):
    net.load_state_dict({k: v.clone() for k, v in values.items()}, assign=True)


def replaced(net, values):
    for name, p in net.named_parameters():
        p.data = values[name].clone()


@pytest.mark.parametrize("write", [copied, assigned, replaced], ids=lambda write: write.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ours", [True, False])
def test_what_is_written_into_the_model_is_trained_on(ours, dtype, write, comm):
    """Before the first step and behind it, with optimizers of the library and the caller's."""
    section = {"bf16": {"enabled": dtype == torch.bfloat16}, "fp16": {"enabled": False}}
    if dtype == torch.float16:
        section["fp16"] = {"enabled": True, "loss_scale": 8}
    net = Loss()
    if ours:
        section["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    mine = None if ours else torch.optim.AdamW(net.parameters(), lr=0.01)
    engine, _, _, _ = start(comm, section, net, optimizer=mine)
    for step, value in enumerate((0.5, -0.25)):
        values = {k: torch.full_like(v, value) for k, v in engine.module.state_dict().items()}
        write(engine.module, values)
        run(engine, 0, [step], dtype)
        for p in engine.module.parameters():
            moved = (p.float() - value).abs().max()
            assert 0 < moved < 0.03
    if mine is not None:
        masters = [p for group in mine.param_groups for p in group["params"]]
        assert all(torch.equal(p, m.to(dtype)) for p, m in zip(engine.parameters(), masters))
        assert len(mine.state) == len(masters)
        assert all(mine.state[m]["step"] == 2 for m in masters)
    engine.close()


def test_parameters_of_another_dtype_are_refused(comm):
    net = Loss()
    mine = torch.optim.SGD(net.parameters(), **SGD)
    engine, _, _, _ = start(comm, {}, net, optimizer=mine)
    run(engine, 0, [0])
    engine.module.double()
    for p in engine.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(sotto.InvalidStateError, match="has changed from torch.float32 to"):
        engine.optimizer.step()
    engine.close()


def test_an_optimizer_that_needs_a_closure_is_refused(comm):
    net = Loss()
    with pytest.raises(sotto.UnsupportedError, match="LBFGS needs a closure"):
        start(comm, {}, net, optimizer=torch.optim.LBFGS(net.parameters()))
    with pytest.raises(sotto.UnsupportedError, match="LBFGS needs a closure"):
        start(comm, {"optimizer": {"type": "LBFGS", "params": {}}})


HALF = {"fp16": {"enabled": True, "loss_scale": 8}}
THREE = {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize("overlap", [{}, {"sotto": {"overlap": {}}}], ids=["", "overlap"])
@pytest.mark.parametrize("section", [HALF, THREE], ids=["scaled", "boundaries"])
@pytest.mark.parametrize("through", ["engine", "module"])
def test_a_backward_pass_past_the_engine(through, section, overlap, comm):
    """loss.backward() of a program: an error where the engine's factor is missing, else as good."""
    dtype = torch.float16 if "fp16" in section else torch.float32
    given = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **section, **overlap}
    engine, other = start(comm, given)[0], start(comm, given)[0]
    for each in (engine, other):
        run(each, 0, range(3), dtype)
        if section is THREE:
            each.set_gradient_accumulation_boundary(True)
    x, y = batch(0, 3)
    (engine if through == "engine" else engine.module)(x.to(dtype), y).backward()
    before = parameters(engine)
    with pytest.raises(sotto.InvalidStateError, match=r"engine.scale\(loss\).backward\(\)"):
        engine.step()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(engine)))
    engine.zero_grad()
    engine.scale(engine(x.to(dtype), y)).backward()
    engine.step()
    run(other, 0, [3], dtype)
    for each in (engine, other) if not overlap else ():  # zeros are zeros with any factor
        run(each, 0, [4], dtype)
        for p in each.module.parameters():
            p.grad = torch.zeros_like(p)
        each.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters(other), parameters(engine)))
    engine.close()
    other.close()


def test_a_backward_pass_past_the_engine_is_counted(comm):
    """Where the library takes the mean of micro-batches there is no factor."""
    given = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **THREE}
    engine, other = start(comm, given)[0], start(comm, given)[0]
    for step in range(6):
        engine(*batch(0, step)).backward()
        engine.step()
    run(other, 0, range(6))
    assert all(torch.equal(a, b) for a, b in zip(parameters(other), parameters(engine)))
    engine.close()
    other.close()


def test_outer_steps_of_the_file_are_refused(comm):
    """They would be around the average of the gradients, and not around the program's steps."""
    given = {"sotto": {"outer": {"preset": "local_sgd", "period": 2}}}
    for options in ({"optimizer": {"type": "NAdam"}}, {}):
        mine = None if options else torch.optim.AdamW
        with pytest.raises(sotto.UnsupportedError, match=r'"outer"} with an optimizer of the prog'):
            start(comm, {**given, **options}, optimizer=mine)


def test_a_parameter_that_one_rank_alone_has_frozen_is_an_error():
    """It would move on the others only. Where all have frozen it, it stands still."""

    def body(comm):
        engine, *_ = start(comm, {}, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        bias = engine.net[0].bias
        for step, frozen in enumerate((False, True, False)):
            before = bias.clone()
            bias.requires_grad_(not frozen)
            run(engine, comm.rank, [step])
            assert torch.equal(bias, before) == frozen
        bias.requires_grad_(comm.rank == 0)
        before = parameters(engine)
        with pytest.raises(sotto.ProtocolError):
            run(engine, comm.rank, [3])
        assert all(torch.equal(a, b) for a, b in zip(before, parameters(engine)))
        engine.close()

    thread_ranks(2, body)


def test_parameters_of_which_ranks_have_shards_are_refused(comm):
    """As by the optimizers of the library: others' shards are other elements."""
    net = Loss()
    net.net[0].weight.device_mesh = "of two ranks"  # as a DTensor has one
    with pytest.raises(sotto.UnsupportedError, match='"net.0.weight" is a DTensor'):
        start(comm, {}, net, optimizer=torch.optim.NAdam)


@pytest.mark.parametrize("client", [None, torch.optim.SGD])
def test_an_overflow_is_skipped_with_a_static_scale_too(client):
    """As in DeepSpeed; the micro-batches of the step are gone, and the schedule stands still."""
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "loss_scale": 64},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }

    def body(comm):
        made = None if client is None else lambda params: client(params, lr=0.01)
        engine, *_ = start(comm, config, optimizer=made)
        twin, *_ = start(comm, config, optimizer=made)
        for step in range(6):
            x, y = batch(comm.rank, step)
            loss = engine(x.half(), y)
            if step == 3 and comm.rank == 1:
                loss = loss * float("inf")
            engine.backward(loss)
            engine.step()
            if step == 3:
                seen = engine.was_step_applied(), engine.optimizer.overflow, engine.skipped_steps
                assert (*seen, engine.global_steps) == (False, True, 1, 2)
            if step not in (2, 3):
                run(twin, comm.rank, [step], torch.float16)
        same = [torch.equal(p, q) for p, q in zip(parameters(engine), parameters(twin))]
        assert all(same)
        assert engine.get_lr() == twin.get_lr()
        assert (engine.cur_scale, engine.global_steps, twin.global_steps) == (64, 3, 2)
        engine.close()
        twin.close()

    thread_ranks(2, body)
