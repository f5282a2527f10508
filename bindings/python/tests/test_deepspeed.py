"""sotto.deepspeed without DeepSpeed: engine and configuration."""

import copy
import json
import types

import pytest
from ranks import meeting_file, run_ranks, thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from deepspeed_support import LAMB, Loss, batch, model, parameters, run, start  # noqa: E402

import sotto  # noqa: E402
import sotto.deepspeed as sd  # noqa: E402
import sotto.torch as st  # noqa: E402
from sotto.torch.averagers import adopt_engine  # noqa: E402


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


def test_initialize_returns_what_deepspeed_does(comm, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"train_batch_size": 16, "optimizer": LAMB, "steps_per_print": 2})[:-1]
        + ", // a comment\n}"
    )
    engine, optimizer, loader, schedule = start(comm, str(path))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert (loader, schedule) == (None, None)
    assert engine.optimizer is optimizer
    assert engine.get_batch_info() == (16, 16, 1)
    assert engine.net is engine.module.net  # the module's attributes
    losses = run(engine, 0, [1] * 8)
    assert losses[-1] < losses[0]
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (8, 128, 0)
    assert engine.was_step_applied()
    engine.close()


def test_progress_is_printed(comm, capsys):
    engine, *_ = start(comm, {"optimizer": LAMB, "steps_per_print": 2})
    run(engine, 0, range(4))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[Rank 0] step=2, skipped=0, lr=[0.01], mom=[[0.9, 0.999]]"
    assert len(lines) == 2
    engine.close()


def test_equals_the_optimizer_alone():
    """Clipping and schedule of the file against the same by hand."""

    def body(comm):
        config = {
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": LAMB,
            "gradient_clipping": 0.25,
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear"},
            },
        }
        engine, _, _, schedule = start(comm, config)
        rates = [schedule.get_last_lr()[0]]
        run(engine, comm.rank, range(8))
        net = Loss()
        optimizer = st.OnebitLamb(
            net.parameters(), lr=0.01, freeze_step=4, gradient_clipping=0.25, comm=comm
        )
        for step, lr in enumerate([0, 0, 0.005, 0.01, 0.015, 0.02, 0.02, 0.02]):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            net(*batch(comm.rank, step)).backward()
            optimizer.step()
        rates.append(engine.get_lr()[0])
        same = all(torch.equal(p, q) for p, q in zip(engine.module.parameters(), net.parameters()))
        engine.close()
        optimizer.close()
        return same, rates

    assert thread_ranks(2, body) == [(True, [0.0, 0.02])] * 2


def test_accumulation_is_one_larger_batch():
    def body(comm):
        def trained(steps, config):
            engine, *_ = start(comm, {"optimizer": LAMB, **config})
            assert engine.gradient_accumulation_steps() == config["gradient_accumulation_steps"]
            boundaries = []
            for parts in steps:
                for x, y in parts:
                    boundaries.append(engine.is_gradient_accumulation_boundary())
                    engine.backward(engine(x, y))
                    engine.step()
            engine.close()
            return parameters(engine), boundaries, engine.global_steps

        batches = [batch(comm.rank, step) for step in range(6)]
        whole, _, n = trained(
            [[b] for b in batches],
            {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1},
        )
        parts, boundaries, m = trained(
            [[(x[i : i + 4], y[i : i + 4]) for i in range(0, 16, 4)] for x, y in batches],
            {"train_batch_size": 32, "gradient_accumulation_steps": 4},
        )
        assert boundaries == [False, False, False, True] * 6
        assert n == m == 6
        for p, q in zip(whole, parts):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)

    thread_ranks(2, body)


def test_a_loss_that_is_divided_already(comm):
    results = []
    for divided in (False, True):
        engine, *_ = start(
            comm, {"train_batch_size": 32, "gradient_accumulation_steps": 2, "optimizer": LAMB}
        )
        for step in range(4):
            loss = engine(*batch(0, step))
            returned = engine.backward(loss / 2 if divided else loss, scale_wrt_gas=not divided)
            assert returned.item() == pytest.approx(loss.item() / 2)
            engine.step()
        results.append(parameters(engine))
        engine.close()
    for p, q in zip(*results):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("section", "dtype"),
    [
        ({"fp16": {"enabled": True, "auto_cast": True}}, torch.float16),
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"bfloat16": {"enabled": True}}, torch.bfloat16),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, torch.bfloat16),
    ],
)
def test_16_bits(section, dtype, comm):
    engine, optimizer, _, _ = start(comm, {"optimizer": LAMB, **section})
    assert {p.dtype for p in engine.parameters()} == {dtype}
    losses = run(engine, 0, [1] * 8, torch.float32 if "fp16" in section else dtype)
    assert losses[-1] < losses[0]
    assert engine.cur_scale == (65536 if "fp16" in section else 1)
    wide = "data_types" in section
    assert optimizer._gradients._dtype == (torch.float32 if wide else dtype)
    engine.close()


