"""tests/gpu.sh with stand-ins for cmake, the programs that it builds and Python: what fails hides nothing, and is said at the end."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("sotto", "sotto-run", "sotto-perf-gpu", "sotto-test-cuda_device", "sotto-test-kernels_cuda", "sotto-test-cuda",
            "sotto-test-conformance", "sotto-test-nccl_ranks")
# What a build needs beside these.
TOOLS = {"cmake": "", "strip": 'cp "$3" "$2"', "ldd": "", "git": "echo 0a1b2c3", "nvcc": "echo 'tools, release 13.0, V13.0.1'"}
# A library and programs that are installed, under the names of ours.
SMALL_PROJECT = """cmake_minimum_required(VERSION 3.25)
project(small C)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
file(WRITE library.c "int answer(void) { return 42; }")
file(WRITE program.c "int answer(void); int main(void) { return answer(); }")
add_library(sotto SHARED library.c)
set_target_properties(sotto PROPERTIES VERSION 0.2.0 SOVERSION 0)
foreach(program sotto-cli PROGRAMS)
  add_executable(${program} program.c)
  target_link_libraries(${program} PRIVATE sotto)
endforeach()
set_target_properties(sotto-cli PROPERTIES OUTPUT_NAME sotto INSTALL_RPATH "$ORIGIN/../lib")
install(TARGETS sotto sotto-run sotto-cli)
"""
# Notes its name, its words and its environment, and does what the file of its name says.
PROGRAM = """#!/bin/bash
printf '%s\\n' "${0##*/} $*" >>"$STAND_INS/calls"
printf '%s\\n' "${0##*/} ${CUDA_MODULE_LOADING-} ${CUDA_DEVICE_MAX_CONNECTIONS-} ${GTEST_SHARD_INDEX-}/${GTEST_TOTAL_SHARDS-}${PINNED_ALLOCATIONS:+ $PINNED_ALLOCATIONS}" \
  >>"$STAND_INS/environments"
[ ! -e "$STAND_INS/${0##*/}.does" ] || . "$STAND_INS/${0##*/}.does"
"""
DEVICE = "cuda:0 (Stand-in)"
CASES = "echo '[  PASSED  ] 9 tests.'"
NCCL_2_28, NCCL_2_30 = "22809 /torch/libnccl.so.2", "23000 /torch/libnccl.so.2"
EVERYTHING = [
    "device@eager", "device@default", "kernels@default", "memcheck@default", "kernelcheck@default",
    "racecheck@default", "capi@eager", "capi@default",
    "streams@one_queue", "conformance@eager", "conformance@default", "nccl@eager", "nccl@default", "nccl@one_queue", "torch_loop@eager", "torch_loop@default",
    "torch_loop@one_queue", "python@default", "bench@default", "peers@default"]


class Checkout:
    """What gpu.sh needs of a checkout, with everything built and in the folder that is carried."""

    def __init__(self, folder, devices=DEVICE):
        self.root, self.stand_ins = Path(folder) / "checkout", Path(folder) / "stand_ins"
        self.built, self.carried = self.root / "build/cuda/bin", self.root / "build/gpu"
        for place in (self.stand_ins, self.built, self.carried / "bin"):
            place.mkdir(parents=True)
        for name in ("tests/gpu.sh", "integration/common.sh"):
            (self.root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        with open(self.root / "integration/common.sh", "a", encoding="utf-8") as file:
            file.write(f'find_cmake() {{ echo "{self.stand_ins}/cmake"; }}\nfind_ninja() {{ echo ninja; }}\n')
        for name, does in TOOLS.items():
            self.program(self.stand_ins, name, does)
        for name in PROGRAMS:
            self.program(self.built, name, CASES if "test" in name else "")
            self.program(self.carried / "bin", name)
        (self.carried / "built").write_text("0a1b2c3 90 13.0\n", encoding="utf-8")
        self.does("sotto", f"echo 'other devices   {devices}'")
        self.does("sotto-run", 'shift 3; exec "$@"')
        self.program(self.stand_ins, "nvidia-smi", "echo 580.1")
        self.program(self.stand_ins, "compute-sanitizer", 'shift 6; exec "$@"')
        self.python()

    def small_project(self):
        """For the cmake, ninja, strip and ldd of this machine."""
        shutil.copy(ROOT / "integration/common.sh", self.root / "integration/common.sh")
        shutil.copy(ROOT / "CMakePresets.json", self.root / "CMakePresets.json")
        programs = " ".join(name for name in PROGRAMS if name != "sotto")
        (self.root / "CMakeLists.txt").write_text(SMALL_PROJECT.replace("PROGRAMS", programs), encoding="utf-8")
        for name in ("cmake", "strip", "ldd"):
            (self.stand_ins / name).unlink()
        shutil.rmtree(self.root / "build")

    def program(self, place, name, does=None):
        (place / name).write_text(PROGRAM, encoding="utf-8")
        (place / name).chmod(0o755)
        if does is not None:
            self.does(name, does)

    def does(self, name, what):
        (self.stand_ins / f"{name}.does").write_text(what + "\n", encoding="utf-8")

    def python(self, lacks="", nccl=NCCL_2_28):
        """--python: what it lacks, and its NCCL; None: it has none."""
        self.program(self.stand_ins, "python3", f"""case "$*" in
  *ask.py\\ nccl*) {f"echo '{nccl}'" if nccl else "echo 'no NCCL here'; exit 77"} ;;
  *ask.py\\ modules*) {f"echo '{lacks}'; exit 77" if lacks else ":"} ;;
  *pytest*) echo '=== 5 passed, 30 deselected in 1.23s ===' ;;
