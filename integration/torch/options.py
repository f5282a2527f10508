"""The command line of train_bert.py."""

from __future__ import annotations

import argparse

from variants import VARIANTS


def _number(low: int, high: int):
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f'"{text}" is not an integer from {low} to {high}')
        return int(text)

    return parse


COUNT = _number(1, 1 << 40)
# name, type, default, what it is
NUMBERS = (
    ("--steps", COUNT, 3600, "optimizer steps"),
    ("--seed", _number(0, (1 << 63) - 1), 1, "of the parameters and batches"),
    ("--width", _number(1, 65536), 64, "of the model"),
    ("--layers", _number(1, 1024), 3, "encoder layers"),
    ("--heads", _number(1, 1024), 4, "attention heads"),
    ("--mlp", _number(1, 1 << 20), 256, "width inside the MLP"),
    ("--positions", _number(2, 4096), 64, "tokens per sequence"),
    ("--masked", _number(1, 4095), 10, "of them masked"),
    ("--eval-every", COUNT, 40, "steps between evaluations"),
    ("--eval-sequences", _number(1, 1 << 24), 1024, "held-out sequences in an evaluation"),
    ("--powersgd-rank", _number(1, 4096), 4, "of PowerSGD's matrices"),
    ("--powersgd-start", _number(2, 1 << 40), 10, "steps before PowerSGD compresses"),
)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Ends the program with a message when something is wrong, or after --help."""
    parser = argparse.ArgumentParser(
        prog="train_bert.py",
        description="Trains the masked language model of integration/c_trainer in PyTorch: same "
        "text, tokens, masks, batches and start. Started by torchrun, sotto-run, mpirun or srun.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--deepspeed_config", metavar="FILE", required=True, help="DeepSpeed JSON configuration")
    add("--variant", choices=VARIANTS, default="sotto", help="how gradients become updates")
    add("--data", metavar="PATH", nargs="+", default=[], help="text files, or directories whose "
        ".py files are taken; at least 2 MB; none: this machine's Python library")  # fmt: skip
    for name, kind, default, what in NUMBERS:
        add(name, metavar="N", type=kind, default=default, help=what)
    add("--log-file", metavar="FILE", help="JSON lines, one per step")
    add("--summary", metavar="FILE", help="JSON with the figures of the whole run")
    add("--save", metavar="DIR", help="write checkpoints here, the last at the end")
    add("--save-every", metavar="N", type=COUNT, help="steps between checkpoints")
    add("--resume", metavar="DIR", help="continue from the last complete checkpoint there")
    add("--name", default="run", help="of the run, in its outputs")
    add("--progress", choices=("auto", "bar", "plain", "off"), default="auto",
        help="bar: by tqdm; plain: a line every 10 s; auto: a bar on a terminal")  # fmt: skip
    add("--interface", metavar="NAME", help="count what this network interface sends in steps; it "
        "has to be this rank's alone")  # fmt: skip
    options = parser.parse_args(words)
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    if options.masked > options.positions:
        parser.error(f"--masked {options.masked} is more than --positions {options.positions}")
    if options.save_every and not options.save:
        parser.error("--save-every needs --save DIR")
    return options
