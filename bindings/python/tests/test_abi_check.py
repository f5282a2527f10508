"""abi_check.py accepts the bindings as they are and finds planted mismatches."""

import json
import shutil
import subprocess
import sys

import pytest
from ranks import ROOT

CHECK = ROOT / "bindings/abi_check.py"
PYTHON = ROOT / "bindings/python/src/sotto/_abi.py"
RUST = ROOT / "bindings/rust/sotto-sys/src"
JULIA = ROOT / "bindings/julia/src/abi.jl"
SNAPSHOT = ROOT / "capi/abi/sotto.abi.json"


def check(*arguments):
    run = subprocess.run(
        [sys.executable, CHECK, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    return run.returncode, run.stdout


def test_all_bindings_are_in_step():
    code, text = check()
    assert code == 0, text
    lines = text.splitlines()
    assert {"Python", "Rust", "Julia"} <= {line.split(":")[0] for line in lines}
    assert all(line.endswith(", 0 differences") for line in lines)


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
def test_a_mismatch_planted_in_python_is_found(tmp_path, before, after, message):
    source = PYTHON.read_text()
    assert source.count(before) == 1
    planted = tmp_path / "_abi.py"
    planted.write_text(source.replace(before, after))
    code, text = check("--language", "python", "--source", planted)
    assert code == 1
    assert f"Python: {message}" in text


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "SOTTO_E_BUSY: sotto_status = -5;",
            "SOTTO_E_BUSY: sotto_status = -6;",
            "constant SOTTO_E_BUSY is -6, in the snapshot -5",
        ),
        (
            "SOTTO_FLOAT16: sotto_dtype = 0x0001_1002;",
            "SOTTO_FLOAT16: sotto_dtype = 0x0001_1003;",
            "constant SOTTO_FLOAT16 is 69635",
        ),
        (
            "pub const SOTTO_E_BUSY: sotto_status = -5;\n",
            "",
            "constant SOTTO_E_BUSY is missing",
        ),
        ("    pub tag: u64,\n", "    pub tag: u32,\n", "struct sotto_call: field tag is u32"),
        (
            "    pub transport: *const c_char,",
            "    pub transport: *mut c_char,",
            "struct sotto_comm_config: field transport is *mut c_char, const char * needs *const",
        ),
        ("    pub group: u32,\n", "", "struct sotto_param: field group is missing"),
        (
            "    pub rank: i32,\n    pub size: i32,\n",
            "    pub size: i32,\n    pub rank: i32,\n",
            "struct sotto_comm_config: field rank is at 8",
        ),
        (
            "    pub bytes: [u8; SOTTO_UNIQUE_ID_BYTES],",
            "    pub bytes: [u8; 64],",
            "struct sotto_unique_id: field bytes is [u8; 64]",
        ),
        (
            "#[repr(C)]\n#[derive(Clone, Copy, Debug)]\npub struct sotto_parts",
            "#[derive(Clone, Copy, Debug)]\npub struct sotto_parts",
            "struct sotto_parts is missing",
        ),
        (
            "fn sotto_op_wait(op: *mut sotto_op, timeout_us: i64)",
            "fn sotto_op_wait(op: *mut sotto_op, timeout_us: i32)",
            "function sotto_op_wait: argument 1 (timeout_us) is i32",
        ),
        (
            "fn sotto_op_wait(op: *mut sotto_op, timeout_us: i64)",
            "fn sotto_op_wait(timeout_us: i64, op: *mut sotto_op)",
            "function sotto_op_wait: argument 0 (op) is i64",
        ),
        (
            "comm: *mut sotto_comm,\n        color: i32,\n        key: i32,",
            "comm: *mut sotto_comm,\n        key: i32,\n        color: i32,",
            "function sotto_comm_split: argument 1 is called key, in the snapshot color",
        ),
        (
            "fn sotto_op_test(op: *mut sotto_op)",
            "fn sotto_op_test()",
            "function sotto_op_test has 0 arguments",
        ),
        (
            "    fn sotto_op_test(op: *mut sotto_op) -> sotto_status;\n",
            "",
            "function sotto_op_test is missing",
        ),
        (
            "fn sotto_comm_destroy(",
            "fn sotto_comm_destruct(",
            "function sotto_comm_destruct is not in the snapshot",
        ),
        (
            "fn sotto_version_string() -> *const c_char;",
            "fn sotto_version_string() -> i32;",
            "function sotto_version_string returns i32",
        ),
        (
            "fn(user: *mut c_void, status: sotto_status)>;",
            "fn(user: *mut c_void)>;",
            "type sotto_done_fn is not",
        ),
        ("pub type sotto_dtype = u32;", "pub type sotto_dtype = i32;", "type sotto_dtype is not"),
        ("sotto_outer, sotto_overlap", "sotto_overlap", "handles are"),
    ],
)
def test_a_mismatch_planted_in_rust_is_found(tmp_path, before, after, message):
    places = [file for file in RUST.glob("*.rs") if before in file.read_text()]
    assert len(places) == 1
    planted = tmp_path / "src"
    shutil.copytree(RUST, planted)
    source = places[0].read_text()
    assert source.count(before) == 1
    (planted / places[0].name).write_text(source.replace(before, after))
    code, text = check("--language", "rust", "--source", planted)
    assert code == 1
    assert f"Rust: {message}" in text


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "SOTTO_E_BUSY = -5\n",
            "SOTTO_E_BUSY = -6\n",
            "constant SOTTO_E_BUSY is -6, in the snapshot -5",
        ),
        ("const SOTTO_E_BUSY = -5\n", "", "constant SOTTO_E_BUSY is missing"),
        ("    tag::UInt64\n", "    tag::UInt32\n", "struct sotto_call: field tag is UInt32"),
        ("    group::UInt32\n", "", "struct sotto_param: field group is missing"),
        (
            "    rank::Int32\n    size::Int32\n",
            "    size::Int32\n    rank::Int32\n",
            "struct sotto_comm_config: field rank is at 8",
        ),
        (
            "    bytes::NTuple{128, UInt8}\n",
            "    bytes::NTuple{64, UInt8}\n",
            "struct sotto_unique_id: field bytes is NTuple{64, UInt8}",
        ),
        ("\nstruct sotto_parts\n", "\nstruct sotto_part\n", "struct sotto_parts is missing"),
        (
            "sotto_op_wait(op::Ptr{sotto_op}, timeout_us::Int64)",
            "sotto_op_wait(op::Ptr{sotto_op}, timeout_us::Int32)",
            "function sotto_op_wait: argument 1 (timeout_us) is Int32",
        ),
        (
            "color::Int32, key::Int32",
            "key::Int32, color::Int32",
            "function sotto_comm_split: argument 1 is called key, in the snapshot color",
        ),
        (
            "sotto_op_test(op::Ptr{sotto_op})",
            "sotto_op_test()",
            "function sotto_op_test has 0 arguments",
        ),
        (
            "@c_function sotto_op_test(op::Ptr{sotto_op})::sotto_status\n",
            "",
            "function sotto_op_test is missing",
        ),
        (
            "sotto_version_string()::Cstring",
            "sotto_version_string()::Int32",
            "function sotto_version_string returns Int32",
        ),
        ("sotto_dtype = UInt32", "sotto_dtype = Int32", "type sotto_dtype is not"),
        ("sotto_done_fn = Ptr{Cvoid}", "sotto_done_fn = Int32", "type sotto_done_fn is not"),
        ("mutable struct sotto_outer end\n", "", "handles are"),
    ],
)
def test_a_mismatch_planted_in_julia_is_found(tmp_path, before, after, message):
    source = JULIA.read_text()
    assert source.count(before) == 1
    planted = tmp_path / "abi.jl"
    planted.write_text(source.replace(before, after))
    code, text = check("--language", "julia", "--source", planted)
    assert code == 1
    assert f"Julia: {message}" in text


def test_what_a_binding_lacks_is_found(tmp_path):
    snapshot = json.loads(SNAPSHOT.read_text())
    snapshot["functions"]["sotto_new"] = {"returns": "sotto_status", "params": []}
    del snapshot["functions"]["sotto_barrier"]
    newer = tmp_path / "abi.json"
    newer.write_text(json.dumps(snapshot))
    code, text = check("--snapshot", newer)
    assert code == 1
    for title in ("Python", "Rust", "Julia"):
        assert f"{title}: function sotto_new is missing" in text
        assert f"{title}: function sotto_barrier is not in the snapshot" in text
