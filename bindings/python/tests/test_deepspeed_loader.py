"""The loader of the engine's training_data, as programs of DeepSpeed's use it."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from deepspeed_support import LAMB, start  # noqa: E402

import sotto  # noqa: E402


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(6.0))


def test_the_sampler_has_deepspeeds_name(comm):
    config = {"train_batch_size": 4, "optimizer": LAMB}
    data = torch.utils.data.TensorDataset(torch.arange(12.0))
    engine, _, loader, _ = start(comm, config, training_data=data)
    orders = []
    for epoch in range(2):
        loader.data_sampler.set_epoch(epoch)
        orders.append([value for (x,) in loader for value in x.tolist()])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
    assert loader.num_local_io_workers == 0
    stream = engine.deepspeed_io(Stream())
    assert stream.data_sampler is None
    assert [x.tolist() for x in stream] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]
    engine.close()


def test_processes_that_read(comm):
    config = {"train_batch_size": 4, "optimizer": LAMB}
    data = torch.utils.data.TensorDataset(torch.arange(12.0))
    engine, *_ = start(comm, config)
    loader = engine.deepspeed_io(data, route="eval", num_local_io_workers=2)
    assert loader.num_local_io_workers == 2
    assert [x.tolist() for (x,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    engine.close()