def test_an_overflow_is_skipped(comm):
    engine, *_ = start(
        comm,
        {
            "optimizer": LAMB,
            "fp16": {"enabled": True, "initial_scale_power": 8, "auto_cast": True},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
        },
    )
    before, lr = parameters(engine), engine.get_lr()
    engine.backward(engine(*batch(0, 0)) * 1e30)
    engine.step()
    assert not engine.was_step_applied()
    assert (engine.skipped_steps, engine.global_steps, engine.cur_scale) == (1, 1, 128)
    assert all(torch.equal(p, q) for p, q in zip(before, parameters(engine)))
    assert engine.get_lr() == lr
    run(engine, 0, range(4))
    assert engine.was_step_applied()
    assert engine.get_lr() != lr
    engine.close()


def test_schedule_of_the_file(comm):
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 20, "warmup_num_steps": 10, "warmup_type": "linear"},
        },
    }
    net = Loss()
    groups = [
        {"params": list(net.net[0].parameters()), "lr": 2e-3},
        {"params": list(net.net[2].parameters())},
    ]
    engine, _, _, schedule = start(comm, config, net, model_parameters=groups)
    assert (schedule.get_lr(), schedule.last_batch_iteration) == ([0, 0], -1)
    run(engine, 0, range(6))
    assert schedule.last_batch_iteration == 5
    assert schedule.get_lr() == pytest.approx([1e-3, 5e-4])
    with pytest.raises(sotto.InvalidStateError, match="advances with engine.step"):
        schedule.step()
    engine.optimizer.param_groups[1]["lr"] = 0.25  # overrides the schedule
    run(engine, 0, range(2))
    assert schedule.get_lr()[1] == 0.25
    engine.close()


def test_a_schedule_of_the_caller(comm):
    engine, optimizer, _, schedule = start(
        comm,
        {"optimizer": LAMB, "scheduler": {"type": "WarmupLR", "params": {}}},
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    )
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)
    run(engine, 0, range(4))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    assert optimizer.info().lr == pytest.approx(1e-3)  # of the last step: set with the next
    engine.close()


class Halved(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        return [group["lr"] / 2 for group in self.optimizer.param_groups]


def test_a_schedule_of_the_caller_may_be_a_class(comm):
    engine, _, _, schedule = start(comm, {"optimizer": LAMB}, lr_scheduler=Halved)
    assert type(schedule) is Halved
    run(engine, 0, range(2))
    assert engine.get_lr() == [pytest.approx(0.01 / 8)]
    engine.close()
    with pytest.raises(sotto.InvalidArgumentError, match="lr_scheduler is of type int; it has to"):
        start(comm, {"optimizer": LAMB}, lr_scheduler=3)


def test_an_optimizer_of_the_caller(comm):
    config = {
        "gradient_clipping": 0.5,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 2}},
    }
    net = Loss()
    mine = st.OnebitAdam(net.parameters(), lr=0.01, freeze_step=3, comm=comm)
    engine, optimizer, _, schedule = start(comm, config, net, optimizer=mine)
    assert optimizer is mine
    run(engine, 0, range(4))
    report = optimizer.report("config")
    assert (report["gradient_clipping"], report["scheduler"]) == (0.5, "WarmupLR")
    assert schedule.get_lr() == [0.5]
    engine.close()
    for wrong in (lambda p: None, {"lr": 1}):
        with pytest.raises(sotto.InvalidArgumentError, match="optimizer is of type"):
            start(comm, config, Loss(), optimizer=wrong)


def test_groups_of_the_file_and_of_the_caller(comm):
    net = Loss()
    groups = [
        {"params": list(net.net[0].parameters()), "weight_decay": 0.5},
        {"params": list(net.net[2].parameters())},
    ]
    config = {
        "optimizer": {"type": "Lamb", "params": {"lr": 0.01, "max_coeff": 0.3}},
        "sotto": {"param_groups": [{"weight_decay": 0.1, "eps": 1e-4}, {"lr": 0.02}]},
    }
    engine, optimizer, *_ = start(comm, config, net, model_parameters=groups)
    run(engine, 0, range(1))
    got = optimizer.report("groups")["groups"]
    assert [g["weight_decay"] for g in got] == [0.5, 0]
    assert [g["eps"] for g in got] == [1e-4, 1e-8]
    assert [g["lr"] for g in got] == [0.01, 0.02]
    assert [g["max_coeff"] for g in got] == [0.3, 0.3]
    assert optimizer.state_dict()["sotto"]["names"][0] == "net.0.weight"
    engine.close()
    with pytest.raises(
        sotto.InvalidArgumentError, match="describes 2 groups, but the parameters have 1"
    ):
        start(comm, config)


