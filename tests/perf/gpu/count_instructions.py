#!/usr/bin/env python3
"""Counts the instructions of CUDA kernels per 128 elements, with registers and occupancy.

No GPU is needed: kernels are compiled for one architecture and disassembled, and one way through
the loop over quads is followed. The loop is the one with the most 128-bit accesses to global memory
on a way through, without barriers if it can be, and of those the outermost and shortest one. The
way is the one with the most of these accesses, in the server through the loop over ranks, and of
those the shortest. So branches that only rare values take are left out, such as divisions of
subnormals, and so is what a thread block does once, about 200 instructions in 8192 elements. Where
plain runs had no loop of their own the shortest way is a lower bound.

Needs nvcc, and nvdisasm, which toolkits bring along and PyPI has as nvidia-cuda-nvdisasm:

    tests/perf/gpu/count_instructions.py [--nvdisasm FILE]
"""

import argparse
import math
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# As cuda/CMakeLists.txt.
FLAGS = ["-std=c++20", "-O2", "-DNDEBUG", "--expt-relaxed-constexpr", "-fmad=false"]
FLAGS += ["--prec-div=true", "--prec-sqrt=true", "--ftz=false"]

# Of one multiprocessor of sm_90.
THREADS, REGISTERS, SHARED, BLOCKS = 2048, 65536, 233472, 32
THREADS_OF_BLOCK = 256  # kThreads
LANES = 64  # kNormLanes: threads that add the terms of a sum
STAGED = 4096  # kStaged


@dataclass(frozen=True)
class Row:
    """A kernel of the table."""

    name: str
    file: str
    pattern: str  # of the demangled name
    wide: int  # 128-bit accesses to global memory that a quad needs
    target: int | None = None
    sums: int = 0  # of norm blocks
    ranks: bool = False  # a server


ROWS = [
    Row("1-bit encode", "onebit", r"EncodeKernel<.*TensorInput", 3, 110, 1),
    Row("1-bit encode, momentum (front)", "onebit", r"EncodeKernel<.*LambInput", 4, 160, 1),
    Row("1-bit encode, 0/1 Adam", "zeroone", r"EncodeKernel<.*ZeroOneInput", 5, None, 1),
    Row("1-bit server, W = {world}", "onebit", r"ServerKernel", 2, 150, 1, True),
    Row("1-bit decode", "onebit", r"[ :<]DecodeKernel", 1, 25),
    Row("sum of squares", "adam", r"SumSquaresKernel", 1, None, 1),
    Row("int8 encode with residual", "quant", r"QuantTensors(<\D*4>|>)", 3),
    Row("int8 decode", "quant", r"QuantDecodeKernel(<\D*4>|>)", 1, 60),
    Row("int4 decode", "quant", r"QuantDecodeKernel(<\D*5>|>)", 1, None),
    Row("outer difference", "outer", r"OuterDeltaKernel", 3, None, 1),
    Row("outer norm of an average", "outer", r"OuterNormKernel", 2, None, 1),
    Row("outer momentum, all operands", "outer", r"OuterMomentumKernel", 7, None, 1),
    Row("outer step, all operands", "outer", r"OuterMoveKernel", 13, None, 2),
]


@dataclass
class Block:
    """Instructions that are executed one after the other."""

    code: list[str] = field(default_factory=list)
    next: list[int] = field(default_factory=list)

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for line in self.code)


