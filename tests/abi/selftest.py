#!/usr/bin/python3
"""Plants a violation of each ABI gate and demands that the gate catches it; and that the unharmed thing passes.

    selftest.py REPOSITORY OLD-CLIENT FUTURE-CLIENT
"""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import abi_model
import check_diff
import check_header
import check_symbols

ROOT = OLD_CLIENT = FUTURE_CLIENT = ""


def include():
    return os.path.join(ROOT, "capi", "include")


def here(*parts):
    return os.path.join(ROOT, "tests", "abi", *parts)


class Planted(unittest.TestCase):
    """A copy of the public headers in a folder of its own, to be changed."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.include = os.path.join(self.folder, "include")
        shutil.copytree(include(), self.include)
        self.header = os.path.join(self.include, "sotto", "sotto.h")

    def plant(self, old, new):
        with open(self.header, encoding="ascii") as f:
            text = f.read()
        self.assertEqual(text.count(old), 1, f"{old!r} has to be in the header once")
        with open(self.header, "w", encoding="ascii") as f:
            f.write(text.replace(old, new))

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="ascii") as f:
            f.write(text)
        return path

    def build_stub(self, name, extra_source="", link=(), version_script=True):
        """A library whose functions have the header's types and return zero."""
        model = abi_model.read_header(self.header)
        lines = [f'#include "{self.header}"', extra_source]
        for function in abi_model.exported(model):
            entry = model["functions"][function]
            params = ", ".join(f"{p['type'].replace('*', '* ')} p{i}" if "(*" not in p["type"] else p["type"]
                               for i, p in enumerate(entry["params"])) or "void"
            lines.append(f"{entry['returns']} {function}({params}) {{ return 0; }}")
        source = self.write(f"{name}.c", "\n".join(lines) + "\n")
        names = "".join(f"    {function};\n" for function in abi_model.exported(model))
        self.map = self.write(f"{name}.map", f"SOTTO_0.1 {{\n  global:\n{names}  local:\n    *;\n}};\n")
        library = os.path.join(self.folder, f"{name}.so")
        script = [f"-Wl,--version-script={self.map}"] if version_script else []
        abi_model.run(["gcc", "-g", "-O0", "-w", "-fPIC", "-shared", f"-Wl,-soname,{check_symbols.SONAME}", source, "-o",
                       library, *script, *link])
        return library


class Symbols(Planted):
    def problems(self, library, **changes):
        model = abi_model.read_header(self.header)
        return "\n".join(check_symbols.problems_of_symbols(
            library, changes.get("nodes") or check_symbols.read_map(self.map), changes.get("header") or model,
            changes.get("snapshot") or model))

    def test_clean(self):
        library = self.build_stub("clean")
        self.assertEqual(self.problems(library), "")
        self.assertEqual(check_symbols.problems_of_dependencies(library, check_symbols.NEEDED), [])

    def test_leaked_export(self):
        library = self.build_stub("leak", "int helper(void) { return 0; }", version_script=False)
        self.assertIn("exported but not in the map: helper", self.problems(library))

    def test_lost_export(self):
        library = self.build_stub("lost")
        nodes = check_symbols.read_map(self.map)
        nodes["SOTTO_0.1"].add("sotto_new")
        self.assertIn("in the map but not exported: sotto_new", self.problems(library, nodes=nodes))

    def test_wrong_node(self):
        library = self.build_stub("node")
        nodes = check_symbols.read_map(self.map)
        nodes["SOTTO_0.1"].remove("sotto_op_wait")
        nodes["SOTTO_0.2"] = {"sotto_op_wait"}
        self.assertIn("in the map but not exported: sotto_op_wait (SOTTO_0.2)", self.problems(library, nodes=nodes))

    def test_header_and_snapshot_must_agree_with_the_map(self):
        library = self.build_stub("old")
        shorter = abi_model.read_header(self.header)
        self.plant("SOTTO_API uint32_t sotto_abi_version(void);",
                   "SOTTO_API uint32_t sotto_abi_version(void);\nSOTTO_API sotto_status sotto_foo(int32_t x);")
        longer = abi_model.read_header(self.header)
        self.assertIn("in the header, but not in the map: sotto_foo", self.problems(library, header=longer, snapshot=shorter))
        self.assertIn("in the snapshot, but not in the map: sotto_foo", self.problems(library, header=shorter, snapshot=longer))
        del shorter["functions"]["sotto_op_wait"]
        self.assertIn("in the map, but not in the snapshot: sotto_op_wait", self.problems(library, snapshot=shorter))

    def test_pattern_in_the_map(self):
        path = self.write("pattern.map", "SOTTO_0.1 { global: sotto_*; local: *; };")
        with self.assertRaisesRegex(abi_model.AbiError, "by pattern"):
            check_symbols.read_map(path)
        path = self.write("open.map", "SOTTO_0.1 { global: sotto_op_wait; };")
        with self.assertRaisesRegex(abi_model.AbiError, "local"):
            check_symbols.read_map(path)

    def test_dependency_and_soname(self):
        library = self.build_stub("deps", link=["-Wl,--no-as-needed", "-l:libutil.so.1", "-Wl,-soname,libother.so"])
        problems = "\n".join(check_symbols.problems_of_dependencies(library, check_symbols.NEEDED))
        self.assertIn("needs libutil.so.1 at run time", problems)
        self.assertIn("libother.so", problems)