def test_a_batch_that_micro_batches_do_not_divide_is_refused(comm):
    """As DeepSpeed refuses it: gradient_accumulation_steps would be rounded down."""
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    batch_keys = {"train_batch_size": 26, "train_micro_batch_size_per_gpu": 8}
    with pytest.raises(sotto.InvalidArgumentError) as told:
        start(comm, {"optimizer": optimizer, **batch_keys})
    for text in (
        "has to equal train_micro_batch_size_per_gpu * gradient_accumulation_steps * ",
        "found train_batch_size 26, train_micro_batch_size_per_gpu 8, which gives 26 against 8 * 3",
        "train_batch_size 24 would fit",
    ):
        assert text in str(told.value)


@pytest.mark.parametrize("empty", [0, 1])
def test_groups_without_parameters_are_left_out(empty, comm):
    """Programs sort parameters by name into groups: a model may have none of a kind."""
    net = Loss()
    groups = [{"params": list(net.parameters()), "weight_decay": 0.25}]
    groups.insert(empty, {"params": iter(()), "weight_decay": 0.5})
    section = {"param_groups": [{"eps": 1e-4}, {"eps": 1e-6}]}
    config = {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}, "sotto": section}
    engine, optimizer, *_ = start(comm, config, net, model_parameters=groups)
    assert [len(group["params"]) for group in optimizer.param_groups] == [4]
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    assert optimizer.param_groups[0]["eps"] == (1e-6 if empty == 0 else 1e-4)
    run(engine, 0, range(1))
    assert optimizer.state_dict()["sotto"]["names"][0] == "net.0.weight"
    engine.close()
    with pytest.raises(sotto.InvalidStateError, match="there is nothing to train"):
        run(start(comm, config, model_parameters=[{"params": []}] * 2)[0], 0, range(1))


def test_a_group_of_another_models_parameters_has_no_names(comm):
    net, other = Loss(), torch.nn.Linear(2, 1)
    groups = [{"params": list(m.parameters())} for m in (net, other)]
    _, optimizer, *_ = start(comm, {"optimizer": LAMB}, net, model_parameters=groups)
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 2]


def test_training_data_is_shared_out():
    def body(comm):
        data = torch.utils.data.TensorDataset(torch.arange(12.0), torch.arange(12.0))
        config = {"train_batch_size": 4, "optimizer": LAMB}
        engine, _, loader, _ = start(comm, config, training_data=data)
        seen = [x.tolist() for x, _ in loader]
        engine.close()
        return seen

    mine, others = thread_ranks(2, body)
    assert [len(x) for x in mine + others] == [2] * 6
    assert sorted(x for part in mine + others for x in part) == list(range(12))


