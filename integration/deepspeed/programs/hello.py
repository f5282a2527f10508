"""Masked language modelling, in the shape of DeepSpeedExamples' training/HelloDeepSpeed.

The configuration is a dict; client_state carries the step; the log goes to rank 0. Prints the loss
of every step as JSON. With --load it goes on from what an earlier run has left.
"""

import argparse
import json
import pathlib

import deepspeed
import torch
from deepspeed.utils import RepeatingLoader, log_dist, logger

WORDS, LENGTH = 32, 8


class Model(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, width)
        self.body = torch.nn.Sequential(torch.nn.Linear(LENGTH * width, 64), torch.nn.ReLU())
        self.head = torch.nn.Linear(64, WORDS)

    def forward(self, tokens, targets):
        scores = self.head(self.body(self.words(tokens).flatten(1)))
        return torch.nn.functional.cross_entropy(scores.float(), targets)


def dataset(n=256):
    generator = torch.Generator().manual_seed(11)
    start = torch.randint(0, WORDS - 1, (n, 1), generator=generator)
    tokens = 1 + (start + torch.arange(LENGTH)) % (WORDS - 1)
    targets = tokens[:, 3].clone()
    tokens[:, 3] = 0
    return torch.utils.data.TensorDataset(tokens, targets)


def is_rank_0():
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--checkpoint_every", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(2)
    exp_dir = pathlib.Path(args.dir)
    ds_config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 5e-3, "torch_adam": True}},
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 0},
    }
    model = Model()
    model, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=dataset(),
        config=ds_config,
    )
    log_dist(f"Starting training with {model.train_batch_size()} samples", ranks=[0])
    start_step = 1
    if args.load:
        _, client_state = model.load_checkpoint(load_dir=exp_dir)
        start_step = client_state["checkpoint_step"] + 1
        logger.info("Resumed from step %d", start_step)
    model.train()
    batches = RepeatingLoader(loader)
    for _ in range(1, start_step):
        next(batches)
    for step in range(start_step, start_step + args.steps):
        loss = model(*next(batches))
        model.backward(loss)
        model.step()
        if is_rank_0():
            print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
        if step % args.checkpoint_every == 0:
            model.save_checkpoint(save_dir=exp_dir, client_state={"checkpoint_step": step})
            log_dist(f"Saved model to {exp_dir}", ranks=[0])


if __name__ == "__main__":
    main()
