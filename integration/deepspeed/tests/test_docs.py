"""The examples of the documents run as they stand there."""

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import warm

import sotto

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed in this Python", allow_module_level=True)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
MIGRATING = HERE.parent / "MIGRATING.md"
# What the examples presuppose: a model and its batches, the file, one rank.
MODEL = """
import small
import torch
torch.set_num_threads(1)
class Model(small.SmallBert):
    def forward(self, batch):
        return super().forward(*batch)
model = Model()
batches = [small.batch(0, step, 4) for step in range(3)]
"""
GROUP = """
import torch.distributed
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
"""
DEEPSPEED = """
import reference
reference.join_deepspeed()
"""
TRAINER = """
import reference, test_trainer, torch, torch.distributed
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
model, dataset = test_trainer.Model(), test_trainer.dataset()
without_optimizer = dict(test_trainer.FILE, train_micro_batch_size_per_gpu=4)
options = {
    "output_dir": "out", "use_cpu": True, "max_steps": 3, "save_strategy": "no",
    "report_to": [], "per_device_train_batch_size": 4, "max_grad_norm": 1.0,
}
"""
# What stands before and behind each example, in their order. Those of the READMEs run as they
# stand (tests/readme).
EXAMPLES = {
    MIGRATING: [
        (MODEL + GROUP + DEEPSPEED, "\nengine.backward(engine(batches[0]))\nengine.step()"),
        (MODEL, ""),
        (MODEL, ""),
        (TRAINER, ""),
        (MODEL + GROUP, "\nddp(batches[0]).backward()\noptimizer.step()"),
    ],
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "OneBitLamb", "params": {"lr": 0.001, "freeze_step": 2}},
    "gradient_clipping": 1.0,
}


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_all_are_known_here(path):
    assert len(blocks(path)) == len(EXAMPLES[path])


@pytest.mark.parametrize(
    ("path", "index"),
    [
        pytest.param(path, index, id=f"{name_of(path)}-{index}")
        for path, around in EXAMPLES.items()
        for index in range(len(around))
    ],
)
def test_examples_run(path, index, tmp_path):
    example = blocks(path)[index]
    if "import deepspeed" in example and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed in this Python")
    if "transformers.Trainer" in example and not all(
        map(importlib.util.find_spec, ("transformers", "accelerate", "deepspeed"))
    ):
        pytest.skip("transformers, accelerate or DeepSpeed is not installed in this Python")
    for name in ("ds_config.json", "deepspeed.json"):
        (tmp_path / name).write_text(json.dumps(CONFIG))
    before, behind = EXAMPLES[path][index]
    needs_deepspeed = "import deepspeed" in before + example or "reference" in before
    python = warm.python("torch", *(["deepspeed"] if needs_deepspeed else []))
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    run = subprocess.run(
        [python, "-c", before + example + behind],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={**os.environ, **rank},
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_key_of_the_types_is_in_the_tables():
    """The tables of keys are complete: what the library knows about a type is named there."""
    text = MIGRATING.read_text(encoding="utf-8")
    for kind in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb"):
        report = sotto.config_report({"optimizer": {"type": kind}})
        keys = report["optimizer"]["params"]
        assert len(keys) > 4
        for key in keys:
            assert f"`{key}`" in text, (kind, key)