class Heads(torch.nn.Module):
    """A model of several tasks: every rank has one of them, and the last head is nobody's."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(20, 4)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(3))

    def forward(self, x, task):
        return self.heads[task](torch.tanh(self.body(x))).square().mean()


HEADS = Heads()  # ranks are threads: they share torch's random numbers
HYPER = {"lr": 0.01, "weight_decay": 0.5}


@pytest.mark.parametrize("kind", ["file", "accumulates", "fused", "deepspeeds engine"])
def test_a_rank_may_use_a_part_of_the_model(kind):
    """What has no gradient on a rank has zeros there, as in DeepSpeed's average."""
    net = copy.deepcopy(HEADS)
    theirs = torch.optim.AdamW(net.parameters(), **HYPER)
    for step in range(4):
        theirs.zero_grad(set_to_none=False)
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        for rank in range(2):
            (net(batch(rank, step)[0], rank) / 2).backward()
        theirs.step()
    wanted = [p.detach() for p in net.parameters()]

    def body(comm):
        net = copy.deepcopy(HEADS)
        parts = 2 if kind == "accumulates" else 1
        adam = {"optimizer": {"type": "AdamW", "params": HYPER}}
        if kind == "deepspeeds engine":  # which is told to leave averaging to the optimizer
            optimizer = sd.optimizer_from_config(net, adam, comm=comm)
            optimizer._adopted = True
        else:
            config = {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": parts}
            fused = sd.ops.adam.FusedAdam(net.parameters(), **HYPER, comm=comm)
            if kind != "fused":
                config, fused = {**config, **adam}, None
            engine, optimizer, _, _ = start(comm, config, net, optimizer=fused)
        for step in range(4):
            for _ in range(parts):
                loss = net(batch(comm.rank, step)[0], comm.rank)
                if kind == "deepspeeds engine":
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    engine.backward(loss)
                    engine.step()
        got = [p.detach().clone() for p in net.parameters()]
        optimizer.close()
        return got

    for got in thread_ranks(2, body):
        for p, q in zip(got, wanted):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_step_without_backward_changes_nothing(comm):
    engine, *_ = start(comm, {"optimizer": {"type": "AdamW", "params": HYPER}})
    run(engine, 0, range(2))
    before = parameters(engine)
    with pytest.warns(UserWarning, match="backward\\(\\) was not called"):
        engine.step()
    assert all(torch.equal(p, q) for p, q in zip(before, parameters(engine)))
    engine.close()


def test_no_sync_adds_up(comm):
    engine, *_ = start(comm, {"optimizer": LAMB})
    with engine.no_sync():
        engine.backward(engine(*batch(0, 0)))
        once = engine.net[0].weight.grad.clone()
        engine.backward(engine(*batch(0, 0)))
        with pytest.raises(sotto.InvalidStateError, match="inside no_sync"):
            engine.step()
    torch.testing.assert_close(engine.net[0].weight.grad, 2 * once)
    engine.step()
    engine.close()


def test_arguments_that_are_refused(comm):
    class PipelineModule(torch.nn.Module):
        pass

    for options, text in (
        ({"model": None}, "torch.nn.Module is needed"),
        ({"model": PipelineModule()}, "PipelineModule"),
        ({"config": None}, "0 configurations"),
        ({"config_params": {}}, "2 configurations"),
        ({"initial_parameters": "guess"}, "allowed: broadcast, check, trust"),
    ):
        with pytest.raises(sotto.SottoError, match=text):
            sd.initialize(
                **{"model": Loss(), "config": {"optimizer": LAMB}, "comm": comm, **options}
            )
    engine, *_ = start(comm, {"optimizer": LAMB})
    with pytest.raises(sotto.InvalidArgumentError, match="a scalar that depends"):
        engine.backward(torch.zeros(2, requires_grad=True))
    with pytest.raises(sotto.InvalidStateError, match="train_batch_size is not known"):
        engine.train_batch_size()
    with pytest.raises(AttributeError, match="colour"):
        _ = engine.colour


def test_an_engine_without_optimizer_evaluates(comm):
    """The reference and reward models of a trainer of several."""
    engine, optimizer, _, schedule = start(
        comm, {"train_batch_size": 16, "bf16": {"enabled": True}}
    )
    assert (optimizer, schedule, engine.optimizer) == (None, None, None)
    assert {p.dtype for p in engine.parameters()} == {torch.bfloat16}
    engine.eval()
    loss = engine(*(t.bfloat16() for t in batch(0, 0)))
    assert (engine.cur_scale, engine.train_batch_size()) == (1.0, 16)
    for call in (lambda: engine.backward(loss), engine.step, engine.get_lr):
        with pytest.raises(sotto.InvalidStateError, match="the key optimizer is missing"):
            call()
    engine.close()


def test_optimizer_from_config(comm):
    config = {
        "train_batch_size": 16,
        "optimizer": LAMB,
        "gradient_clipping": 0.5,
        "scheduler": {"type": "WarmupLR", "params": {}},
        "fp16": {"enabled": True},
        "sotto": {"mode": "compat"},
    }
    optimizer = sd.optimizer_from_config(model(), config, comm=comm)
    report = optimizer.report("config")
    assert (report["type"], report["mode"]) == ("OneBitLamb", "compat")
    assert (report["freeze_step"], report["scheduler"]) == (4, "none")
    assert report["gradient_clipping"] == 0.5
    assert optimizer.loss_scale == 1
    optimizer.close()
    for stage, kind in ((2, "OneBitLamb"), (1, "AdamW")):
        config = {"optimizer": {"type": kind}, "zero_optimization": {"stage": stage}}
        with pytest.raises(sotto.SottoError, match=f"stage.*{stage}"):
            sd.optimizer_from_config(model(), config, comm=comm)


def engine_of_deepspeed(**changed):
    """What of DeepSpeed's engine an optimizer looks at."""
    engine = types.SimpleNamespace(
        zero_optimization_stage=lambda: 0,
        gradient_clipping=lambda: 0.5,
        dp_world_size=2,
        enable_backward_allreduce=True,
        _config=types.SimpleNamespace(gradient_clipping=0.5),
        optimizer=types.SimpleNamespace(clip_grad=0.5),
    )
    for name, value in changed.items():
        setattr(engine, name, value)
    return engine


def test_deepspeeds_engine_leaves_averaging_and_clipping_to_the_optimizer():
    engine = engine_of_deepspeed(pipeline_enable_backward_allreduce=True)
    assert adopt_engine(engine, None, ranks=2) == 0.5
    assert engine.enable_backward_allreduce is engine.pipeline_enable_backward_allreduce is False
    assert (engine._config.gradient_clipping, engine.optimizer.clip_grad) == (0, 0)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"zero_optimization_stage": lambda: 2}, "zero_optimization.stage is 2: ZeRO gives"),
        ({"dp_world_size": 4}, "comm has 2 ranks, DeepSpeed's engine 4 data-parallel ones"),
        ({"dp_world_size": 2, "seq_dp_world_size": 8}, "comm has 2 ranks, DeepSpeed's engine 8"),
        ({"has_moe_layers": True}, "the model has experts"),
    ],
)
def test_engines_of_deepspeed_that_are_refused(changed, text):
    engine = engine_of_deepspeed(**changed)
    with pytest.raises(sotto.SottoError, match=text):
        adopt_engine(engine, None, ranks=2)
    assert engine.enable_backward_allreduce is True


