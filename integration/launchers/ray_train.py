"""1-bit Adam on the workers of Ray Train, each of which is a rank: a job that outlives a node.

    python3 ray_train.py --storage /shared/results [--name NAME] [--workers N] [--config FILE] [--steps N] [--every N]

Needs ray[train], torch and sotto on all machines. RAY_ADDRESS names the cluster; without it Ray starts one here. Storage is a
folder or bucket that all machines reach. When a node is lost, the other ranks get Sotto's error, which names its rank; Ray starts
all workers anew as soon as the cluster has room for them, and they resume from the last checkpoint, bit for bit.
"""

import argparse
import os
import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import sotto
import sotto.deepspeed

CONFIG = Path(__file__).resolve().parents[1] / "configs/onebit_adam.json"
INPUTS, HIDDEN = 32, 64
TIMEOUT_S = 60  # of the set-up, and of every operation
SILENCE_LIMIT_MS = "20000"  # for nodes that vanish without closing their connections


class Model(torch.nn.Module):
    """Two layers that return their loss."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(INPUTS, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 1))

    def forward(self, x, y):
        return (self.layers(x) - y).square().mean()

    def groups(self):
        """Weights, and what has no weight decay: the two groups of the configurations."""
        tensors = list(self.named_parameters())
        return [{"params": [p for name, p in tensors if name.endswith(kind)]} for kind in ("weight", "bias")]


def batch(step, rank, samples):
    """Samples of one step and rank: the same ones when the step is repeated."""
    x = torch.randn(samples, INPUTS, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x[:, :4].sum(1, keepdim=True)


def engine_of(model, config, comm):
    """The engine of one rank: averages gradients in step(), as the configuration says."""
    return sotto.deepspeed.initialize(model=model, model_parameters=model.groups(), config=config, comm=comm)[0]


def steps(engine, last):
    """Trains up to step number `last`: (steps done, loss of this rank's samples) after each."""
    for step in range(engine.global_steps, last):
        loss = engine(*batch(step, engine.global_rank, engine.train_micro_batch_size_per_gpu()))
        engine.backward(loss)
        engine.step()
        yield step + 1, loss.item()


def train(job):
    """What every worker runs. The ranks are those of the process group that TorchTrainer has made."""
    torch.manual_seed(0)
    with sotto.init_process_group(timeout=TIMEOUT_S) as comm:
        engine = engine_of(Model(), job["config"], comm)
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                engine.load_checkpoint(folder)
        first = engine.global_steps
        for done, loss in steps(engine, job["steps"]):
            if done % job["every"] == 0 or done == job["steps"]:
                with tempfile.TemporaryDirectory() as folder:
                    engine.save_checkpoint(folder)  # of each rank its own state, which Ray puts into one folder
                    metrics = {"step": done, "first_step": first, "loss": loss}
                    ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
        engine.close()


def configuration(path):
    """The file's, with a checkpoint of every rank, from which a run goes on bit for bit, unless it wants another kind."""
    config = sotto.config_resolve(Path(path))
    return {**config, "sotto": {"checkpoint": "exact", **config.get("sotto", {})}}


def trainer(options, loop=train):
    """The job that options describe."""
    variables = {"SOTTO_SILENCE_LIMIT_MS": os.environ.get("SOTTO_SILENCE_LIMIT_MS", SILENCE_LIMIT_MS)}
    return TorchTrainer(
        loop,
        train_loop_config={"config": configuration(options.config), "steps": options.steps, "every": options.every},
        scaling_config=ScalingConfig(num_workers=options.workers, placement_strategy="SPREAD"),
        run_config=RunConfig(name=options.name, storage_path=options.storage, failure_config=FailureConfig(max_failures=3),
                             checkpoint_config=CheckpointConfig(num_to_keep=2), worker_runtime_env={"env_vars": variables}))


def parse(words=None):
    """The command line. Errors: SystemExit."""
    def number(text):
        if not text.isdecimal() or not 1 <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {2**31 - 1}")
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="where checkpoints go: a folder or URI that all machines reach")
    parser.add_argument("--name", default="sotto", help="of the job; one that has checkpoints there is resumed")
    parser.add_argument("--workers", type=number, default=2, help="ranks, of one CPU each")
    parser.add_argument("--config", default=CONFIG, help="a DeepSpeed configuration")
    parser.add_argument("--steps", type=number, default=1000)
    parser.add_argument("--every", type=number, default=100, help="steps between checkpoints")
    return parser.parse_args(words)


def main(words=None, loop=train):
    result = trainer(parse(words), loop).fit()
    print("{step} steps, from {first_step}, loss {loss:.4f}".format(**result.metrics), f"in {result.checkpoint.path}", flush=True)
    return result


if __name__ == "__main__":
    main()
