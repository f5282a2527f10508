"""Training programs on two ranks, as users of Trainer, Accelerate, Lightning and Fabric write them.

    torchrun --nproc-per-node 2 framework_programs.py FRAMEWORK WHAT DIRECTORY KIND...

WHAT: "whole": all steps, with a checkpoint behind the first half; "resumed": the rest from that;
"killed": see restarts(). For every kind of optimizer a rank writes the losses of its steps and, at
the end, its parameters to DIRECTORY/KIND/WHAT.rankN.pt.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import sotto
import sotto.torch as st

STEPS, HALF, BATCH = 12, 6, 4
torch.set_num_threads(1)
OPTIONS = {
    "AdamW": {"lr": 0.02, "weight_decay": 0.01},
    "OnebitAdam": {"lr": 0.005, "freeze_step": 4},
    "ZeroOneAdam": {"lr": 0.002, "var_freeze_step": 4, "local_step_scaler": 2},
    "Outer": {"preset": "co2", "period": 3},
}


def optimizer_for(model, kind, **more):
    if kind == "Outer":
        # Without momentum: the inner state is all that is each rank's own at a boundary.
        inner = torch.optim.SGD(model.named_parameters(), lr=0.05)
        return st.Outer(inner, **OPTIONS[kind])
    return getattr(st, kind)(model.named_parameters(), **{**OPTIONS[kind], **more})


class Net(torch.nn.Module):
    """Returns a loss and outputs, as the models of transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
        )

    def forward(self, x, labels):
        out = self.layers(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


class Data(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(STEPS * BATCH * 2, 8, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.x[i, :3]}


def loader():
    return torch.utils.data.DataLoader(Data(), batch_size=BATCH, shuffle=False)


class Record:
    """What a rank has seen."""

    def __init__(self, directory, what):
        self.directory, self.what = Path(directory), what
        self.losses = []

    def write(self, model, rank, caught):
        torch.save(
            {
                "losses": self.losses,
                "params": [p.detach().clone() for p in model.parameters()],
                "warnings": [str(w.message) for w in caught if "error feedback" in str(w.message)],
            },
            self.directory / f"{self.what}.rank{rank}.pt",
        )


def scheduler_for(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, STEPS)


# ---- Hugging Face Trainer ----------------------------------------------------------------------


def trainer(what, directory, kind, record):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Recorded(Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            record.losses.append(loss.item())
            return loss

    class AverageInStep(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
            if state.global_step in (0, HALF):
                st.no_sync_after_warmup(trained.model_wrapped, optimizer)

    model = Net()
    optimizer = optimizer_for(model, kind)
    arguments = TrainingArguments(
        output_dir=str(directory / "trainer"),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        save_steps=HALF,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1000,
        max_grad_norm=0.0,
        seed=3,
        save_only_model=False,
    )
    trained = Recorded(
        model=model,
        args=arguments,
        train_dataset=Data(),
        optimizers=(optimizer, scheduler_for(optimizer)),
        callbacks=[AverageInStep()],
    )
    checkpoint = str(directory / "trainer" / f"checkpoint-{HALF}")
    trained.train(resume_from_checkpoint=checkpoint if what == "resumed" else None)
    return model


# ---- Accelerate --------------------------------------------------------------------------------


def accelerate(what, directory, kind, record):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = optimizer_for(model, kind)
    wrapped, prepared, data, schedule = accelerator.prepare(
        model, optimizer, loader(), scheduler_for(optimizer)
    )
    st.no_sync_after_warmup(wrapped, prepared)
    if what == "resumed":
        accelerator.load_state(str(directory / "accelerate"))
    for step, batch in enumerate(data):
        if what == "resumed" and step < HALF:
            continue
        if what == "whole" and step == HALF:
            accelerator.save_state(str(directory / "accelerate"))
        with accelerator.accumulate(wrapped):
            loss = wrapped(**batch)["loss"]
            accelerator.backward(loss)
            prepared.step()
            schedule.step()
            prepared.zero_grad()
        record.losses.append(loss.item())
    return model


# ---- Lightning and Fabric ----------------------------------------------------------------------


def lightning(what, directory, kind, record):
    import lightning

    batches = list(loader())

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def on_train_start(self):
            st.no_sync_after_warmup(self.trainer.strategy.model, self.optimizers())

        def training_step(self, _, __):
            # Where a loader was is not part of Lightning's checkpoints.
            batch = batches[2 * self.global_step + self.global_rank]
            loss = self.net(**batch)["loss"]
            record.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            optimizer = optimizer_for(self, kind)
            schedule = {"scheduler": scheduler_for(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    module = Module()
    path = directory / "lightning" / f"step={HALF}.ckpt"
    saves = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=directory / "lightning",
        filename="{step}",
        every_n_epochs=1,
        save_on_train_epoch_end=True,
        save_top_k=-1,
    )
    run = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        limit_train_batches=HALF,
        logger=False,
        callbacks=[saves],
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    run.fit(module, loader(), ckpt_path=str(path) if what == "resumed" else None)
    return module.net


def fabric(what, directory, kind, record):
    from lightning.fabric import Fabric

    run = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    run.launch()
    model = Net()
    optimizer = optimizer_for(model, kind)
    schedule = scheduler_for(optimizer)
    wrapped, prepared = run.setup(model, optimizer)
    data = run.setup_dataloaders(loader())
    st.no_sync_after_warmup(wrapped, prepared)
    state = {"model": wrapped, "optimizer": prepared, "scheduler": schedule}
    path = directory / "fabric.ckpt"
    if what == "resumed":
        run.load(path, state)
    for step, batch in enumerate(data):
        if what == "resumed" and step < HALF:
            continue
        if what == "whole" and step == HALF:
            run.save(path, state)
        loss = wrapped(**batch)["loss"]
        run.backward(loss)
        prepared.step()
        schedule.step()
        prepared.zero_grad()
        record.losses.append(loss.item())
    return model


# ---- torchrun's restarts -----------------------------------------------------------------------


def restarts(what, directory, kind, record):
    """A loop of one's own. "killed": rank 1 ends itself once, and torchrun starts both again."""
    # Without gloo, whose set-up behind a restart fails or hangs now and then.
    comm = sotto.group.meet(None, timeout=200)
    rank = comm.rank
    model = Net()
    optimizer = optimizer_for(model, kind)
    schedule = scheduler_for(optimizer)
    path = directory / f"{what}.loop.rank{rank}.pt"
    start = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        optimizer.load_state_dict(saved["optimizer"])  # with the parameters
        schedule.load_state_dict(saved["schedule"])
        start, record.losses = saved["step"], saved["losses"]
    batches = list(loader())
    for step in range(start, STEPS):
        if what == "killed" and step == HALF + 1 and rank == 1 and start == 0:
            os._exit(9)
        batch = batches[2 * step + rank]
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        schedule.step()
        record.losses.append(loss.item())
        if step + 1 == HALF:
            torch.save(
                {
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "step": step + 1,
                    "losses": record.losses,
                },
                path.with_suffix(".part"),
            )
            os.replace(path.with_suffix(".part"), path)
            comm.barrier().wait()
    (directory / f"{what}.restarted.rank{rank}").write_text(json.dumps(start))
    return model


def main(framework, what, directory, *kinds):
    for kind in kinds:
        folder = Path(directory) / kind
        folder.mkdir(exist_ok=True)
        record = Record(folder, what)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = globals()[framework](what, folder, kind, record)
        record.write(model, int(os.environ["RANK"]), caught)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
