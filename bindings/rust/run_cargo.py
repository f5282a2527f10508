#!/usr/bin/env python3
"""Runs tests of the Rust crates.

usage: run_cargo.py test|trainer|link|lint|package TARGET_FOLDER

  test     builds and runs the tests of both crates, with those of their documentation
  trainer  the example of README.md and the trainer run on 4 ranks, the latter with integration/configs/onebit_lamb.json; with
           the gradients of the C trainer it has to come to the parameters that the C trainer has
  link     a program that is linked with the library, which SOTTO_LIB_DIR or pkg-config tells, says its version
  lint     cargo fmt, clippy and doc, by the newest cargo that has them
  package  what cargo package takes is complete

Exit code: 0, 1, or 5 where something is not installed; the reason is printed. SOTTO_LIBRARY names the library,
BINDINGS_SOTTO_RUN sotto-run, BINDINGS_C_TRAINER and BINDINGS_RECORDER the C trainer and what records its gradients.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "tests"))

from recorded import LeftOut, exit_code_of, launched, of_build, same_as_c_trainer  # noqa: E402

RANKS = 4


class Cargo:
    """One installed cargo with its compiler."""

    def __init__(self, path):
        self.path = Path(path)
        self.folder = self.path.parent
        self.version = tuple(map(int, re.findall(r"\d+", self.said("--version"))[:3]))

    def environment(self, **more):
        # Its own compiler, not that of another one which comes first in PATH.
        path = f"{self.folder}:{os.environ.get('PATH', '')}"
        return {**os.environ, "PATH": path, "CARGO_TERM_COLOR": "never", "RUST_BACKTRACE": "0", **more}

    def run(self, *words, **more):
        command = [str(self.path), *map(str, words)]
        print("+", " ".join(command), flush=True)
        subprocess.run(command, cwd=HERE, env=self.environment(**more), check=True)

    def said(self, *words):
        run = subprocess.run([self.path, *words], cwd=HERE, env=self.environment(), capture_output=True, text=True, check=True)
        return run.stdout

    def has(self, *words):
        run = subprocess.run([self.path, *words], cwd=HERE, env=self.environment(), capture_output=True, check=False)
        return run.returncode == 0


def cargos():
    """All that are installed and work, the oldest first."""
    folders = [*os.environ.get("PATH", "").split(":"), "/usr/bin", str(Path.home() / ".cargo/bin")]
    found = []
    for folder in dict.fromkeys(folders):
        path = Path(folder) / "cargo"
        try:
            if os.access(path, os.X_OK):
                found.append(Cargo(path))
        except (OSError, subprocess.CalledProcessError):
            print(f"{path} does not work")
    if not found:
        raise LeftOut("there is no cargo: integration/setup.sh test installs it")
    return sorted(found, key=lambda cargo: cargo.version)


def project_version():
    return re.search(r"project\(sotto VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))[1]


def test():
    oldest = cargos()[0]
    of_build("SOTTO_LIBRARY")
    oldest.run("test", "--offline", "--workspace")


def built(cargo, *words, folder=HERE, **more):
    """Builds one program; where cargo says that it is."""
    command = [cargo.path, "build", "--offline", "-q", "--message-format", "json", *words]
    run = subprocess.run(command, cwd=folder, env=cargo.environment(**more), stdout=subprocess.PIPE, text=True, check=True)
    messages = [json.loads(line) for line in run.stdout.splitlines()]
    return next(message["executable"] for message in messages if message.get("executable"))


def example(cargo, name, *words, **more):
    return built(cargo, "-p", "sotto", "--example", name, *words, **more)


def readme():
    """The example of README.md, as a program of its own."""
    source = re.search(r"^```rust,no_run\n(.*?)^```", (HERE / "README.md").read_text(encoding="utf-8"), re.M | re.S)[1]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "src").mkdir()
        (Path(folder) / "src/main.rs").write_text(source, encoding="utf-8")
        manifest = f"""[package]
