"""The lint checks find planted violations and accept what is right."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import check_classes  # noqa: E402
import check_comments  # noqa: E402
import check_cycles  # noqa: E402
import check_includes  # noqa: E402
import check_length  # noqa: E402
from class_parser import classes  # noqa: E402


class Tree:
    """A small project in a temporary folder."""

    def __init__(self, files):
        self._folder = tempfile.TemporaryDirectory()
        self.root = Path(self._folder.name)
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._folder.cleanup()


def include_problems(name, line, others=()):
    files = {name: f"{line}\n"}
    files.update({other: "\n" for other in others})
    with Tree(files) as tree:
        return check_includes.check(tree.root)[0]


class Includes(unittest.TestCase):
    def assert_allowed(self, name, included):
        self.assertEqual(include_problems(name, f'#include "{included}"'), [])

    def assert_caught(self, name, included, word):
        problems = include_problems(name, f'#include "{included}"')
        self.assertEqual(len(problems), 1, problems)
        self.assertTrue(problems[0].startswith(f"{name}:1:"), problems)
        self.assertIn(word, problems[0])

    def test_core_points_one_way(self):
        order = ["base", "kernels", "iface", "wire", "plan", "engine", "group", "codec", "optim", "state"]
        for low, lower in enumerate(order):
            for higher in order[low + 1:]:
                self.assert_allowed(f"core/{higher}/a.cc", f"core/{lower}/b.h")
                self.assert_caught(f"core/{lower}/a.cc", f"core/{higher}/b.h", f"core/{higher}")

    def test_folders_of_one_tier_do_not_see_each_other(self):
        self.assert_caught("core/wire/a.cc", "core/cpu/b.h", "core/cpu")
        self.assert_caught("core/cpu/a.h", "core/wire/b.h", "core/wire")

    def test_config_sees_base_and_is_seen_from_codec_up(self):
        self.assert_allowed("core/config/a.cc", "core/base/b.h")
        self.assert_caught("core/config/a.cc", "core/iface/b.h", "core/iface")
        self.assert_allowed("core/codec/a.cc", "core/config/b.h")
        self.assert_allowed("core/optim/a.cc", "core/config/b.h")
        self.assert_allowed("core/state/a.cc", "core/config/b.h")
        self.assert_caught("core/group/a.cc", "core/config/b.h", "core/config")

    def test_core_sees_nothing_outside(self):
        for included in ("capi/src/guard.h", "transports/tcp/tcp.h", "sotto/sotto.h", "integration/cli/a.h"):
            self.assert_caught("core/engine/a.cc", included, "must not include")

    def test_a_new_folder_of_core_needs_a_rule(self):
        self.assertIn("no rule", include_problems("core/novel/a.cc", "#include <vector>")[0])

    def test_transports(self):
        for folder in ("base", "kernels", "iface", "wire"):
            self.assert_allowed("transports/tcp/a.cc", f"core/{folder}/b.h")
        self.assert_allowed("transports/tcp/a.cc", "transports/tcp/b.h")
        self.assert_caught("transports/tcp/a.cc", "core/engine/b.h", "core/engine")
        self.assert_caught("transports/tcp/a.cc", "transports/inproc/b.h", "transports/inproc")
        self.assert_allowed("transports/tcp/a.cc", "transports/framed/b.h")
        self.assert_caught("transports/framed/a.cc", "transports/tcp/b.h", "transports/tcp")
        self.assert_caught("transports/inproc/a.cc", "transports/framed/b.h", "transports/framed")

    def test_cuda_calls(self):
        for name in ("cuda/a.cc", "cuda/kernels/a.cc", "transports/nccl/a.cc"):
            self.assert_allowed(name, "cuda/calls/b.h")
        self.assert_allowed("cuda/calls/a.cc", "core/base/b.h")
        self.assert_caught("cuda/calls/a.cc", "core/iface/b.h", "core/iface")
        self.assert_caught("transports/tcp/a.cc", "cuda/calls/b.h", "cuda/calls")
        self.assert_caught("transports/nccl/a.cc", "cuda/launch.h", "cuda")

    def test_backends_alone_sees_transports(self):
        self.assert_allowed("capi/src/backends.cc", "transports/tcp/b.h")
        self.assert_caught("capi/src/comm.cc", "transports/tcp/b.h", "transports/tcp")
        self.assert_allowed("capi/src/comm.cc", "core/group/b.h")

    def test_integration_sees_public_headers_alone(self):
        self.assert_allowed("integration/c_trainer/a.c", "sotto/sotto.h")
        self.assert_caught("integration/c_trainer/a.c", "core/base/b.h", "core/base")
        self.assert_caught("integration/cli/a.cc", "capi/src/guard.h", "capi")
        self.assertEqual(include_problems("integration/c_trainer/a.c", '#include "b.h"', ["integration/c_trainer/b.h"]), [])

    def test_angle_brackets_and_spaces_do_not_hide_an_include(self):
        self.assertEqual(len(include_problems("core/base/a.cc", "  #  include <core/engine/b.h>")), 1)

    def test_a_relative_path_does_not_hide_an_include(self):
        problems = include_problems("core/base/a.cc", '#include "../engine/b.h"', ["core/engine/b.h"])
        self.assertEqual(len(problems), 1, problems)
        self.assertIn("core/engine", problems[0])

    def test_a_quoted_name_that_does_not_exist(self):
        self.assertIn("not a file", include_problems("core/base/a.cc", '#include "nowhere.h"')[0])

    def test_public_header(self):
        self.assertEqual(include_problems("capi/include/sotto/sotto.h", "#include <stdint.h>"), [])
        self.assertEqual(len(include_problems("capi/include/sotto/sotto.h", "#include <stdbool.h>")), 1)
        other = "capi/include/sotto/sotto_dlpack.h"
        self.assertEqual(include_problems(other, '#include <string.h>\n#include "sotto.h"', ["capi/include/sotto/sotto.h"]), [])
        self.assertEqual(len(include_problems(other, "#include <vector>")), 1)
        self.assertEqual(len(include_problems("capi/include/sotto/sotto.h", '#include "core/base/b.h"')), 1)

    def test_asio_comes_through_one_header(self):
        line = "#include <boost/asio/ip/tcp.hpp>\n"
        with Tree({"transports/tcp/asio.h": line}) as tree:
            self.assertEqual(check_includes.check(tree.root)[0], [])
        with Tree({"transports/tcp/asio.h": line, "transports/tcp/b.cc": line}) as tree:
            self.assertEqual(len(check_includes.check(tree.root)[0]), 2)


LONG = "// A line of a paragraph goes on up to the limit of columns or nearly so, whatever comes behind it, as\n"
PARAGRAPHS = f"""{LONG}// here. A sentence that ends may end a line.
// So may a colon:
//
//  - an item that needs more than the one line that there is for it, which is why it is continued
//    under its text
//  - another
//
//   field     what it is
//   other     of a table
//
//   int code(
//       int x);
{LONG}//     an indented line
int x;  // behind
// in the middle
int y;
"""


class Comments(unittest.TestCase):
    def problems(self, text):
        with Tree({"core/base/a.h": text}) as tree:
            return check_comments.check(tree.root)[0]

    def test_whole_ones(self):
        self.assertEqual(self.problems(PARAGRAPHS), [])

    def test_items(self):
        for text in ("//  - an item of\n//  a list\n", "  //  1. an item\n  //     of\n  //  a list\n"):
            self.assertIn("item's text", self.problems(text)[0])

    def test_paragraphs(self):
        self.assertIn("a.h:2: the comment's line ends early", self.problems(f"{LONG}// it\n// does here\n")[0])
        self.assertIn("a.h:1: the comment's line ends early", self.problems("// A line\n// of a sentence.\n")[0])


class Cycles(unittest.TestCase):
    def problems(self, files, known=frozenset()):
        with Tree(files) as tree:
            return check_cycles.check(tree.root, known)[0]

    def python(self, **modules):
        return self.problems({f"bindings/python/src/p/{name}.py": text for name, text in modules.items()})

    def test_headers(self):
        files = {"core/base/a.h": '#include "core/base/b.h"', "core/base/b.h": '#include "core/base/c.h"', "core/base/c.h": ""}
        self.assertEqual(self.problems(files), [])
        files["core/base/c.h"] = '#include "core/base/a.h"'
        self.assertEqual(len(self.problems(files)), 1)

    def test_a_header_and_its_source_are_one(self):
        files = {"core/base/a.h": "", "core/base/a.cc": '#include "core/base/a.h"\n#include "core/base/b.h"',
                 "core/base/b.h": '#include "core/base/a.h"'}
        self.assertIn("core/base/a -> core/base/b", self.problems(files)[0])
        known = {("core/base/a", "core/base/b")}
        self.assertEqual(self.problems(files, known), [])
        files["core/base/a.cc"] = ""
        self.assertIn("take it out of KNOWN", self.problems(files, known)[0])

    def test_modules(self):
        self.assertEqual(self.python(__init__="from .a import f", a="from . import b", b="import os"), [])
        for line in ("from .a import f", "from . import a", "import p.a", "def g():\n    from .a import f"):
            self.assertEqual(len(self.python(__init__="", a="from . import b", b=line)), 1, line)

    def test_imports_for_type_checkers(self):
        line = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import A\n"
        self.assertEqual(self.python(__init__="", a="from .b import f", b=line), [])


class Length(unittest.TestCase):
    def problems(self, name, text):
        with Tree({name: text}) as tree:
            return check_length.check(tree.root)[0]

    @staticmethod
    def function(lines):
        return "int f(int x) {\n" + "  x += 1;\n" * (lines - 3) + "  return x;\n}\n"

    def test_files(self):
        self.assertEqual(self.problems("core/base/a.py", "x = 1\n" * 600), [])
        self.assertIn("601 lines", self.problems("core/base/a.py", "x = 1\n" * 601)[0])
        self.assertEqual(self.problems("capi/include/sotto/sotto.h", "int x;\n" * 601), [])

    def test_functions(self):
        self.assertEqual(self.problems("core/plan/a.cc", self.function(100)), [])
        self.assertIn("function f", self.problems("core/plan/a.cc", self.function(101))[0])

    def test_kernels_may_be_longer(self):
        self.assertEqual(self.problems("core/cpu/a.cc", self.function(150)), [])
        self.assertEqual(len(self.problems("core/cpu/a.cc", self.function(151))), 1)


MEMBERS = """
class [[nodiscard]] Several final : public Base<int> {
 public:
  explicit Several(int x) : x_{x}, y_(f({x})) {
    struct Local { int a; } local{};
  }
  ~Several() override;
  Several(const Several&) = delete;
  Several& operator=(const Several&) =
      delete;
  bool operator==(const Several&) const = default;
  bool operator()(int) const { return x_ < 3 && y_ > 2; }
  template <class T, int N = 3>
  std::array<T, N> get() const;
  static int made();
  using Call = void (*)(int);
  friend class Other;
  enum class Kind : int { kA, kB };
  struct Slot;