def test_an_engine_without_a_switch_for_its_averaging_is_refused():
    engine = engine_of_deepspeed()
    del engine.enable_backward_allreduce
    with pytest.raises(sotto.UnsupportedError, match="would be all-reduced twice"):
        adopt_engine(engine, None, ranks=2)


def test_the_files_section_acts_on_an_optimizer_of_the_program():
    """As on that of the file; what its constructor was given wins."""

    def body(comm):
        section = {"gradient_codec": {"type": "int8"}}
        out = []
        for optimizer, given in (
            (None, {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}),
            (lambda p: st.AdamW(p, lr=0.01, comm=comm), {}),
            (lambda p: st.AdamW(p, lr=0.01, comm=comm, checkpoint="reset"), {}),
        ):
            config = {**given, "sotto": {**section, "checkpoint": "mean"}}
            engine, made, *_ = start(comm, config, optimizer=optimizer)
            run(engine, comm.rank, range(4))
            out.append((made._policy, parameters(engine)))
            engine.close()
        for make in (lambda p: st.AdamW(p, comm=comm), torch.optim.AdamW):
            with pytest.raises(sotto.InvalidArgumentError, match=r"^sotto\.param_groups.*AdamW"):
                start(comm, {"sotto": {"param_groups": [{"lr": 0.5}]}}, optimizer=make)
        return out

    for out in thread_ranks(2, body):
        assert [policy for policy, _ in out] == ["mean", "mean", "reset"]
        for _, params in out[1:]:
            assert all(torch.equal(a, b) for a, b in zip(out[0][1], params))


# ---- starting and saving -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["broadcast", "check", "trust"])
def test_initial_parameters(how):
    def body(comm):
        net = Loss()
        if comm.rank == 1:
            with torch.no_grad():
                net.net[0].bias += 1
        try:
            engine, *_ = start(comm, {"optimizer": LAMB}, net, initial_parameters=how)
        except sotto.InvalidStateError as error:
            return str(error)
        return engine.net[0].bias[0].item()

    first, second = thread_ranks(2, body)
    if how == "check":
        assert first == second
        assert first.startswith("1 of 4 tensors differ between ranks: net.0.bias; make the same")
    else:
        assert (first == second) == (how == "broadcast")


def rank_trains(comm):
    """The default comm, then torch's process group, then the launcher's ranks."""
    import torch.distributed as dist

    engine, *_ = sd.initialize(model=Loss(), config={"optimizer": LAMB})
    assert engine.comm is comm
    run(engine, comm.rank, range(6))
    engine.close()
    comm.close()
    dist.init_process_group(
        "gloo", init_method=meeting_file(), rank=comm.rank, world_size=comm.size
    )
    config = {"optimizer": LAMB, "sotto": {"transport": "shm"}}  # the comm of auto is tcp's
    engine, *_ = sd.initialize(model=Loss(), config=config)
    assert sotto.default_comm() is engine.comm
    run(engine, comm.rank, range(6))
    mine = torch.cat([p.detach().flatten() for p in engine.parameters()])
    others = [torch.empty_like(mine) for _ in range(comm.size)]
    dist.all_gather(others, mine)  # torch's collectives work beside
    assert all(torch.equal(mine, other) for other in others)
    engine.close()
    engine.comm.close()
    dist.destroy_process_group()
    print("trained")


def test_processes():
    assert run_ranks(2, __file__, "rank_trains").count("trained") == 2