class Snapshot(Planted):
    CHANGES = [
        ("  uint64_t tag; ", "  uint32_t extra[2];\n  uint64_t tag; ", "structs.sotto_call"),
        ("  int32_t device_id; ", "  uint32_t device_id; ", "structs.sotto_buffer.fields[4].type"),
        ("#define SOTTO_E_PEER_LOST (-7)", "#define SOTTO_E_PEER_LOST (-17)", "constants.SOTTO_E_PEER_LOST: was -7, is -17"),
        ("sotto_op_wait(sotto_op* op, int64_t timeout_us)", "sotto_op_wait(sotto_op* op, int32_t timeout_us)",
         "functions.sotto_op_wait.params[1].type"),
        ("typedef int32_t sotto_reduce_op;", "typedef int64_t sotto_reduce_op;", "typedefs.sotto_reduce_op"),
        ("typedef struct sotto_optim sotto_optim;", "typedef struct sotto_optim { int32_t x; } sotto_optim;",
         "structs.sotto_optim: new"),
        ("SOTTO_API const char* sotto_last_error(void);", "", "functions.sotto_last_error: gone"),
        ("typedef void (*sotto_done_fn)(void* user, sotto_status status);",
         "typedef void (*sotto_done_fn)(sotto_status status, void* user);", "typedefs.sotto_done_fn"),
    ]

    def test_each_change_is_reported(self):
        script, recorded = here("check_snapshot.py"), os.path.join(ROOT, "capi", "abi", "sotto.abi.json")
        for old, new, expected in self.CHANGES:
            with self.subTest(expected):
                shutil.copy(os.path.join(include(), "sotto", "sotto.h"), self.header)
                self.plant(old, new)
                done = subprocess.run([sys.executable, script, self.header, recorded], stdout=subprocess.PIPE, text=True, check=False)
                self.assertEqual(done.returncode, 1)
                self.assertIn(expected, done.stdout)

    def test_what_cannot_be_recorded(self):
        for old, new, expected in (("  uint32_t max_ops; ", "  uint32_t max_ops : 9; ", "bit-field"),
                                   ("sotto_abi_version(void)", "sotto_abi_version(int32_t n, ...)", "variadic")):
            shutil.copy(os.path.join(include(), "sotto", "sotto.h"), self.header)
            self.plant(old, new)
            with self.assertRaisesRegex(abi_model.AbiError, expected):
                abi_model.read_header(self.header)


class Layout(Planted):
    def compiles(self):
        done = subprocess.run(["g++", "-std=c++20", "-fsyntax-only", "-I", self.include, here("layout_test.cc")],
                              stderr=subprocess.PIPE, text=True, check=False)
        return done.returncode == 0, done.stderr

    def test_clean(self):
        self.assertTrue(self.compiles()[0])

    def test_planted(self):
        for old, new in (("  uint64_t tag; ", "  void* tag2;\n  uint64_t tag; "),
                         ("  uint32_t reserved;              /* must be 0 */", ""),
                         ("  int64_t timeout_us;     /* longest", "  int32_t timeout_us;     /* longest")):
            shutil.copy(os.path.join(include(), "sotto", "sotto.h"), self.header)
            self.plant(old, new)
            good, text = self.compiles()
            self.assertFalse(good)
            self.assertIn("static assertion failed", text)


