"""abi_check.py accepts the package as it is and finds planted mismatches."""

import json
import subprocess
import sys

import pytest
from ranks import ROOT

CHECK = ROOT / "bindings/abi_check.py"
MODULE = ROOT / "bindings/python/src/sotto/_abi.py"
SNAPSHOT = ROOT / "capi/abi/sotto.abi.json"


def check(*arguments):
    run = subprocess.run(
        [sys.executable, CHECK, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    return run.returncode, run.stdout


def test_the_package_is_in_step():
    code, text = check()
    assert code == 0, text
    assert ", 0 differences" in text


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "SOTTO_E_BUSY = -5",
            "SOTTO_E_BUSY = -6",
            "constant SOTTO_E_BUSY is -6, in the snapshot -5",
        ),
        ("SOTTO_E_BUSY = -5\n", "", "constant SOTTO_E_BUSY is missing"),
        ('("tag", c.c_uint64)', '("tag", c.c_uint32)', "struct sotto_call: field tag is c_uint"),
        ('        ("group", c.c_uint32),\n', "", "struct sotto_param: field group is missing"),
        (
            '        ("rank", c.c_int32),\n        ("size", c.c_int32),',
            '        ("size", c.c_int32),\n        ("rank", c.c_int32),',
            "struct sotto_comm_config: field rank is at 8",
        ),
        (
            '"sotto_op_wait": (Status, [Handle, c.c_int64])',
            '"sotto_op_wait": (Status, [Handle, c.c_int32])',
            "function sotto_op_wait: argument 1 (timeout_us) is c_int",
        ),
        (
            '"sotto_op_test": (Status, [Handle])',
            '"sotto_op_test": (Status, [])',
            "function sotto_op_test has 0 arguments",
        ),
        ('    "sotto_op_test": (Status, [Handle]),\n', "", "function sotto_op_test is missing"),
        (
            '"sotto_version_string": (_Text',
            '"sotto_version_string": (c.c_int32',
            "function sotto_version_string returns c_int",
        ),
        (
            "DoneFn = c.CFUNCTYPE(None, c.c_void_p, Status)",
            "DoneFn = c.CFUNCTYPE(None, c.c_void_p)",
            "type sotto_done_fn is not",
        ),
    ],
)
def test_a_planted_mismatch_is_found(tmp_path, before, after, message):
    source = MODULE.read_text()
    assert source.count(before) == 1
    planted = tmp_path / "_abi.py"
    planted.write_text(source.replace(before, after))
    code, text = check("--module", planted)
    assert code == 1
    assert message in text


def test_what_the_package_lacks_is_found(tmp_path):
    snapshot = json.loads(SNAPSHOT.read_text())
    snapshot["functions"]["sotto_new"] = {"returns": "sotto_status", "params": []}
    del snapshot["functions"]["sotto_barrier"]
    newer = tmp_path / "abi.json"
    newer.write_text(json.dumps(snapshot))
    code, text = check("--snapshot", newer)
    assert code == 1
    assert "function sotto_new is missing in the package" in text
    assert "function sotto_barrier of the package is not in the snapshot" in text