 private:
  struct alignas(64) Slot {
    std::atomic<uint64_t> word{0};  // ; }
    int a = 1 < 2, *b = nullptr;
  };
  static constexpr int kSize = 3;
  const int x_;
  int y_ = 1 << 20;
  alignas(64) std::map<int, std::vector<char>> m_ = {{1, {';', '}'}}, {2, {}}};
  void (*raw_)(int) = nullptr;
  std::function<void(int)> f_ = [](int v) { return; }, g_;
};
"""


class Classes(unittest.TestCase):
    def sizes(self, text):
        return {found.name: (found.methods, found.fields) for found in classes(text)}

    def problems(self, text, ceilings):
        with Tree({"core/base/a.h": text}) as tree:
            return check_classes.check(tree.root, ceilings)[0]

    @staticmethod
    def sample(methods, fields):
        return "namespace sotto {\nstruct A {\n" + "  void f();\n" * methods + "  int x;\n" * fields + "};\n}\n"

    def test_what_counts(self):
        self.assertEqual(self.sizes(MEMBERS), {"Several": (5, 6), "Several::Local": (0, 1), "Several::Slot": (0, 3)})

    def test_namespaces_functions_and_unnamed_structs(self):
        text = """namespace a::b { namespace { struct In { struct { int x, y; } pair; union U { int u; }; }; } }