@unittest.skipIf(shutil.which("abidiff") is None, "abidiff is not installed (Debian package abigail-tools)")
class Diff(Planted):
    APPENDED = ("  void* user;             /* passed to on_done */\n} sotto_call;",
                "  void* user;             /* passed to on_done */\n  uint64_t appended;\n} sotto_call;")
    INSERTED = ("  uint64_t tag; ", "  uint64_t inserted;\n  uint64_t tag; ")

    def report(self, suppressions, *change):
        old = self.build_stub("old")
        self.plant(*change)
        new = self.build_stub("new")
        return check_diff.differences(suppressions, self.include, old, new)

    def ours(self):
        return os.path.join(ROOT, "capi", "abi", "suppress.ini")

    def test_appended_field_passes(self):
        self.assertEqual(self.report(self.ours(), *self.APPENDED), "")

    def test_inserted_field_is_reported(self):
        self.assertIn("inserted", self.report(self.ours(), *self.INSERTED))

    def test_removed_function_and_changed_signature_are_reported(self):
        self.assertIn("sotto_status_name", self.report(
            self.ours(), "SOTTO_API const char* sotto_status_name(sotto_status status);",
            "SOTTO_API const char* sotto_status_name(int64_t status);"))
        self.assertIn("sotto_last_error", self.report(self.ours(), "SOTTO_API const char* sotto_last_error(void);", ""))

    def test_the_gate_compares_with_a_release(self):
        old = self.build_stub("old")
        self.plant(*self.INSERTED)
        new = self.build_stub("new")
        done = subprocess.run([sys.executable, here("check_diff.py"), self.ours(), self.include, new, new],
                              stdout=subprocess.PIPE, env={**os.environ, "SOTTO_ABI_PREVIOUS": old}, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("inserted", done.stdout)


class Clients(Planted):
    """Libraries that look right and do nothing, or lack something, do not get past the client programs."""

    def run_client(self, client, library):
        return subprocess.run([client, library], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60, check=False)

    def test_empty_library(self):
        library = self.build_stub("empty")
        for client in (OLD_CLIENT, FUTURE_CLIENT):
            self.assertNotEqual(self.run_client(client, library).returncode, 0, client)

    def test_lost_function(self):
        self.plant("SOTTO_API sotto_status sotto_barrier(sotto_comm* comm, const sotto_call* call, sotto_op** out_op);", "")
        library = self.build_stub("lost")
        for client in (OLD_CLIENT, FUTURE_CLIENT):
            done = self.run_client(client, library)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("sotto_barrier", done.stderr)

    def test_unresolved_symbol(self):
        # RTLD_NOW finds what a lazy client would meet in the middle of its work.
        library = self.build_stub("unresolved", "int nowhere(void); int use(void) { return nowhere(); }")
        done = self.run_client(OLD_CLIENT, library)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("nowhere", done.stderr)

    def test_frozen_headers_stay_compatible(self):
        frozen = abi_model.read_header(here("v0_1", "sotto.h"))
        self.assertEqual(abi_model.incompatibilities(frozen, abi_model.read_header(self.header)), [])
        for old, new, expected in (Diff.INSERTED + ("structs.sotto_call: a field",),
                                   ("  uint32_t flags;                /* must be 0 */\n} sotto_buffer;",
                                    "  uint32_t flags;                /* must be 0 */\n  uint64_t more;\n} sotto_buffer;",
                                    "structs.sotto_buffer: frozen at 32"),
                                   ("#define SOTTO_REDUCE_MIN 3", "#define SOTTO_REDUCE_MIN 5", "constants.SOTTO_REDUCE_MIN"),
                                   ("SOTTO_API const char* sotto_last_error(void);", "", "functions.sotto_last_error: gone")):
            shutil.copy(os.path.join(include(), "sotto", "sotto.h"), self.header)
            self.plant(old, new)
            self.assertIn(expected, "\n".join(abi_model.incompatibilities(frozen, abi_model.read_header(self.header))))
        shutil.copy(os.path.join(include(), "sotto", "sotto.h"), self.header)
        self.plant(*Diff.APPENDED)
        self.assertEqual(abi_model.incompatibilities(frozen, abi_model.read_header(self.header)), [])


class Header(Planted):
    def problems(self):
        with open(self.header, encoding="ascii") as f:
            text = f.read()
        model = abi_model.read_header(self.header)
        return "\n".join(check_header.include_problems(text, "sotto/sotto.h") + check_header.type_problems(model) +
                         check_header.comment_problems(text, model))

    def test_documents_and_types(self):
        for old, new, expected in (
                ("#include <stdint.h>", "#include <stdint.h>\n#include <stdio.h>", "includes stdio.h"),
                ("SOTTO_API uint32_t sotto_abi_version(void);", "SOTTO_API unsigned sotto_abi_version(void);", "fixed-width"),
                ("sotto_set_log(sotto_log_fn fn, void* user, int32_t level);",
                 "sotto_set_log(sotto_log_fn fn, void* user, long level);", "type long"),
                ("sotto_op_release(sotto_op* op);", "sotto_op_release(sotto_op* op, sotto_buffer b);", "sotto_buffer by value"),
                ("  uint32_t cpu_threads; ", "  uint16_t cpu_threads; ", "padding before max_ops"),
                ("  uint64_t ops_completed;\n", "  uint32_t ops_completed;\n", "padding at its end"),
                ("SOTTO_API uint32_t sotto_abi_version(void);",
                 "SOTTO_API uint32_t sotto_abi_version(void);\nSOTTO_API uint32_t sotto_foo(void);", "sotto_foo: no comment"),
                ("level [in] messages above it are dropped", "level: messages above it are dropped", "does not describe level")):
            with self.subTest(expected):
                shutil.copy(os.path.join(include(), "sotto", "sotto.h"), self.header)
                self.plant(old, new)
                self.assertIn(expected, self.problems())

    def test_initializers(self):
        def problems():
            with open(self.header, encoding="ascii") as f:
                text = f.read()
            return "\n".join(check_header.init_problems(self.include, text, abi_model.read_header(self.header)))

        self.assertEqual(problems(), "")
        for old, new, expected in (("#define SOTTO_OP_STATS_INIT", "#define SOTTO_OTHER_INIT", "sotto_op_stats has no"),
                                   ("sizeof(sotto_op_stats), 0, 0", "sizeof(sotto_op_stats), 0, 7", "sets more"),
                                   ("sizeof(sotto_op_stats), 0, 0", "0, 0, 0", "sets more")):
            with self.subTest(expected):
                shutil.copy(os.path.join(include(), "sotto", "sotto.h"), self.header)
                self.plant(old, new)
                self.assertIn(expected, problems())

    def test_every_tag_is_demanded(self):
        with open(os.path.join(include(), "sotto", "sotto.h"), encoding="ascii") as f:
            text = f.read()
        model = abi_model.read_header(self.header)
        for tag in ("Threads:", "Blocks:", "Errors:", "Since:", "Stream:"):
            self.assertIn(f"the comment has no {tag}", "\n".join(check_header.comment_problems(text.replace(tag, "x"), model)))

    def test_dialects(self):
        for old, new in (("uint32_t sotto_abi_version(void);", "uint32_t sotto_abi_version();"),   # no prototype in C
                         ("  uint32_t max_ops; ", "  uint32_t new; "),                             # a word of C++
                         ("(sotto_op* op);", "(sotto_op* op = 0);"),                               # not C
                         ("#ifndef SOTTO_SOTTO_H", "#if 1")):                                      # included twice
            with self.subTest(new):
                shutil.copy(os.path.join(include(), "sotto", "sotto.h"), self.header)
                with open(self.header, encoding="ascii") as f:
                    text = f.read()
                self.assertIn(old, text)
                with open(self.header, "w", encoding="ascii") as f:
                    f.write(text.replace(old, new, 1))
                self.assertNotEqual(check_header.compile_problems(self.include, "sotto/sotto.h"), [])


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    ROOT, OLD_CLIENT, FUTURE_CLIENT = (os.path.abspath(path) for path in sys.argv[1:4])
    del sys.argv[1:4]
    unittest.main()
