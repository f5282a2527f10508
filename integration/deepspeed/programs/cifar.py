"""A classifier of pictures, in the shape of DeepSpeedExamples' training/cifar.

deepspeed.initialize() makes the loader of the training data, the optimizer and the schedule of the
configuration. Prints the mean loss of every epoch, and the accuracy at the end, as JSON.
"""

import argparse
import json
import os

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator


def add_argument():
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("-e", "--epochs", default=3, type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--dtype", default="fp32", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--stage", default=0, type=int, choices=[0, 1, 2, 3])
    parser.add_argument("--moe", action="store_true")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(6 * 6 * 6, 24)
        self.fc2 = nn.Linear(24, 4)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = x.view(-1, 6 * 6 * 6)
        return self.fc2(F.relu(self.fc1(x)))


def pictures(n, seed):
    """16 by 16 pixels with a bright quarter, which is the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (n,), generator=generator)
    images = 0.3 * torch.randn(n, 3, 16, 16, generator=generator)
    for image, label in zip(images, labels.tolist()):
        row, column = 8 * (label // 2), 8 * (label % 2)
        image[:, row : row + 8, column : column + 8] += 0.5
    return torch.utils.data.TensorDataset(images, labels)


def get_ds_config(args):
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {
                "lr": 0.01,
                "betas": [0.8, 0.999],
                "eps": 1e-8,
                "weight_decay": 3e-7,
                "torch_adam": True,
            },
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 8},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {
            "enabled": args.dtype == "fp16",
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 12,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }


def test(model_engine, testset, local_device, target_dtype):
    correct = 0
    model_engine.eval()
    with torch.no_grad():
        for images, labels in torch.utils.data.DataLoader(testset, batch_size=16):
            if target_dtype is not None:
                images = images.to(target_dtype)
            outputs = model_engine(images.to(local_device))
            correct += (outputs.argmax(1) == labels.to(local_device)).sum().item()
    return correct / len(testset)


def main(args):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    deepspeed.init_distributed()
    _local_rank = int(os.environ.get("LOCAL_RANK"))
    get_accelerator().set_device(_local_rank)
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()  # rank 0 downloads
    trainset, testset = pictures(192, 3), pictures(64, 4)
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()

    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, optimizer, trainloader, __ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=parameters,
        training_data=trainset,
        config=get_ds_config(args),
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)
    local_rank = model_engine.local_rank
    target_dtype = None
    if model_engine.bfloat16_enabled():
        target_dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        target_dtype = torch.half

    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        running_loss = 0.0
        for data in trainloader:
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            outputs = model_engine(inputs)
            loss = criterion(outputs, labels)
            model_engine.backward(loss)
            model_engine.step()
            running_loss += loss.item()
        if local_rank == 0:
            print(json.dumps({"epoch": epoch, "loss": running_loss / len(trainloader)}), flush=True)
    accuracy = test(model_engine, testset, local_device, target_dtype)
    if local_rank == 0:
        print(json.dumps({"accuracy": accuracy, "lr": model_engine.get_lr()[0]}), flush=True)


if __name__ == "__main__":
    main(add_argument())
