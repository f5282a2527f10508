"""Finding, loading and refusing libraries."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT

import sotto
from sotto import _abi, errors

PRINT = "import sotto; print(sotto.library_path(), sotto.library_version())"


def load(library, code=PRINT):
    """Exit code and output of a fresh interpreter; library: value of SOTTO_LIBRARY, None: unset."""
    env = {k: v for k, v in os.environ.items() if k not in ("SOTTO_LIBRARY", "LD_LIBRARY_PATH")}
    if library is not None:
        env["SOTTO_LIBRARY"] = str(library)
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    return run.returncode, run.stdout + run.stderr


def stub(tmp_path, source):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make a stub library with")
    (tmp_path / "stub.c").write_text(source)
    out = tmp_path / "libstub.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", out, tmp_path / "stub.c"], check=True)
    return out


def test_the_named_library_is_loaded():
    code, text = load(os.environ["SOTTO_LIBRARY"])
    assert code == 0, text
    assert text.startswith(os.environ["SOTTO_LIBRARY"])


def test_a_named_library_that_is_missing_is_no_reason_to_take_another():
    code, text = load("/nonexistent/libsotto.so")
    assert code == 1
    assert (
        "LibraryLoadError: SOTTO_LIBRARY is set: /nonexistent/libsotto.so: cannot be loaded" in text
    )


def test_without_any_library_the_error_lists_where_it_was_looked_for():
    code, text = load(None)
    if code == 0:
        pytest.skip("libsotto is installed in the system")
    assert "libsotto was not found" in text
    for place in ("SOTTO_LIBRARY", "lib/libsotto.so.0", "system's loader"):
        assert place in text


def test_importing_needs_no_library():
    assert load("/nonexistent/libsotto.so", "import sotto, sotto.optim")[0] == 0


UCX_VERSION = (
    "void ucp_get_version(unsigned* a, unsigned* b, unsigned* c) {{ *a = 1; *b = {}; *c = 1; }}"
)


@pytest.mark.parametrize(
    ("minor", "said"),
    [
        (12, r"UCX 1\.12\.1 at {} cannot be used; 1\.13 or a later 1\.x is needed"),
        (13, r"UCX 1\.13\.1 at {} lacks ucp_config_read, .*ucp_am_send_nbx"),
    ],
)
def test_a_ucx_that_is_too_old_or_lacks_functions_is_named(tmp_path, minor, said):
    if "ucx" not in sotto.build_info()["transports"]:
        pytest.skip("this build has no UCX transport")
    library = stub(tmp_path, UCX_VERSION.format(minor))
    settings = (
        f"import os; os.environ.update(SOTTO_TRANSPORT='ucx', SOTTO_UCX_LIBRARY={str(library)!r})\n"
    )
    code, text = load(
        os.environ["SOTTO_LIBRARY"],
        settings + "import sotto; sotto.init_process_group(world_size=1)",
    )
    assert code == 1
    assert re.search(
        "UnsupportedError: sotto_comm_create: " + said.format(re.escape(str(library))), text
    ), text


def test_another_library_is_recognised(tmp_path):
    code, text = load(stub(tmp_path, "int other(void) { return 0; }"))
    assert code == 1
    assert "has no function sotto_abi_version, so it is not libsotto" in text


@pytest.mark.parametrize(("version", "shown"), [("1 << 16 | 1", "1.1"), ("0", "0.0"), ("1", "0.1")])
def test_another_abi_version_is_refused_with_both_numbers(tmp_path, version, shown):
    code, text = load(stub(tmp_path, f"unsigned sotto_abi_version(void) {{ return {version}; }}"))
    assert code == 1
    assert f"has ABI {shown}, this package was written for 0.2" in text


def test_a_library_without_a_function_is_refused(tmp_path):
    code, text = load(stub(tmp_path, "unsigned sotto_abi_version(void) { return 2; }"))
    assert code == 1
    assert "has no function sotto_" in text


def test_versions_agree():
    cmake = (ROOT / "CMakeLists.txt").read_text()
    version = re.search(r"project\(sotto VERSION (\S+)", cmake)[1]
    project = (ROOT / "bindings/python/pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"', project, re.M)[1] == version
    assert sotto.__version__ == version == sotto.library_version()


def test_every_status_has_a_class_and_the_librarys_name():
    lib = sotto._lib.library().functions
    codes = [value for name, value in _abi.CONSTANTS.items() if name.startswith("SOTTO_E_")]
    assert sorted(errors.BY_STATUS) == sorted(codes)
    for code, cls in errors.BY_STATUS.items():
        name = lib.sotto_status_name(code).decode().replace("_", "").lower()
        assert cls.__name__.lower().replace("operation", "") == name + "error"
        error = errors.error_of(code, "text")
        assert isinstance(error, sotto.SottoError)
        assert (error.status, str(error)) == (code, "text")


def test_build_info_is_json():
    assert "tcp" in str(sotto.build_info())


def test_the_readme_says_what_a_wheel_needs():
    """The newest symbol versions of glibc and libstdc++ that the library is bound to."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump is not installed")
    listed = subprocess.run(
        [objdump, "-T", sotto.library_path()], capture_output=True, text=True, check=True
    ).stdout
    if "__asan_init" in listed or "__tsan_init" in listed:
        pytest.skip("a sanitizer's library is bound to more")

    def newest(name, text):
        found = re.findall(rf"{name}[_ ]([0-9]+(?:\.[0-9]+)+)", text)
        return max(tuple(map(int, version.split("."))) for version in found)

    readme = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    assert newest("glibc", readme) == newest("GLIBC", listed)
    assert newest("GLIBCXX", readme) == newest("GLIBCXX", listed)