enum class E { kOne };
struct sotto_c { int n; };
int f() { class Here { int a; void g() {} }; return 1'000; }
template <> struct std::hash<In> { size_t operator()(const In& in) const noexcept { return in.x; } };
"""
        self.assertEqual(self.sizes(text), {"a::b::In": (0, 1), "a::b::In::(unnamed)": (0, 2), "a::b::In::U": (0, 1),
                                            "sotto_c": (0, 1), "Here": (1, 1), "std::hash": (1, 0)})

    def test_limits(self):
        self.assertEqual(self.problems(self.sample(40, 16), {}), [])
        self.assertIn("core/base/a.h:2: A has 41 methods; at most 40", self.problems(self.sample(41, 16), {})[0])
        self.assertIn("A has 17 fields; at most 16", self.problems(self.sample(0, 17), {})[0])

    def test_a_ceiling_only_falls(self):
        self.assertEqual(self.problems(self.sample(50, 20), {"A": {"methods": 50, "fields": 20}}), [])
        self.assertIn("at most 50", self.problems(self.sample(51, 0), {"A": {"methods": 50}})[0])
        self.assertIn("lower it to 45", self.problems(self.sample(45, 0), {"A": {"methods": 50}})[0])
        self.assertIn("take it out", self.problems(self.sample(40, 0), {"A": {"methods": 50}})[0])
        self.assertIn("no class B", self.problems(self.sample(1, 1), {"B": {"fields": 20}})[0])


class Programs(unittest.TestCase):
    """The checks as ctest starts them: exit codes."""

    def run_check(self, name, root):
        return subprocess.run([sys.executable, str(HERE / name), "--root", str(root)], capture_output=True, text=True,
                              check=False)

    def test_format(self):
        style = (ROOT / ".clang-format").read_text(encoding="utf-8")
        with Tree({".clang-format": style, "core/base/a.cc": "int f() { return 1; }\n"}) as tree:
            run = self.run_check("check_format.py", tree.root)
            self.assertEqual(run.returncode, 0, run.stdout)
        with Tree({".clang-format": style, "core/base/a.cc": "int f( ) {return 1;}\n"}) as tree:
            run = self.run_check("check_format.py", tree.root)
            self.assertEqual(run.returncode, 1)
            self.assertIn("core/base/a.cc:1", run.stdout)
        torn = "constexpr int kSomething =\n    20;  // of something\n"
        with Tree({".clang-format": style + "ColumnLimit: 30\n", "core/base/a.h": torn}) as tree:
            run = self.run_check("check_format.py", tree.root)
            self.assertEqual(run.returncode, 1)
            self.assertIn("core/base/a.h:1: the comment breaks", run.stdout)

    def test_shell(self):
        with Tree({"a.sh": "#!/bin/bash\necho \"$1\"\n"}) as tree:
            run = self.run_check("check_shell.py", tree.root)
            self.assertEqual(run.returncode, 0, run.stdout)
        with Tree({"a.sh": "#!/bin/bash\ncd $1\nrm -rf \"$1/\"*\nfor x in `ls`; do local y=$x; done\n"}) as tree:
            run = self.run_check("check_shell.py", tree.root)
            self.assertEqual(run.returncode, 1)
            self.assertIn("a.sh:", run.stdout)

    def test_a_violation_is_an_exit_code(self):
        with Tree({"core/base/a.cc": '#include "core/plan/b.h"\n'}) as tree:
            self.assertEqual(self.run_check("check_includes.py", tree.root).returncode, 1)

    def test_an_empty_tree_is_no_success(self):
        with Tree({}) as tree:
            for name in sorted(path.name for path in HERE.glob("check_*.py")):
                self.assertEqual(self.run_check(name, tree.root).returncode, 1, name)


if __name__ == "__main__":
    unittest.main()
