"""optimizer_from_config below Hugging Face's Trainer, whose engine is DeepSpeed's own."""

import importlib.util
import os

import pytest
from ranks import run_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")
if not importlib.util.find_spec("deepspeed"):
    pytest.skip("DeepSpeed is not installed in this Python", allow_module_level=True)
for needed in ("transformers", "accelerate"):
    if not importlib.util.find_spec(needed):
        pytest.skip(f"{needed} is not installed in this Python", allow_module_level=True)

STEPS, BATCH = 24, 8
FILE = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
}
OPTIMIZER = {"type": "OneBitAdam", "params": {"lr": "auto", "betas": "auto", "freeze_step": 16}}


class Model(torch.nn.Module):
    """What Trainer needs of a model: keyword arguments, and a loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
        )

    def forward(self, x, labels):
        scores = self.net(x)
        return {"loss": torch.nn.functional.mse_loss(scores, labels), "logits": scores}


def dataset():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2 * STEPS * BATCH, 8, generator=generator)
    return [{"x": row, "labels": row[:2]} for row in x]


def rank_trains():
    import tempfile

    rank, size = os.environ["SOTTO_RANK"], os.environ["SOTTO_WORLD_SIZE"]
    port = os.environ["PORT_OF_THE_TEST"]
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        DS_ACCELERATOR="cpu",
        HF_HUB_OFFLINE="1",
    )
    import deepspeed
    import transformers

    import sotto
    import sotto.deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_grad_norm=0.5,
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
            deepspeed=dict(FILE),
        )

        class Trainer(transformers.Trainer):
            def create_optimizer(self, *_):
                self.optimizer = sotto.deepspeed.optimizer_from_config(
                    self.model, {**FILE, "optimizer": OPTIMIZER}, auto=self.args
                )
                made.append(self.optimizer)
                return self.optimizer

        net, made = Model(), []
        trainer = Trainer(net, arguments, train_dataset=dataset())
        trainer.train()
    optimizer = made[-1]  # Trainer asks for it more than once
    info = optimizer.info()
    assert (info.step, info.stage) == (STEPS, 1), info
    engine = trainer.model_wrapped
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert engine.basic_optimizer is optimizer
    assert engine.enable_backward_allreduce is False
    assert optimizer.report("config")["gradient_clipping"] == 0.5
    mine = torch.cat([p.detach().flatten() for p in net.parameters()])
    everybody = [torch.empty_like(mine) for _ in range(int(size))]
    torch.distributed.all_gather(everybody, mine)
    assert all(torch.equal(mine, other) for other in everybody)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4]), losses
    optimizer.close()
    sotto.default_comm().close()
    print("trained", losses[0], losses[-1])


def test_trainer(monkeypatch):
    from program_runner import reserved_port

    with reserved_port() as port:
        monkeypatch.setenv("PORT_OF_THE_TEST", str(port))
        out = run_ranks(2, __file__, "rank_trains", timeout=300, imports=("deepspeed",))
    assert out.count("trained") == 2, out