name = "readme"
version = "0.0.0"
edition = "2021"
[dependencies]
sotto = {{ path = "{HERE}/sotto" }}
[profile.dev]
debug = false
"""
        (Path(folder) / "Cargo.toml").write_text(manifest, encoding="utf-8")
        launched(RANKS, built(cargos()[0], folder=folder))


def trainer():
    readme()
    program = example(cargos()[0], "trainer")
    said = launched(RANKS, program, ROOT / "integration/configs/onebit_lamb.json")
    assert "900 steps, stage 1" in said, "the compressed stage was not reached"
    with tempfile.TemporaryDirectory() as folder:
        same_as_c_trainer(RANKS, Path(folder), program)


def link():
    library, cargo = Path(of_build("SOTTO_LIBRARY")), cargos()[0]
    with tempfile.TemporaryDirectory() as folder:
        version = project_version()
        pc = f"Name: sotto\nDescription: for this test\nVersion: {version}\nLibs: -L{library.parent} -lsotto\n"
        (Path(folder) / "sotto.pc").write_text(pc, encoding="utf-8")
        for where in ({"SOTTO_LIB_DIR": str(library.parent)}, {"PKG_CONFIG_PATH": folder}):
            if "PKG_CONFIG_PATH" in where and not shutil.which("pkg-config"):
                raise LeftOut("there is no pkg-config; with SOTTO_LIB_DIR it works")
            program = example(cargo, "version", "--features", "link", **where)
            environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "SOTTO_LIBRARY": "/nonexistent"}
            run = subprocess.run([program], env=environment, capture_output=True, text=True, check=True)
            assert run.stdout == f"libsotto {version}\n", run.stdout
    refused = {"SOTTO_LIB_DIR": "/nonexistent"}
    command = [cargo.path, "check", "--offline", "-q", "-p", "sotto-sys", "--features", "link"]
    environment = cargo.environment(**refused)
    run = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode != 0 and 'SOTTO_LIB_DIR is "/nonexistent"' in run.stderr, run.stderr


def lint():
    newest = cargos()[-1]
    newest.run("doc", "--offline", "--no-deps", "--workspace", RUSTDOCFLAGS="-D warnings")
    clippy = ["--offline", "--workspace", "--all-targets", "--", "-D", "warnings"]
    for tool, words in (("fmt", ["--", "--check"]), ("clippy", clippy)):
        if not newest.has(tool, "--version"):
            raise LeftOut(f"{newest.path} has no {tool}; cargo doc has no warnings")
        newest.run(tool, *words)
    newest.run("clippy", "--all-features", *clippy, SOTTO_LIB_DIR=str(Path(of_build("SOTTO_LIBRARY")).parent))


def package():
    cargo = cargos()[-1]
    for crate in ("sotto-sys", "sotto"):
        listed = set(cargo.said("package", "--offline", "--allow-dirty", "--list", "-p", crate).splitlines())
        sources = {str(path.relative_to(HERE / crate)) for path in (HERE / crate).rglob("*.rs")}
        missing = {"Cargo.toml", "README.md", "LICENSE", *sources} - listed
        assert not missing, f"{crate}: cargo package leaves out {sorted(missing)}"
        assert (HERE / crate / "LICENSE").read_text(encoding="utf-8") == (ROOT / "LICENSE").read_text(encoding="utf-8")
        entry = next(p for p in json.loads(cargo.said("metadata", "--offline", "--no-deps", "--format-version", "1"))["packages"]
                     if p["name"] == crate)
        absent = [key for key in ("description", "license", "readme", "rust_version") if not entry.get(key)]
        assert not absent, f"{crate}: Cargo.toml has no {absent}"
        assert entry["version"] == project_version(), entry["version"]
    # One crate depends on the other, which older ones look for outside. What is built of a package is taken to be the same as
    # long as its version is: nothing of an earlier run may be there.
    which = ["--workspace"] if cargo.version >= (1, 90) else ["--no-verify", "-p", "sotto-sys"]
    with tempfile.TemporaryDirectory() as folder:
        cargo.run("package", "--offline", "--allow-dirty", *which, CARGO_TARGET_DIR=folder, CARGO_HOME=f"{folder}/home")


STEPS = {step.__name__: step for step in (test, trainer, link, lint, package)}


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in STEPS:
        sys.exit(__doc__)
    # What one compiler, or one choice of features, has built is of no use to another.
    own = {"link": "link", "lint": "lint", "package": "lint"}
    os.environ["CARGO_TARGET_DIR"] = str(Path(sys.argv[2]) / own.get(sys.argv[1], "tests"))
    return exit_code_of(STEPS[sys.argv[1]])


if __name__ == "__main__":
    sys.exit(main())