esac""")

    def run(self, *words, where=None, path="", **environment):
        for name in ("calls", "environments"):
            (self.stand_ins / name).write_text("", encoding="utf-8")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "GTEST_", "SOTTO_"))}
        answer = subprocess.run(
            ["/bin/bash", str(self.root / "tests/gpu.sh"), *words], cwd=where or self.root, capture_output=True, text=True,
            timeout=120, check=False,
            env={**inherited, "STAND_INS": str(self.stand_ins), "PATH": f"{path}{self.stand_ins}:{os.environ['PATH']}", **environment})
        answer.calls, answer.environments = (
            (self.stand_ins / name).read_text(encoding="utf-8").splitlines() for name in ("calls", "environments"))
        answer.names = [call.split()[0] for call in answer.calls]
        answer.lines = answer.stdout.splitlines()
        # By part: how it ended, and what is said of it.
        answer.parts = dict(re.findall(r"^(?:passed|skipped|FAILED) +(\S+) +(.*)$", answer.stdout, re.MULTILINE))
        answer.ended = dict((part, how) for how, part in
                            re.findall(r"^(passed|skipped|FAILED) +(\S+)  ", answer.stdout, re.MULTILINE))
        return answer


class Gpu(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def checkout(self, devices=DEVICE):
        return Checkout(self.folder, devices)


class Options(Gpu):
    def test_what_is_refused(self):
        checkout = self.checkout()
        for words, text in (
                (["--python"], "--python needs a value"), (["--fast"], "unknown option '--fast'"),
                (["--only", "device,kernel"], "'kernel'"), (["--only", "device@one_queue"], "'device@one_queue'"),
                (["--shard", "3/2"], "'3/2'"), (["--shard", "0/2"], "'0/2'"), (["--shard", "2"], "'2'"),
                (["--only", "device", "--shard", "2/3"], "leaves nothing to run"),
                (["--only", "bench", "--no-bench"], "without --no-bench"), (["--no-build", "--build-only"], "nothing to do"),
                (["--no-build", "--arch", "90"], "--arch is for a build"), (["--build-only", "--strict"], "are for a run"),
                (["--build-only", "--only", "device"], "are for a run"), (["--build-only", "--n", "5"], "are for a run"),
                (["--build-only", "--json", "x"], "are for a run"), (["--build-only", "--python", "x"], "are for a run"),
                (["--only", ","], "names no suite"), (["--only", "", "--no-build"], "names no suite"),
                (["--n", "340M"], "'340M'"), (["--n", "0"], "'0'"), (["--json", "no/such/x"], "no/such/x"),
                (["--no-bench", "--n", "5"], "benchmarks"), (["--no-bench", "--json", "x"], "benchmarks"),
                (["--only", "device", "--n", "5"], "benchmarks")):
            answer = checkout.run(*words)
            self.assertEqual(answer.returncode, 2, words)
            self.assertIn(text, answer.stderr)
            self.assertEqual(answer.calls, [])

    def test_help_lists_every_suite(self):
        answer = self.checkout().run("--help")
        self.assertEqual(answer.returncode, 0)
        listed = answer.stdout.split("what\n", 1)[1].splitlines()
        parts = [f"{line.split()[0]}@{environment}" for line in listed for environment in line.split()[2].split(",")]
        self.assertEqual(parts, EVERYTHING)

    def test_every_shard_ends_within_8_minutes(self):
        checkout = self.checkout()
        for line in checkout.run("--help").stdout.split("what\n", 1)[1].splitlines():
            suite, shards = line.split()[:2]
            limits = []
            for shard in range(int(shards)):
                answer = checkout.run("--no-build", "--only", suite, "--shard", f"{shard + 1}/{shards}")
                limits = re.findall(r"^== \S+, (\d+) min (\d+) s at most", answer.stdout, re.MULTILINE)
                self.assertGreater(sum(60 * int(m) + int(s) for m, s in limits), 0)
                self.assertLessEqual(sum(60 * int(m) + int(s) for m, s in limits), 480, suite)

    def test_paths_are_those_of_the_caller(self):
        checkout = self.checkout()
        where = Path(self.folder) / "elsewhere"
        (where / "bin").mkdir(parents=True)
        (where / "bin/python3").symlink_to(checkout.stand_ins / "python3")
        checkout.carried.rename(where / "carried")
        checkout.does("sotto-perf-gpu", "echo '{}' >>\"${@: -1}\"")
        answer = checkout.run("--no-build", "--folder", "carried", "--json", "figures.json", "--python", "bin/python3", "--only",
                              "bench,nccl", where=where, SOTTO_NCCL_LIBRARY="lib/libnccl.so.2")
        self.assertEqual(answer.returncode, 0, answer.stdout + answer.stderr)
        self.assertIn(f"python3 -B tests/gpu/ask.py nccl {where.resolve()}/lib/libnccl.so.2", answer.calls)
        self.assertEqual(json.loads((where / "figures.json").read_text(encoding="utf-8")), {})


class Builds(Gpu):
    def test_what_cannot_be_built(self):
        checkout = self.checkout()
        checkout.does("cmake", "exit 1")
        answer = checkout.run()
        self.assertEqual(answer.returncode, 1)
        self.assertIn("integration/setup.sh", answer.stderr)
        self.assertEqual(answer.names, ["cmake"])

    def test_what_is_built_can_be_carried(self):
        checkout = self.checkout()
        shutil.rmtree(checkout.carried)
        for name in ("libhwy.so.1", "libsotto.so.0"):
            (checkout.built / name).write_text(name, encoding="utf-8")
        checkout.does("ldd", f"""cat <<'END'
{checkout.built}/sotto:
\tlinux-vdso.so.1 (0x00007ffd)
\tlibsotto.so.0 => {checkout.built}/libsotto.so.0 (0x00007f01)
\tlibhwy.so.1 => {checkout.built}/libhwy.so.1 (0x00007f02)
\tlibstdc++.so.6 => /usr/lib/libstdc++.so.6 (0x00007f03)
\tlibgcc_s.so.1 => /lib/libgcc_s.so.1 (0x00007f04)
\tlibm.so.6 => /lib/libm.so.6 (0x00007f05)
\tlibc.so.6 => /lib/libc.so.6 (0x00007f06)
\t/lib64/ld-linux-x86-64.so.2 (0x00007f07)
END""")
        answer = checkout.run("--build-only", "--arch", "90-real")
        self.assertEqual(answer.returncode, 0, answer.stdout + answer.stderr)
        self.assertIn("-DSOTTO_CUDA_ARCHITECTURES=90-real", answer.calls[0])
        self.assertIn("-DCMAKE_BUILD_RPATH=$ORIGIN/../lib", answer.calls[0])
        self.assertEqual(sorted(path.name for path in (checkout.carried / "bin").iterdir()), sorted(PROGRAMS))
        self.assertEqual(sorted(path.name for path in (checkout.carried / "lib").iterdir()), ["libhwy.so.1", "libsotto.so.0"])
        self.assertEqual((checkout.carried / "built").read_text(encoding="utf-8"), "0a1b2c3 90-real 13.0\n")
        self.assertEqual(answer.names.count("strip"), len(PROGRAMS) + 2)
        self.assertEqual(answer.lines[-4], "== built: commit 0a1b2c3, CUDA architectures 90-real, CUDA toolkit 13.0")
        self.assertEqual(answer.lines[-3].split(), ["programs", *PROGRAMS])
        self.assertEqual(answer.lines[-2].split(), ["libraries", "libhwy.so.1", "libsotto.so.0"])
        self.assertRegex(answer.lines[-1], r"/build/gpu: \d+ MiB$")
        self.assertNotIn("sotto", answer.names)
        shutil.rmtree(checkout.built)
        answer = checkout.run("--no-build", "--only", "device")
        self.assertEqual(answer.returncode, 0, answer.stdout + answer.stderr)
        for tool in TOOLS:
            self.assertNotIn(tool, answer.names)

    def test_cmake_takes_how_it_is_configured(self):
        checkout = self.checkout()
        checkout.small_project()
        answer = checkout.run("--build-only", "--arch", "90")
        self.assertEqual(answer.returncode, 0, answer.stdout + answer.stderr)
        carried = Path(self.folder) / "carried"
        checkout.carried.rename(carried)
        shutil.rmtree(checkout.root)
        for name in PROGRAMS:
            self.assertEqual(subprocess.run([carried / "bin" / name], check=False).returncode, 42, name)

    def test_a_build_that_breaks_off_is_none(self):
        checkout = self.checkout()
        checkout.does("strip", "exit 1")
        self.assertEqual(checkout.run("--build-only").returncode, 1)
        answer = checkout.run("--no-build")
        self.assertEqual(answer.returncode, 1)
        self.assertIn("--build-only", answer.stderr)
        self.assertEqual(answer.calls, [])


class Runs(Gpu):
    def test_everything_passes(self):
        answer = self.checkout().run("--n", "1000")
        self.assertEqual(answer.returncode, 0, answer.stdout + answer.stderr)
        self.assertEqual(list(answer.parts), EVERYTHING)
        self.assertEqual(answer.lines[-1], "20 suites passed, 0 failed, 0 skipped")
        self.assertEqual(answer.names[:2], ["cmake", "cmake"])
        self.assertRegex(answer.parts["device@eager"], r"^0 min \d\d s  9 cases passed$")
        self.assertIn("5 cases passed", answer.parts["python@default"])
        python = [call for call in answer.calls if call.startswith("python3") and "ask.py" not in call]
        self.assertEqual([call.split()[2] for call in python], ["tests/gpu/torch_loop.py"] * 3 + ["-m", "tests/perf/peers_gpu.py"])
        self.assertTrue(all(call.endswith(f"--n 1000 --json {call.split()[-1]}") for call in answer.calls if "--json" in call))

    def test_a_row_for_the_table(self):
        answer = self.checkout().run("--no-build", "--only", "device,nccl@default")
        self.assertRegex(answer.lines[-2], r"^\| 20\d\d-\d\d-\d\d \| cuda:0 \(Stand-in\) \| 580\.1 \| 13\.0 \| 2\.28\.9 \| 0a1b2c3 \| "
                         r"device@eager device@default nccl@default, shard 1/1 \| 3 suites passed, 0 failed, 0 skipped \|$")

    def test_without_a_device_nothing_runs(self):
        checkout = self.checkout("no CUDA device: there is no driver")
        for words, code, strictly in (([], 77, ""), (["--strict"], 1, ", which --strict counts as failed")):
            answer = checkout.run("--no-build", *words)
            self.assertEqual(answer.returncode, code, answer.stderr)
            self.assertIn("there is no driver", answer.stdout)
            self.assertEqual(answer.lines[-1], f"0 suites passed, 0 failed, 20 skipped{strictly}")
            self.assertEqual(answer.names, ["sotto"])

    def test_only_what_is_named(self):
        answer = self.checkout().run("--no-build", "--only", "streams,device@default")
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertEqual(list(answer.parts), ["device@default", "streams@one_queue"])
        self.assertEqual(answer.names, ["sotto", "sotto-test-cuda_device", "sotto-test-cuda", "nvidia-smi"])
        self.assertIn("--gtest_filter=CudaStreams.*", answer.calls[2])

    def test_no_bench(self):
        self.assertEqual(list(self.checkout().run("--no-build", "--no-bench").parts), EVERYTHING[:-2])

    def test_shards_divide_cases(self):
        checkout = self.checkout()
        answer = checkout.run("--no-build", "--only", "conformance@eager,device@default", "--shard", "1/4")
        self.assertEqual(list(answer.parts), ["device@default", "conformance@eager"])
        self.assertEqual(answer.environments[1:3], ["sotto-test-cuda_device   /", "sotto-test-conformance EAGER 32 0/4"])
        self.assertIn("conformance@eager, 4 min 00 s at most", answer.stdout)
        answer = checkout.run("--no-build", "--only", "conformance@eager,device@default", "--shard", "4/4")
        self.assertEqual(answer.environments[1:2], ["sotto-test-conformance EAGER 32 3/4"])
        self.assertEqual(list(answer.parts), ["conformance@eager"])

    def test_environments(self):
        answer = self.checkout().run("--no-build", "--only", "nccl", CUDA_MODULE_LOADING="LAZY", CUDA_DEVICE_MAX_CONNECTIONS="4")
        self.assertEqual([line for line in answer.environments if "nccl_ranks" in line],
                         ["sotto-test-nccl_ranks EAGER 32 /", "sotto-test-nccl_ranks   /", "sotto-test-nccl_ranks  1 /"])
        self.assertIn("CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32\n", answer.stdout)

    def test_what_is_skipped_fails_when_strict(self):
        checkout = self.checkout()
        checkout.python(nccl=None)
        for words, code, last in ((["--only", "nccl@eager,device"], 0, "2 suites passed, 0 failed, 1 skipped"),
                                  (["--only", "nccl@eager,device", "--strict"], 1,
                                   "2 suites passed, 0 failed, 1 skipped, which --strict counts as failed"),
                                  (["--only", "device", "--strict"], 0, "2 suites passed, 0 failed, 0 skipped")):
            answer = checkout.run("--no-build", *words)
            self.assertEqual(answer.returncode, code, answer.stdout)
            self.assertEqual(answer.lines[-1], last)
        answer = checkout.run("--no-build", "--only", "nccl@eager")
        self.assertRegex(answer.stdout, r"(?m)^skipped  nccl@eager  .*no NCCL here$")


class Failures(Gpu):
    def test_a_failure_hides_nothing(self):
        checkout = self.checkout()
        checkout.does("sotto-test-kernels_cuda", "echo '[ RUN      ] A.crashes'; kill -SEGV $$")
        checkout.does("sotto-perf-gpu", "exit 2")
        checkout.does("sotto-test-cuda", "echo '[  FAILED  ] 1 test, listed below:'; echo '[  FAILED  ] A.b, where x = 1'; exit 1")
        checkout.program(checkout.stand_ins, "timeout",
                         '[[ $1 != --* ]] || shift\nshift\n[[ $* != *sotto-test-conformance* ]] || exit 124\nexec "$@"')
        answer = checkout.run("--no-build")
        self.assertEqual(answer.returncode, 1)
        self.assertEqual(list(answer.parts), EVERYTHING)
        self.assertIn("exit code 139, in A.crashes", answer.parts["kernels@default"])
        self.assertIn("exit code 1, A.b", answer.parts["capi@eager"])
        self.assertIn("ended after 12 min 00 s", answer.parts["conformance@eager"])
        self.assertIn("exit code 2", answer.parts["bench@default"])
        self.assertEqual(answer.lines[-1], "10 suites passed, 10 failed, 0 skipped")

    def test_a_suite_that_does_not_end(self):
        checkout = self.checkout()
        checkout.does("sotto-test-cuda_device", "echo '[ RUN      ] A.ends'; echo '[ RUN      ] A.hangs'; sleep 100 & wait")
        script = checkout.root / "tests/gpu.sh"
        script.write_text(re.sub(r"'device  .*", "'device 1 1 default x'", script.read_text(encoding="utf-8")).replace(
            "60 * minutes", "5 * minutes"), encoding="utf-8")
        answer = checkout.run("--no-build", "--only", "device")
        self.assertEqual(answer.returncode, 1, answer.stderr)
        self.assertIn("ended after 0 min 05 s, in A.hangs", answer.parts["device@default"])

    def test_programs_without_cases(self):
        checkout = self.checkout()
        for says, ended, text in (
                ("[  PASSED  ] 0 tests.", "FAILED", "no case ran"),
                ("a.cc:1: Skipped\nneeds two CUDA devices\n\n[  PASSED  ] 0 tests.", "skipped", "needs two CUDA devices"),
                ("a.cc:1: Skipped\nneeds two CUDA devices\n\n[  PASSED  ] 3 tests.", "passed",
                 "3 cases passed, some skipped: needs two CUDA devices")):
            checkout.does("sotto-test-cuda_device", f"cat <<'END'\n{says}\nEND")
            answer = checkout.run("--no-build", "--only", "device@eager")
            self.assertEqual(answer.ended, {"device@eager": ended}, answer.stdout)
            self.assertIn(text, answer.parts["device@eager"])

    def test_a_python_without_torch(self):
        checkout = self.checkout()
        checkout.python("torch cannot be imported: there is none")
        answer = checkout.run("--no-build", "--only", "torch_loop,python,peers,bench")
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertEqual(answer.ended, {
            "torch_loop@eager": "skipped", "torch_loop@default": "skipped", "torch_loop@one_queue": "skipped",
            "python@default": "skipped", "bench@default": "passed", "peers@default": "skipped"})
        self.assertIn("torch cannot be imported: there is none", answer.parts["python@default"])
        self.assertEqual(len([call for call in answer.calls if "ask.py modules torch" in call]), 2)  # once per list
        # That of the checkout, where there is one.
        (checkout.root / ".venv/bin").mkdir(parents=True)
        checkout.program(checkout.root / ".venv/bin", "python", "echo 'numpy is of another Python'; exit 77")
        answer = checkout.run("--no-build", "--only", "python")
        self.assertIn("numpy is of another Python", answer.parts["python@default"])
        answer = checkout.run("--no-build", "--only", "python", "--python", "no/such/python")
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertIn("no/such/python cannot be run", answer.parts["python@default"])


class Sanitizers(Gpu):
    def test_tools_have_a_program_each(self):
        answer = self.checkout().run("--no-build", "--only", "memcheck,kernelcheck,racecheck", "--shard", "2/2")
        self.assertEqual(answer.returncode, 0, answer.stdout + answer.stderr)
        self.assertEqual(list(answer.parts), ["memcheck@default", "kernelcheck@default", "racecheck@default"])
        calls = [call.split() for call in answer.calls if call.startswith("compute-sanitizer")]
        self.assertEqual([(call[2], Path(call[7]).name) for call in calls],
                         [("memcheck", "sotto-test-cuda"), ("memcheck", "sotto-test-kernels_cuda"),
                          ("racecheck", "sotto-test-kernels_cuda")])
        for call in calls:
            self.assertEqual(call[3:7], ["--error-exitcode", "99", "--report-api-errors", "no"])
        self.assertEqual([line for line in answer.environments if "sotto-test" in line],
                         ["sotto-test-cuda   1/2", "sotto-test-kernels_cuda   1/2 own", "sotto-test-kernels_cuda   1/2"])

    def test_what_they_find_fails(self):
        checkout = self.checkout()
        checkout.does("compute-sanitizer", f"{CASES}; echo '========= ERROR SUMMARY: 1 error'; exit 99")
        answer = checkout.run("--no-build", "--only", "memcheck")
        self.assertEqual(answer.returncode, 1)
        self.assertIn("exit code 99", answer.parts["memcheck@default"])

    def test_without_the_tool_they_are_skipped(self):
        checkout = self.checkout()
        (checkout.stand_ins / "compute-sanitizer").unlink()
        toolkit = Path(self.folder) / "toolkit"
        for words, code in (([], 0), (["--strict"], 1)):
            answer = checkout.run("--no-build", "--only", "memcheck,racecheck", *words, CUDA_HOME=str(toolkit),
                                  PATH=f"{checkout.stand_ins}:/usr/bin:/bin")
            self.assertEqual(answer.returncode, code, answer.stdout)
            self.assertEqual(set(answer.ended.values()), {"skipped"})
            self.assertIn(f"no compute-sanitizer in PATH, nor in {toolkit}/bin", answer.parts["racecheck@default"])
        (toolkit / "bin").mkdir(parents=True)
        checkout.program(toolkit / "bin", "compute-sanitizer")
        answer = checkout.run("--no-build", "--only", "racecheck", CUDA_HOME=str(toolkit))
        self.assertEqual(answer.ended, {"racecheck@default": "passed"})


class Nccl(Gpu):
    def settings(self, nccl, devices=DEVICE):
        checkout = Checkout(tempfile.mkdtemp(dir=self.folder), devices)
        checkout.python(nccl=nccl)
        checkout.does("sotto-test-nccl_ranks", "env | grep ^NCCL_; echo \"from $SOTTO_NCCL_LIBRARY\"")
        checkout.does("sotto-run", 'shift 3; SOTTO_RANK=1 exec "$@"')
        answer = checkout.run("--no-build", "--only", "nccl@default")
        self.assertEqual(answer.returncode, 0, answer.stdout + answer.stderr)
        self.assertIn("from /torch/libnccl.so.2\n", answer.stdout)
        self.assertIn("NCCL_DEBUG=WARN\n", answer.stdout)
        return {line for line in answer.lines if line.startswith("NCCL_")}

    def test_two_ranks_on_one_device(self):
        self.assertIn("NCCL_MULTI_RANK_GPU_ENABLE=1", self.settings(NCCL_2_30))
        old = self.settings(NCCL_2_28)
        self.assertLessEqual({"NCCL_HOSTID=rank1", "NCCL_MNNVL_ENABLE=0", "NCCL_IB_DISABLE=1", "NCCL_CUMEM_ENABLE=0"}, old)
        self.assertNotIn("NCCL_MULTI_RANK_GPU_ENABLE=1", old)

    def test_on_devices_of_their_own(self):
        self.assertEqual(self.settings(NCCL_2_28, "cuda:0 (A), cuda:1 (A)"), {"NCCL_DEBUG=WARN"})


if __name__ == "__main__":
    unittest.main()
