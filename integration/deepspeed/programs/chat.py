"""Four engines, in the shape of DeepSpeed-Chat's third step: actor, reference, critic, reward.

Two train with FusedAdam, or DeepSpeedCPUAdam, and a schedule of the program's; two only evaluate.
Prints both losses of every step as JSON.
"""

import argparse
import json

import deepspeed
import deepspeed.comm as ds_dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

WORDS, LENGTH = 24, 6


class Model(torch.nn.Module):
    def __init__(self, outputs, width=16):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, width)
        self.rnn = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, outputs)
        self.recomputes = False

    def gradient_checkpointing_enable(self):
        self.recomputes = True

    def forward(self, tokens):
        x = self.words(tokens)
        if self.recomputes and x.requires_grad:
            x = torch.utils.checkpoint.checkpoint(lambda y: self.rnn(y)[0], x, use_reentrant=False)
        else:
            x = self.rnn(x)[0]
        return self.head(x)


def get_train_ds_config(args, stage=0):
    device = "cpu" if args.offload else "none"
    return {
        "train_batch_size": 4 * ds_dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "offload_param": {"device": device},
            "offload_optimizer": {"device": device},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "bf16": {"enabled": args.dtype == "bf16"},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1},
        "tensorboard": {"enabled": False, "output_path": "unused/", "job_name": "chat"},
    }


def get_eval_ds_config(args):
    return {
        "train_batch_size": 4 * ds_dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 0, "memory_efficient_linear": False},
        "bf16": {"enabled": args.dtype == "bf16"},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }


def train_engine(args, outputs):
    torch.manual_seed(3 + outputs)
    with deepspeed.zero.Init(enabled=False):
        model = Model(outputs)
    AdamOptimizer = DeepSpeedCPUAdam if args.offload else FusedAdam
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optim = AdamOptimizer(groups, lr=1e-2, betas=(0.9, 0.95))
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda s: min(1.0, (s + 1) / 4))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optim, lr_scheduler=lr_scheduler, config=get_train_ds_config(args)
    )
    return engine


def eval_engine(args, outputs):
    torch.manual_seed(3 + outputs)
    engine, *_ = deepspeed.initialize(model=Model(outputs), config=get_eval_ds_config(args))
    return engine


def log_probs(engine, tokens):
    scores = engine(tokens).float()[:, :-1].log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def get_all_reduce_mean(tensor):
    ds_dist.all_reduce(tensor, op=ds_dist.ReduceOp.SUM)
    return tensor / ds_dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    get_accelerator().set_device(args.local_rank)
    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    ds_dist.barrier()
    actor, reference = train_engine(args, WORDS), eval_engine(args, WORDS)
    critic, reward = train_engine(args, 1), eval_engine(args, 1)
    actor.gradient_checkpointing_enable()
    assert not any(hasattr(p, "ds_status") for p in actor.parameters()), ZeroParamStatus
    generator = torch.Generator().manual_seed(50 + rank)
    for step in range(args.steps):
        tokens = torch.randint(0, WORDS, (4, LENGTH), generator=generator)
        for engine in (actor, critic):
            engine.eval()
        with torch.no_grad():
            old, ref = log_probs(actor, tokens), log_probs(reference, tokens)
            score = reward(tokens).float()[:, -1, 0]
            advantage = score[:, None] - 0.1 * (old - ref) + (tokens[:, 1:] % 2).float()
        actor.train()
        critic.train()
        ratio = (log_probs(actor, tokens) - old).exp()
        actor_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
        actor.backward(actor_loss)
        actor.step()
        value = critic(tokens).float()[:, 1:, 0]
        critic_loss = 0.5 * ((value - advantage) ** 2).mean()
        critic.backward(critic_loss)
        critic.step()
        average = get_all_reduce_mean(advantage.mean()).item()
        if rank == 0:
            row = {"step": step, "actor": actor_loss.item(), "critic": critic_loss.item()}
            print(json.dumps({**row, "reward": average, "lr": actor.get_lr()[0]}), flush=True)
    actor.tput_timer.update_epoch_count()
    params = [p for p in actor.module.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(params, enabled=False):
        pass
    actor.empty_partition_cache()


if __name__ == "__main__":
    main()
