"""Counting instructions in disassembled code, without a compiler or a disassembler."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import count_instructions as count  # noqa: E402


def kernel_of(*lines, **attributes):
    """A kernel of these labels and instructions."""
    text = [line if line.startswith(".L") else f"        /*0000*/ {line} ;" for line in lines]
    kernel = count.Kernel("k", "k", **attributes)
    kernel.blocks = count.blocks_of(text)
    return kernel


ENCODER = (
    "S2R R0, SR_TID.X",
    ".L_x_1:",  # the loop over quads: two of a thread
    "LDG.E.128 R4, desc[UR4][R2.64]",
    "LDG.E.128 R8, desc[UR4][R2.64+0x1000]",
    "ISETP.NE.AND P0, PT, R4, RZ, PT",
    "@P0 BRA `(.L_x_2)",  # rare
    "FADD R4, R4, R5",
    "BRA `(.L_x_3)",
    ".L_x_2:",
    "FADD R4, R4, R6",
    "FADD R4, R4, R7",
    "FADD R4, R4, R8",
    ".L_x_3:",
    "STG.E.128 desc[UR4][R2.64], R4",
    "ST.E.128 desc[UR4][R2.64+0x1000], R8",
    "BAR.SYNC.DEFER_BLOCKING 0x0",
    "@P1 BRA `(.L_x_5)",
    ".L_x_4:",  # adds terms
    "LDS R9, [R10]",
    "LDS R11, [R10+0x100]",
    "FADD R12, R12, R9",
    "FADD R12, R12, R11",
    "@P2 BRA `(.L_x_4)",
    ".L_x_5:",
    "@P3 BRA `(.L_x_1)",
    "EXIT",
    ".L_x_6:",
    "BRA `(.L_x_6)",
)


def row(**attributes):
    return count.Row("{world}", "file", "k", **{"wide": 2, **attributes})


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


class Counting(unittest.TestCase):
    def test_blocks_end_at_branches_and_begin_at_labels(self):
        kernel = kernel_of(*ENCODER)
        self.assertEqual([len(b.code) for b in kernel.blocks], [1, 4, 2, 3, 4, 5, 1, 1, 1])
        after = [b.next for b in kernel.blocks]
        self.assertEqual(after[:4], [[1], [3, 2], [4], [4]])
        self.assertEqual(after[5:], [[5, 6], [1, 7], [], [8]])

    def test_the_shortest_way_with_the_accesses_counts(self):
        # 11 instructions of the loop for 2 quads, without the rare ones. Of the sums 5 instructions,
        # 4096 / 64 / 2 times by a quarter of the threads, for 4 quads.
        line = cells(count.line_of(row(sums=1), kernel_of(*ENCODER, registers=32), 4))
        self.assertEqual(float(line[1]), 11 / 2 + 5 * 32 / 4 / 4)
        self.assertEqual(line[4], "2")

    def test_targets_are_reached_or_not(self):
        kernel = kernel_of(*ENCODER, registers=32)
        verdicts = [cells(count.line_of(row(target=t), kernel, 4))[3] for t in (6, 5, None)]
        self.assertEqual(verdicts, ["reached", "no", ""])

    def test_the_loop_over_ranks_counts_once_per_rank(self):
        server = kernel_of(
            ".L_x_1:",
            "LDG.E.128 R4, desc[UR4][R2.64]",
            "@P0 BRA `(.L_x_3)",  # no ranks: never
            ".L_x_2:",
            "LDG.E R5, desc[UR4][R6.64]",
            "LDG.E.U8 R7, desc[UR4][R8.64]",
            "FADD R9, R9, R5",
            "@P1 BRA `(.L_x_2)",
            ".L_x_3:",
            "STG.E.128 desc[UR4][R2.64], R4",
            "@P2 BRA `(.L_x_1)",
            "EXIT",
            registers=32,
        )
        for world in (1, 4, 16):
            line = cells(count.line_of(row(ranks=True), server, world))
            self.assertEqual(line[:2], [str(world), f"{4 + 4 * world:.1f}"])

    def test_registers_and_shared_memory_bound_the_thread_blocks(self):
        def fit(**attributes):
            return count.Kernel("k", "k", **attributes).thread_blocks()

        self.assertEqual(
            [fit(registers=r) for r in (32, 33, 40, 41, 48, 64, 65, 255)], [8, 6, 6, 5, 5, 4, 3, 1]
        )
        self.assertEqual(
            [fit(registers=32, shared=s) for s in (0, 16384, 32768, 49152)], [8, 8, 6, 4]
        )

    def test_a_missing_tool_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            nvcc = Path(folder, "nvcc")
            nvcc.write_text("#!/bin/sh\n", encoding="utf-8")
            nvcc.chmod(0o755)
            for given in (
                ["--nvcc", f"{folder}/none"],
                ["--nvcc", str(nvcc), "--nvdisasm", f"{folder}/none"],
            ):
                run = subprocess.run(
                    [sys.executable, "-B", str(HERE / "count_instructions.py"), *given],
                    capture_output=True,
                    text=True,
                    check=False,
                    env={**os.environ, "PATH": folder},
                )
                missing = "nvdisasm" if "--nvdisasm" in given else "nvcc"
                self.assertEqual(run.returncode, 1)
                self.assertIn(f"needs {missing}: ", run.stderr)

    def test_every_row_has_a_file(self):
        for each in count.ROWS:
            self.assertTrue((count.ROOT / "cuda/kernels" / f"{each.file}.cu").is_file(), each)


if __name__ == "__main__":
    unittest.main()
