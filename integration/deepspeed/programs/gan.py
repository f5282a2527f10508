"""Two networks against each other, in the shape of DeepSpeedExamples' training/gan.

Each has an engine and an optimizer of its own; the discriminator has two backward passes per step.
Prints both losses of every step as JSON.
"""

import argparse
import json

import deepspeed
import torch
import torch.nn as nn

WIDTH, NOISE = 16, 8


def get_argument_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--beta1", type=float, default=0.5)
    parser.add_argument("--optimizer", default="Adam", help="a class of torch.optim")
    parser.add_argument("--through", default="engine", choices=["engine", "module"])
    parser.add_argument("--local_rank", type=int, default=-1)
    return parser


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, WIDTH), nn.Tanh())

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid()
        )

    def forward(self, x):
        return self.main(x).view(-1)


def optimizer_of(args, net):
    kind = getattr(torch.optim, args.optimizer)
    if args.optimizer == "SGD":
        return kind(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    return kind(net.parameters(), lr=args.lr, betas=(args.beta1, 0.999))


def train(args):
    torch.set_num_threads(1)
    torch.manual_seed(7)
    deepspeed.init_distributed()
    netG, netD = Generator(), Discriminator()
    criterion = nn.BCELoss()
    optimizerD, optimizerG = optimizer_of(args, netD), optimizer_of(args, netG)
    model_engineD, optimizerD, _, _ = deepspeed.initialize(
        args=args, model=netD, model_parameters=netD.parameters(), optimizer=optimizerD
    )
    model_engineG, optimizerG, _, _ = deepspeed.initialize(
        args=args, model=netG, model_parameters=netG.parameters(), optimizer=optimizerG
    )
    batch_size = model_engineD.train_micro_batch_size_per_gpu()
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(args.steps):
        real = torch.sin(torch.rand(batch_size, 1, generator=generator) * 6 + torch.arange(WIDTH))
        ones, zeros = torch.ones(batch_size), torch.zeros(batch_size)
        # The discriminator: real ones, then made ones.
        netD.zero_grad()
        errD_real = criterion(model_engineD(real), ones)
        model_engineD.backward(errD_real)
        fake = model_engineG(torch.randn(batch_size, NOISE, generator=generator))
        errD_fake = criterion(model_engineD(fake.detach()), zeros)
        model_engineD.backward(errD_fake)
        model_engineD.step()
        # The generator, through the discriminator.
        netG.zero_grad()
        judge = model_engineD if args.through == "engine" else netD
        errG = criterion(judge(fake), ones)
        model_engineG.backward(errG)
        model_engineG.step()
        if rank == 0:
            row = {"step": step, "D": (errD_real + errD_fake).item(), "G": errG.item()}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = deepspeed.add_config_arguments(get_argument_parser())
    train(parser.parse_args())
