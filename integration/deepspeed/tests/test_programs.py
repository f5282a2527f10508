"""DeepSpeed's programs run with one changed line; where DeepSpeed runs them too, losses are equal.

Losses are compared with a tolerance relative to 1 or to the loss, whichever is larger: 2e-5 for
float32, where sums of gradients are taken in another order, 2e-3 for bfloat16.
"""

import importlib.util
import json

import pytest
from ranks import sotto_run

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed in this Python", allow_module_level=True)

import subprocess
import sys

import program_runner as runner

FLOAT32, BFLOAT16 = 2e-5, 2e-3
GAN = {"train_batch_size": 16, "gradient_clipping": 0.5}


def numbers(rows):
    return [(key, value) for row in rows for key, value in row.items()]


def compare(mine, theirs, tolerance):
    mine, theirs = numbers(mine), numbers(theirs)
    assert [key for key, _ in mine] == [key for key, _ in theirs]
    for (key, a), (_, b) in zip(mine, theirs):
        assert abs(a - b) <= tolerance * max(1, abs(b)), (key, a, b)


def deepspeeds(program, *arguments):
    """What DeepSpeed prints, or the test ends as skipped."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("the changed program has run; DeepSpeed is not installed in this Python")
    return runner.with_deepspeed(program, *arguments)


def learns(rows, key="loss", less=0.8):
    values = [row[key] for row in rows if key in row]
    assert values[-1] < less * values[0], values


@pytest.fixture
def gan_file(tmp_path):
    path = tmp_path / "gan.json"
    path.write_text(json.dumps(GAN))
    return path


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", FLOAT32), ("bf16", BFLOAT16)])
def test_cifar(dtype, tolerance, tmp_path):
    mine = runner.run(
        [runner.changed("cifar.py", tmp_path, runner.INSTALLED), "--dtype", dtype, "-e", 2]
    )
    learns(mine)
    assert mine[-1]["accuracy"] == 1
    compare(mine, deepspeeds("cifar.py", "--dtype", dtype, "-e", 2), tolerance)


def test_cifar_in_float16(tmp_path):
    """DeepSpeed's engine has no float16 on the CPU."""
    path = runner.by_path("cifar.py", tmp_path)
    mine = runner.run([path, "--dtype", "fp16", "-e", 2])
    learns(mine)
    assert mine[-1]["accuracy"] == 1


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_gan(optimizer, gan_file, tmp_path):
    """DeepSpeed 0.18.9 refuses the backward pass of one engine through another one's forward.

    So the engines are compared with the discriminator's module in that place.
    """
    path = runner.changed("gan.py", tmp_path, runner.IMPORTED)
    options = ["--deepspeed_config", gan_file, "--optimizer", optimizer]
    mine = runner.run([path, *options])
    assert mine == runner.run([path, *options, "--through", "module"])
    compare(mine, deepspeeds("gan.py", *options, "--through", "module"), FLOAT32)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", FLOAT32), ("bf16", BFLOAT16)])
def test_fine_tuning_of_bert(dtype, tolerance, tmp_path):
    options = ["--dtype", dtype, "--output_dir"]
    path = runner.changed("bert.py", tmp_path, runner.IMPORTED)
    mine = runner.run([path, *options, tmp_path / "mine"])
    learns(mine)
    assert mine[-1] == {"resumed": 0.0, "samples": 12 * 32}
    compare(mine, deepspeeds("bert.py", *options, tmp_path / "theirs"), tolerance)


@pytest.mark.parametrize("optimizer", ["OneBitAdam", "Lamb", "RMSprop"])
def test_fine_tuning_with_other_optimizers_in_float16(optimizer, tmp_path):
    """Of the library, compressed and not, and of PyTorch behind the average; resumed exactly."""
    options = ["--optimizer", optimizer, "--dtype", "fp16", "--output_dir", tmp_path / "out"]
    path = runner.changed("bert.py", tmp_path, runner.IMPORTED)
    if optimizer == "RMSprop":
        text = path.read_text().replace('"betas": [0.9, 0.98], "eps"', '"alpha": 0.98, "eps"')
        path.write_text(text)
    mine = runner.run([path, *options])
    assert mine[-1] == {"resumed": 0.0, "samples": 12 * 32}
    learns(mine, less=0.95)  # LAMB's rate would be another


def test_hello_deepspeed(tmp_path):
    path = runner.changed("hello.py", tmp_path, runner.INSTALLED)
    mine = runner.run([path, "--dir", tmp_path / "mine"])
    learns(mine)
    more = runner.run([path, "--dir", tmp_path / "mine", "--load", "--steps", 4])
    assert [row["step"] for row in more] == [13, 14, 15, 16]
    compare(mine, deepspeeds("hello.py", "--dir", tmp_path / "theirs"), FLOAT32)
    compare(
        more,
        runner.with_deepspeed("hello.py", "--dir", tmp_path / "theirs", "--load", "--steps", 4),
        FLOAT32,
    )
    # And what DeepSpeed has left is gone on from here.
    taken = runner.run([path, "--dir", tmp_path / "theirs", "--load", "--steps", 4])
    assert [row["step"] for row in taken] == [13, 14, 15, 16]
    compare(taken, more, FLOAT32)


@pytest.mark.parametrize(("dtype", "offload"), [("fp32", False), ("bf16", True)])
def test_engines_of_a_chat_trainer(dtype, offload, tmp_path):
    """DeepSpeed's own FusedAdam is compiled when it is made, so only the changed program runs."""
    options = ["--dtype", dtype, *(["--offload"] if offload else [])]
    by_line = runner.run([runner.changed("chat.py", tmp_path, runner.INSTALLED), *options])
    by_path = runner.run([runner.by_path("chat.py", tmp_path), *options])
    assert by_line == by_path
    learns(by_line, "critic")
    assert by_line[-1]["lr"] == 0.01


def test_programs_under_sotto_run(tmp_path):
    """No MASTER_ADDR, no RANK: the program finds both behind init_distributed()."""
    path = runner.changed("hello.py", tmp_path, runner.INSTALLED)
    command = [sotto_run(), "-n", "2", "--timeout", "200", "--", sys.executable, str(path)]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path / "out"), "--steps", "4"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [line for line in done.stdout.splitlines() if '"loss"' in line]
    assert len(losses) == 4, done.stdout
