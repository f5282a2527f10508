"""Fine-tuning of an encoder, in the shape of DeepSpeedExamples' BingBertSquad and bing_bert.

Parameter groups with and without weight decay, warm-up, gradient accumulation, 16 bits, and a
checkpoint from which a second engine goes on. Prints the loss of every update as JSON, and those
behind the checkpoint again.
"""

import argparse
import json

import deepspeed
import torch
import torch.distributed as dist

WORDS, LENGTH = 40, 10


class Model(torch.nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, width)
        self.places = torch.nn.Embedding(LENGTH, width)
        self.layer = torch.nn.TransformerEncoderLayer(width, 2, 48, dropout=0.0, batch_first=True)
        self.LayerNorm = torch.nn.LayerNorm(width)
        self.spans = torch.nn.Linear(width, 2)

    def forward(self, tokens, starts, ends):
        x = self.LayerNorm(self.layer(self.words(tokens) + self.places.weight))
        first, last = self.spans(x).float().unbind(-1)
        loss = torch.nn.functional.cross_entropy
        return (loss(first, starts) + loss(last, ends)) / 2


def batch(rank, step, n):
    """The answer begins behind word 1 and ends at word 2."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(3, WORDS, (n, LENGTH), generator=generator)
    starts = torch.randint(0, LENGTH // 2, (n,), generator=generator)
    ends = starts + torch.randint(1, LENGTH // 2, (n,), generator=generator)
    tokens[torch.arange(n), starts], tokens[torch.arange(n), ends] = 1, 2
    return tokens, starts, ends


def groups_of(model):
    no_decay = ["bias", "LayerNorm.weight"]
    named = list(model.named_parameters())
    with_decay = [p for n, p in named if not any(nd in n for nd in no_decay)]
    without = [p for n, p in named if any(nd in n for nd in no_decay)]
    return [
        {"params": with_decay, "weight_decay": 0.01},
        {"params": without, "weight_decay": 0.0},
    ]


def config_of(args):
    optimizer = {"type": args.optimizer, "params": {"lr": 5e-3, "betas": [0.9, 0.98], "eps": 1e-6}}
    if args.optimizer in ("Adam", "AdamW"):
        optimizer["params"]["torch_adam"] = True
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": optimizer,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 5e-3,
                "warmup_num_steps": 4,
                "total_num_steps": 40,
                "warmup_type": "linear",
            },
        },
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16", "initial_scale_power": 10},
        "zero_optimization": {"stage": 0},
    }


def engine_of(args):
    torch.manual_seed(5)
    model = Model()
    model, optimizer, _, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=groups_of(model),
        dist_init_required=True,
        config=config_of(args),
    )
    return model, optimizer


def train(model, first, updates, again):
    rank, losses = dist.get_rank(), []
    model.train()
    for update in range(first, updates):
        total = 0.0
        for part in range(model.gradient_accumulation_steps()):
            step = update * model.gradient_accumulation_steps() + part
            loss = model(*batch(rank, step, model.train_micro_batch_size_per_gpu()))
            boundary = model.is_gradient_accumulation_boundary()
            assert boundary == (part == model.gradient_accumulation_steps() - 1)
            model.backward(loss)
            model.step()
            total += loss.item() / model.gradient_accumulation_steps()
        losses.append(total)
        if rank == 0:
            row = {"update": update, "loss": total, "lr": model.get_lr()[0], "again": again}
            print(json.dumps(row), flush=True)
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    middle = args.updates // 2
    model, _ = engine_of(args)
    train(model, 0, middle, False)
    state = {"epoch": 1, "last_global_step": model.global_steps, "args": args}
    model.save_checkpoint(args.output_dir, f"epoch1_step{model.global_steps}", state)
    behind = train(model, middle, args.updates, False)

    model, _ = engine_of(args)
    _, state = model.load_checkpoint(args.output_dir)
    assert (state["epoch"], state["last_global_step"]) == (1, model.global_steps), state
    again = train(model, state["last_global_step"], args.updates, True)
    if dist.get_rank() == 0:
        worst = max(abs(a - b) for a, b in zip(behind, again))
        print(json.dumps({"resumed": worst, "samples": model.global_samples}), flush=True)


if __name__ == "__main__":
    main()