@dataclass
class Kernel:
    mangled: str
    name: str
    registers: int = 0
    stack: int = 0
    spilled: int = 0
    shared: int = 0
    blocks: list[Block] = field(default_factory=list)

    def thread_blocks(self) -> int:
        """That a multiprocessor has room for; registers are handed out to warps, 256 at a time."""
        of_warp = math.ceil(self.registers * 32 / 256) * 256
        by_registers = REGISTERS // (of_warp * THREADS_OF_BLOCK // 32)
        by_shared = SHARED // (math.ceil(self.shared / 128) * 128 + 1024)
        return min(THREADS // THREADS_OF_BLOCK, BLOCKS, by_registers, by_shared)


class Loop:
    """Blocks from which `end` is reached, `start` being the first and following `end`."""

    def __init__(self, kernel: Kernel, start: int, end: int) -> None:
        self.kernel, self.start, self.end = kernel, start, end
        before: dict[int, list[int]] = {}
        for index, block in enumerate(kernel.blocks):
            for after in block.next:
                before.setdefault(after, []).append(index)
        self.body = {start, end}
        left = [end] if end != start else []
        while left:
            for index in before.get(left.pop(), []):
                if index not in self.body:
                    self.body.add(index)
                    left.append(index)

    def count(self, pattern: str) -> int:
        return sum(self.kernel.blocks[index].count(pattern) for index in self.body)

    def inner(self) -> list["Loop"]:
        found = [loop for loop in loops(self.kernel) if loop.body < self.body]
        return [loop for loop in found if loop.start != self.start]


# Global or generic addresses.
ACCESS = r"\b(LDG?|STG?)\.E\b"
WIDE = r"\b(LDG?|STG?)\.E\S*\.128"


def loops(kernel: Kernel) -> list[Loop]:
    back = [
        (after, index)
        for index, block in enumerate(kernel.blocks)
        for after in block.next
        if after <= index
    ]
    return [Loop(kernel, start, end) for start, end in sorted(set(back))]


def adds_terms(loop: Loop) -> bool:
    """Whether it is the loop in which some threads add the terms that all have staged."""
    return loop.count(r"\bLDS\b") > 0 and loop.count(rf"{ACCESS}|\bSTS\b") == 0


def ranks_at_once(loop: Loop, row: Row) -> int:
    """Ranks whose terms a loop over ranks adds in a round; 0: it is another loop."""
    if not row.ranks or loop.inner() or not loop.count(r"\bLDG?\.E\.U8"):
        return 0
    scales = loop.count(r"\bLDG?\.E\b(?!\.(U8|128|64))")  # one of every rank
    return max(scales, 1)


def adding(loop: Loop, sums: int) -> float:
    """Instructions per 128 elements of adding their terms, where there are any."""
    found = [inner for inner in loop.inner() if adds_terms(inner)]
    found = found or [other for other in loops(loop.kernel) if adds_terms(other)]
    if not found or not sums:
        return 0
    times = STAGED / LANES / found[0].count(r"\bLDS\b")
    of_stage = times * found[0].count("") * sums * LANES / THREADS_OF_BLOCK
    return of_stage * 4 * THREADS_OF_BLOCK / STAGED


def way_through(loop: Loop, row: Row, world: int) -> tuple[int, float]:
    """128-bit accesses and instructions of the way that counts, without adding()."""
    weights = dict.fromkeys(loop.body, 1.0)
    needed = set()
    for inner in loop.inner():
        times: float = 0 if adds_terms(inner) else 1
        if ranks := ranks_at_once(inner, row):
            needed.add(inner.start)
            times = world / ranks
        for index in inner.body:
            weights[index] *= times

    @cache
    def best(index: int) -> tuple[float, float, float]:
        block = loop.kernel.blocks[index]
        own = (block.count(WIDE), index in needed, -weights[index] * len(block.code))
        if index == loop.end:
            return own
        after = [best(n) for n in block.next if n > index and n in loop.body]
        reached = [way for way in after if way[2] != -math.inf]
        if not reached:
            return (0, 0, -math.inf)
        way = max(reached)
        return (own[0] + way[0], own[1] + way[1], own[2] + way[2])

    wide, _, instructions = best(loop.start)
    return int(wide), -instructions


def blocks_of(lines: list[str]) -> list[Block]:
    """The blocks of one function, in the order of their addresses."""
    code: list[tuple[str | None, str]] = []  # label before it, instruction
    label: dict[str, int] = {}
    for line in lines:
        if found := re.match(r"\s*(\.L_x_\d+):", line):
            label[found[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            code.append((None, found[1]))
    starts = {0, *label.values()}
    jumps: dict[int, tuple[str | None, bool]] = {}  # target, whether the next one may follow
    for at, (_, line) in enumerate(code):
        operation = re.match(r"(@!?U?P\w+ )?(\S+)", line)
        assert operation is not None
        guarded = operation[1] is not None
        if operation[2].startswith("BRA"):
            target = re.search(r"`\((\.L_x_\d+)\)", line)
            assert target is not None, line
            always = not guarded and not re.search(r"\bU?P\d", line)
            jumps[at] = (target[1], not always)
        elif operation[2].startswith(("EXIT", "RET", "BRX", "JMP")):
            jumps[at] = (None, guarded)
        if at in jumps:
            starts.add(at + 1)
    order = sorted(start for start in starts if start < len(code))
    number = {start: index for index, start in enumerate(order)}
    out = []
    for index, start in enumerate(order):
        end = order[index + 1] if index + 1 < len(order) else len(code)
        block = Block([line for _, line in code[start:end]])
        to, goes_on = jumps.get(end - 1, (None, True))
        if to is not None and label[to] < len(code):
            block.next.append(number[label[to]])
        if goes_on and index + 1 < len(order):
            block.next.append(index + 1)
        out.append(block)
    return out


def demangled(name: str) -> str:
    found = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def compiled(nvcc: str, nvdisasm: str, file: str, tree: Path, arch: str) -> list[Kernel]:
    """The kernels of one file."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernels.cubin")
        source = tree / "cuda/kernels" / f"{file}.cu"
        command = [nvcc, *FLAGS, f"-I{tree}", f"-arch={arch}", "-cubin", "-Xptxas", "-v"]
        log = subprocess.run(
            [*command, "-o", str(cubin), str(source)], capture_output=True, text=True, check=False
        )
        if log.returncode != 0:
            sys.exit(f"{source} does not compile:\n{log.stderr}")
        text = subprocess.run(
            [nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
    kernels: dict[str, Kernel] = {}
    for part in log.stderr.split("Compiling entry function '")[1:]:
        mangled = part.split("'")[0]
        kernel = kernels[mangled] = Kernel(mangled, demangled(mangled))
        for attribute, pattern in {
            "stack": r"(\d+) bytes stack frame",
            "spilled": r"(\d+) bytes spill stores",
            "registers": r"Used (\d+) registers",
            "shared": r"(\d+) bytes smem",
        }.items():
            if found := re.search(pattern, part):
                setattr(kernel, attribute, int(found[1]))
    for part in re.split(r"^\.text\.", text, flags=re.MULTILINE)[1:]:
        mangled, _, body = part.partition(":\n")
        if mangled in kernels:
            kernels[mangled].blocks = blocks_of(body.splitlines())
    return list(kernels.values())


def line_of(row: Row, kernel: Kernel, world: int) -> str:
    ways = {loop: way_through(loop, row, world) for loop in loops(kernel)}
    most = max(wide for wide, _ in ways.values())
    found = [loop for loop in ways if ways[loop][0] == most]
    found = [loop for loop in found if not loop.count(r"\bBAR\b")] or found
    outer = [loop for loop in found if not any(loop.body < other.body for other in found)]
    loop = min(outer, key=lambda each: ways[each][1])
    quads = most / row.wide  # of a thread: 128 elements of a warp each
    count = ways[loop][1] / quads + adding(loop, row.sums) if quads else math.nan
    verdict = "" if row.target is None else "reached" if count <= row.target else "no"
    fit = kernel.thread_blocks()
    return (
        f"| {row.name.format(world=world)} | {count:.1f} | {row.target or ''} | {verdict} "
        f"| {quads:g} | {kernel.registers} | {kernel.spilled} | {kernel.stack} "
        f"| {fit} ({fit * THREADS_OF_BLOCK * 100 // THREADS} %) |"
    )


def tool(name: str, given: str | None, hint: str) -> str:
    found = given or shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")
    if found is None or shutil.which(found) is None:
        sys.exit(f"count_instructions.py needs {name}: {hint}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nvcc")
    parser.add_argument("--nvdisasm")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--world", type=int, default=4, help="ranks of the server")
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout of Sotto")
    arguments = parser.parse_args()
    nvcc = tool("nvcc", arguments.nvcc, "the CUDA toolkit, 12.5 or later; --nvcc FILE")
    nvdisasm = tool(
        "nvdisasm",
        arguments.nvdisasm,
        "part of the CUDA toolkit, and nvidia-cuda-nvdisasm of PyPI; --nvdisasm FILE",
    )
    files: dict[str, list[Kernel]] = {}
    for file in sorted(path.stem for path in (arguments.tree / "cuda/kernels").glob("*.cu")):
        files[file] = compiled(nvcc, nvdisasm, file, arguments.tree, arguments.arch)
    print(
        "| kernel | instructions per 128 elements | target | | quads per round | registers "
        "| spilled bytes | stack bytes | thread blocks per SM (occupancy) |"
    )
    print("|" + "---|" * 9)
    for row in ROWS:
        matching = [k for k in files[row.file] if re.search(row.pattern, k.name)]
        if not matching:
            sys.exit(f"no kernel in {row.file}.cu has a name like {row.pattern}")
        print(line_of(row, matching[0], arguments.world))
    every = [kernel for kernels in files.values() for kernel in kernels]
    local = [k for k in every if k.stack or k.spilled]
    print(f"\n{len(every)} kernels, {len(local)} with local memory" + (":" if local else "."))
    for kernel in local:
        print(f"- {kernel.name}: stack {kernel.stack} bytes, spilled {kernel.spilled} bytes")


if __name__ == "__main__":
    main()
