"""Parameters that are frozen at initialize() and trained later, or added later."""

import pytest
from ranks import thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from deepspeed_support import Loss, batch, parameters, run, start  # noqa: E402

import sotto  # noqa: E402


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


def frozen(net):
    for p in net.net[0].parameters():
        p.requires_grad_(False)
    return net


def thaw(net, optimizer, how):
    for p in net.net[0].parameters():
        p.requires_grad_(True)
    if how == "added":
        optimizer.add_param_group({"params": list(net.net[0].parameters()), "lr": 0.02})


def adamw(net, how):
    """Of all parameters, or of those that are not frozen."""
    chosen = [p for p in net.parameters() if p.requires_grad or how == "thawed"]
    return torch.optim.AdamW(chosen, lr=0.05)


def by_hand(how, ranks, updates, parts, thawed_at):
    """The same training in one process."""
    net = frozen(Loss())
    optimizer = adamw(net, how)
    for update in range(updates):
        if update == thawed_at:
            thaw(net, optimizer, how)
        optimizer.zero_grad()
        for rank in range(ranks):
            for part in range(parts):
                (net(*batch(rank, parts * update + part)) / (ranks * parts)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("before", [1, 2], ids=["first", "second"])
@pytest.mark.parametrize("how", ["thawed", "added"])
def test_is_averaged_from_the_next_update_on(how, before):
    """before: updates that were made, so also a number that the new average has too."""

    def body(comm):
        net = frozen(Loss())
        config = {
            "train_micro_batch_size_per_gpu": 16,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.2,
        }
        engine, optimizer, _, _ = start(comm, config, net, optimizer=adamw(net, how))
        run(engine, comm.rank, range(2 * before))
        thaw(net, optimizer, how)
        for step in range(2 * before, 8):
            run(engine, comm.rank, [step])
            assert engine.was_step_applied() == (step % 2 == 1)
        assert engine.get_lr() == ([0.05, 0.02] if how == "added" else [0.05])
        assert (engine.global_steps, engine.skipped_steps) == (4, 0)
        engine.close()
        return parameters(engine)

    wanted = by_hand(how, 2, 4, 2, before)
    for got in thread_ranks(2, body):
        for p, q in zip(got, wanted):
            torch.testing.assert_close(p, q, rtol=2e-5, atol=1e-6)


def test_masters_of_16_bits_follow(comm):
    net = frozen(Loss())
    engine, optimizer, _, _ = start(
        comm, {"bf16": {"enabled": True}}, net, optimizer=adamw(net, "thawed")
    )
    run(engine, 0, range(2), torch.bfloat16)
    assert [p.dtype for p in optimizer.param_groups[0]["params"]] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    thaw(net, optimizer, "thawed")
    run(engine, 0, range(2, 6), torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in optimizer.param_groups[0]["params"])
    for model, master in zip(net.parameters(), optimizer.param_groups[0]["params"]):
        assert torch.equal(model, master.bfloat16())
        assert optimizer.state[master]["exp_avg"].dtype == torch.float32
    engine.close()


def test_a_dynamic_loss_scale_goes_on(comm):
    section = {"fp16": {"enabled": True, "initial_scale_power": 26, "hysteresis": 1}}
    net = frozen(Loss())
    engine, optimizer, _, _ = start(comm, section, net, optimizer=adamw(net, "thawed"))
    run(engine, 0, range(8), torch.float16)
    scale = engine.cur_scale
    assert 1 < scale < 2**26
    thaw(net, optimizer, "thawed")
    before = parameters(engine)
    run(engine, 0, [8], torch.float16)
    assert engine.cur_scale in (scale, scale / 2)
    run(engine, 0, range(9, 12), torch.float16)
    assert not torch.equal(before[0], parameters(engine)[0])
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("early", [False, True], ids=["resumed", "thawed"])
def test_checkpoints(dtype, early, comm, tmp_path):
    """early: parameters are thawed before load_checkpoint(); else behind it, at an epoch's begin.

    The masters of thawed 16-bit parameters are the model's values then.
    """
    section = {"bf16": {"enabled": dtype == torch.bfloat16}}
    net = frozen(Loss())
    engine, optimizer, _, _ = start(comm, section, net, optimizer=adamw(net, "thawed"))
    run(engine, 0, range(2), dtype)
    thaw(net, optimizer, "thawed")
    run(engine, 0, range(2, 4), dtype)
    engine.save_checkpoint(tmp_path)
    wanted = run(engine, 0, range(4, 8), dtype)
    other = frozen(Loss())
    resumed, optimizer, _, _ = start(comm, section, other, optimizer=adamw(other, "thawed"))
    if early:
        thaw(other, optimizer, "thawed")
    resumed.load_checkpoint(tmp_path)
    thaw(other, optimizer, "thawed")
    got = run(resumed, 0, range(4, 8), dtype)
    if early or dtype == torch.float32:
        assert got == wanted
        assert all(torch.equal(p, q) for p, q in zip(parameters(engine), parameters(resumed)))
    else:
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.0)
    engine.close()
    resumed.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_refused(dtype, comm):
    """A gradient of this rank alone would reach the client's own step."""
    net = frozen(Loss())
    section = {
        "bf16": {"enabled": dtype == torch.bfloat16},
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 2,
    }
    engine, optimizer, _, _ = start(comm, section, net, optimizer=adamw(net, "thawed"))
    run(engine, 0, range(3), dtype)
    before = parameters(engine)
    thaw(net, optimizer, "thawed")
    with pytest.raises(sotto.InvalidStateError, match='"net.0.weight" requires a gradient now'):
        run(engine, 0, [3], dtype)
    frozen(net)
    with pytest.raises(sotto.InvalidStateError, match='"net.0.weight" of group 0 has a gradient'):
        run(engine, 0, [3], dtype)
    engine.zero_grad()
    added = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    added.grad = torch.ones(3)
    optimizer.add_param_group({"params": [added]})
    with pytest.raises(sotto.InvalidStateError, match="of group 1 has a gradient"):
        run(engine, 0, [3], dtype)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(engine)))
    engine.close()


def test_ranks_that_disagree_are_told():
    def body(comm):
        net = frozen(Loss())
        engine, optimizer, _, _ = start(comm, {}, net, optimizer=adamw(net, "thawed"))
        run(engine, comm.rank, [0])
        if comm.rank == 0:
            thaw(net, optimizer, "thawed")
        with pytest.raises(sotto.ProtocolError, match="ranks do not agree"):
            run(engine, comm.rank, [1])
        engine.close()

    thread_ranks(2, body)
