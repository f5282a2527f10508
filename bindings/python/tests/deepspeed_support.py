"""A model and its batches for tests of sotto.deepspeed."""

import copy

import torch

import sotto.deepspeed as sd

torch.set_num_threads(1)
torch.manual_seed(3)
START = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))
LAMB = {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 4}}


def model():
    return copy.deepcopy(START)  # ranks are threads: they share torch's random numbers


class Loss(torch.nn.Module):
    """A model that returns its loss, as those of DeepSpeed's examples do."""

    def __init__(self):
        super().__init__()
        self.net = model()

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.net(x).float(), y.float())


def batch(rank, step, n=16):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(n, 20, generator=generator)
    return x, x[:, :5].clone()


def run(engine, rank, steps, dtype=torch.float32):
    losses = []
    for step in steps:
        x, y = batch(rank, step)
        loss = engine(x.to(dtype), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def start(comm, config, net=None, **options):
    return sd.initialize(model=net or Loss(), config=config, comm=comm, **options)


def parameters(engine):
    return [p.detach().clone() for p in engine.module.parameters()]
