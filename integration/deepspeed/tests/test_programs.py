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


def deepspeeds(*commands):
    """What DeepSpeed prints, or the test ends as skipped."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("the changed program has run; DeepSpeed is not installed in this Python")
    return runner.with_deepspeed(*commands)


def learns(rows, key="loss", less=0.8):
    values = [row[key] for row in rows if key in row]
    assert values[-1] < less * values[0], values


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


# Programs that need nothing of each other run in one start: PyTorch takes seconds to import.
DTYPES = {"fp32": FLOAT32, "bf16": BFLOAT16}


@pytest.fixture(scope="module")
def cifar(folder):
    """What the changed program prints, by dtype."""
    path = runner.changed("cifar.py", folder, runner.INSTALLED)
    (folder / "by_path").mkdir()
    half = runner.by_path("cifar.py", folder / "by_path")
    commands = [[path, "--dtype", dtype, "-e", 2] for dtype in DTYPES]
    rows = runner.run(*commands, [half, "--dtype", "fp16", "-e", 2])
    return dict(zip([*DTYPES, "fp16"], rows))


@pytest.fixture(scope="module")
def deepspeeds_cifar():
    rows = deepspeeds(*(["cifar.py", "--dtype", dtype, "-e", 2] for dtype in DTYPES))
    return dict(zip(DTYPES, rows))


# The last has no counterpart: DeepSpeed's engine has no float16 on the CPU.
@pytest.mark.parametrize("dtype", [*DTYPES, "fp16"])
def test_cifar(dtype, cifar):
    learns(cifar[dtype])
    assert cifar[dtype][-1]["accuracy"] == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_cifar_next_to_deepspeed(dtype, cifar, deepspeeds_cifar):
    compare(cifar[dtype], deepspeeds_cifar[dtype], DTYPES[dtype])


def test_gan(folder):
    """DeepSpeed 0.18.9 refuses the backward pass of one engine through another one's forward.

    So the engines are compared with the discriminator's module in that place.
    """
    path, file = runner.changed("gan.py", folder, runner.IMPORTED), folder / "gan.json"
    file.write_text(json.dumps(GAN))
    options = [["--deepspeed_config", file, "--optimizer", kind] for kind in ("Adam", "SGD")]
    through = [[*words, "--through", "module"] for words in options]
    rows = runner.run(*([path, *words] for words in [*options, *through]))
    assert rows[:2] == rows[2:]
    assert rows[0] != rows[1]
    for mine, theirs in zip(rows, deepspeeds(*(["gan.py", *words] for words in through))):
        compare(mine, theirs, FLOAT32)


OTHERS = ("OneBitAdam", "Lamb", "RMSprop")


@pytest.fixture(scope="module")
def bert(folder):
    """What the changed program prints, by dtype, and in float16 by optimizer."""
    path = runner.changed("bert.py", folder, runner.IMPORTED)
    of_torch = folder / "rmsprop.py"
    of_torch.write_text(
        path.read_text().replace('"betas": [0.9, 0.98], "eps"', '"alpha": 0.98, "eps"')
    )
    program = {"RMSprop": of_torch}
    half = ["--dtype", "fp16", "--output_dir"]
    rows = runner.run(
        *([path, "--dtype", dtype, "--output_dir", folder / dtype] for dtype in DTYPES),
        *([program.get(kind, path), "--optimizer", kind, *half, folder / kind] for kind in OTHERS),
    )
    return dict(zip([*DTYPES, *OTHERS], rows))


@pytest.fixture(scope="module")
def deepspeeds_bert(folder):
    options = [["--dtype", dtype, "--output_dir", folder / f"theirs_{dtype}"] for dtype in DTYPES]
    return dict(zip(DTYPES, deepspeeds(*(["bert.py", *words] for words in options))))


# With other optimizers in float16: of the library, compressed and not, and of PyTorch behind the
# average. All are resumed exactly.
@pytest.mark.parametrize("name", [*DTYPES, *OTHERS])
def test_fine_tuning_of_bert(name, bert):
    learns(bert[name], less=0.8 if name in DTYPES else 0.95)  # LAMB's rate would be another
    assert bert[name][-1] == {"resumed": 0.0, "samples": 12 * 32}


@pytest.mark.parametrize("dtype", DTYPES)
def test_fine_tuning_of_bert_next_to_deepspeed(dtype, bert, deepspeeds_bert):
    compare(bert[dtype], deepspeeds_bert[dtype], DTYPES[dtype])


def test_hello_deepspeed(tmp_path):
    path = runner.changed("hello.py", tmp_path, runner.INSTALLED)
    command, more = [path, "--dir", tmp_path / "mine"], ["--load", "--steps", 4]
    (mine,) = runner.run(command)
    learns(mine)
    (resumed,) = runner.run([*command, *more])  # in processes of its own
    assert [row["step"] for row in resumed] == [13, 14, 15, 16]
    command = ["hello.py", "--dir", tmp_path / "theirs"]
    theirs, theirs_resumed = deepspeeds(command, [*command, *more])
    compare(mine, theirs, FLOAT32)
    compare(resumed, theirs_resumed, FLOAT32)
    # And what DeepSpeed has left is gone on from here.
    (taken,) = runner.run([path, *command[1:], *more])
    assert [row["step"] for row in taken] == [13, 14, 15, 16]
    compare(taken, resumed, FLOAT32)


def test_engines_of_a_chat_trainer(folder):
    """DeepSpeed's own FusedAdam is compiled when it is made, so only the changed program runs."""
    by_line = runner.changed("chat.py", folder, runner.INSTALLED)
    (folder / "chat").mkdir()
    by_path = runner.by_path("chat.py", folder / "chat")
    options = (["--dtype", "fp32"], ["--dtype", "bf16", "--offload"])
    rows = runner.run(*([path, *words] for path in (by_line, by_path) for words in options))
    assert rows[:2] == rows[2:]
    for mine in rows[:2]:
        learns(mine, "critic")
        assert mine[-1]["lr"] == 0.01


def test_programs_under_sotto_run(tmp_path):
    """No MASTER_ADDR, no RANK: the program finds both behind init_distributed()."""
    path = runner.changed("hello.py", tmp_path, runner.INSTALLED)
    command = [sotto_run(), "-n", "2", "--timeout", "400", "--", sys.executable, str(path)]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path / "out"), "--steps", "4"],
        capture_output=True,
        text=True,
        timeout=450,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [line for line in done.stdout.splitlines() if '"loss"' in line]
    assert len(losses) == 4, done.stdout
