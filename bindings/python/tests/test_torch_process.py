"""Optimizers for PyTorch and engines: leaks, references, pickles."""

import copy
import gc
import pickle
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from deepspeed_support import LAMB, Loss, batch, model, run, start  # noqa: E402
from ranks import assert_no_leak  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


def cycle(n, comm):
    net = Loss()
    for _ in range(n):
        optimizer = st.OnebitAdam(net.parameters(), lr=0.01, freeze_step=2, comm=comm)
        for step in range(3):
            net.zero_grad()
            net(*batch(0, step, 4)).backward()
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.close()
        engine, *_ = start(comm, {"optimizer": LAMB}, net, initial_parameters="trust")
        run(engine, 0, [1])
        engine.close()


def test_1000_cycles_leave_nothing_behind(comm):
    cycle(200, comm)
    assert_no_leak(lambda: cycle(1000, comm), allowed_kb=2048)


def test_without_a_process_group_nobody_else_is_looked_for(comm, monkeypatch):
    """A walk over all objects of the process takes a tenth of a second."""

    def walk():
        raise AssertionError("all objects were walked over")

    monkeypatch.setattr(gc, "get_objects", walk)
    optimizer = st.AdamW(model().parameters(), comm=comm)
    assert optimizer.info().step == 0
    optimizer.close()


def test_workers_of_a_data_loader_are_forked_beside_it(comm):
    data = torch.utils.data.TensorDataset(*batch(0, 0, 16))
    config = {"train_batch_size": 4, "optimizer": LAMB}
    engine, _, loader, _ = start(comm, config, training_data=data)
    loader = engine.deepspeed_io(data, num_local_io_workers=2)
    for _ in range(2):
        for x, y in loader:
            engine.backward(engine(x, y))
            engine.step()
    assert engine.global_steps == 8
    engine.close()


def test_parameters_keep_no_optimizer_alive(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), comm=comm)
    seen = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert seen() is None
    net(torch.zeros(2, 20)).sum().backward()  # no optimizer is left to look at gradients
    copied = copy.deepcopy(net)
    assert torch.equal(copied[0].weight, net[0].weight)


def test_engines_cannot_be_pickled(comm):
    engine, *_ = start(comm, {"optimizer": LAMB})
    for way in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            way(engine)
    for module in (pickle.loads(pickle.dumps(engine.module)), copy.deepcopy(engine.module)):
        x, y = torch.ones(2, 20), torch.zeros(2, 5)
        assert torch.equal(module(x, y), engine.module(x, y))
    engine.close()
