#!/usr/bin/env python3
"""Row 4 next to other libraries: blockwise int8 and int4 against piquant and torch.

Every library encodes float32 values to codes and scales, and decodes them, over the same number of elements on one
thread. Figures are 10^9 bytes of float32 per second. Libraries that are not installed are skipped, with the reason.

piquant (PyPI: pypiquant, also with --no-deps) is called through its C functions; it has one scale and zero point per
array, found in a pass of its own, which counts. torch: quantize_per_channel with one channel per 256 elements, whose
scales are found by amax.
"""
import argparse
import ctypes
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy

F32, UINT4, UINT8 = 0, 3, 4  # piquant's numbers


def median_seconds(clock, pairs, work):
    work()
    times = []
    for _ in range(pairs):
        start = clock()
        work()
        times.append(clock() - start)
    return statistics.median(times)


def sotto(args):
    """Runs sotto-perf and returns {(codec, variant): seconds}."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as lines:
        command = [args.sotto_perf, "codec_blocks", "--n", str(args.n), "--pairs", str(args.pairs), "--json", lines.name]
        if args.cpu_clock:
            command.append("--cpu-clock")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        rows = [json.loads(line) for line in lines]
    return {(row["benchmark"].removeprefix("codec_"), row["variant"]): row["ours_ms_p50"] / 1e3 for row in rows}


def load_piquant():
    spec = importlib.util.find_spec("piquant")
    path = pathlib.Path(spec.submodule_search_locations[0]) / "libpiquant.so" if spec else None
    if path is None or not path.exists():
        return None, "piquant is not installed (pip install --no-deps pypiquant)"
    lib = ctypes.CDLL(str(path))
    lib.piquant_context_create.restype = ctypes.c_void_p
    lib.piquant_context_create.argtypes = [ctypes.c_size_t]
    void, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    lib.piquant_compute_quant_params_float32.argtypes = [
        void, void, size, number, ctypes.POINTER(ctypes.c_float), ctypes.POINTER(ctypes.c_int64)]
    for call in (lib.piquant_quantize, lib.piquant_dequantize):
        call.argtypes = [void, void, number, void, number, size, ctypes.c_float, ctypes.c_int64, number]
    return lib, ""


def piquant(args, clock):
    lib, reason = load_piquant()
    if lib is None:
        return {}, reason
    context = lib.piquant_context_create(1)
    x = numpy.random.default_rng(1).standard_normal(args.n, dtype=numpy.float32)
    y = numpy.zeros_like(x)
    seconds = {}
    for name, dtype in (("int8", UINT8), ("int4", UINT4)):
        codes = numpy.zeros(args.n, numpy.uint8)
        scale, zero = ctypes.c_float(), ctypes.c_int64()

        def encode():
            lib.piquant_compute_quant_params_float32(
                context, x.ctypes.data, args.n, dtype, ctypes.byref(scale), ctypes.byref(zero))
            lib.piquant_quantize(context, x.ctypes.data, F32, codes.ctypes.data, dtype, args.n, scale, zero, 0)

        def decode():
            lib.piquant_dequantize(context, codes.ctypes.data, dtype, y.ctypes.data, F32, args.n, scale, zero, 0)

        seconds[name, "encode"] = median_seconds(clock, args.pairs, encode)
        seconds[name, "decode"] = median_seconds(clock, args.pairs, decode)
        off = float(numpy.abs(y - x).max())
        if off > scale.value:
            sys.exit(f"peers_blocks: piquant's {name} is off by {off}, more than a step of {scale.value}")
    return seconds, ""


def torch_blocks(args, clock):
    try:
        import torch
    except ImportError:
        return {}, "torch is not installed"
    torch.set_num_threads(1)
    x = torch.randn(args.n // 256, 256)
    zeros = torch.zeros(x.shape[0], dtype=torch.int64)
    out = {}

    def encode():
        out["q"] = torch.quantize_per_channel(x, x.abs().amax(1) / 127, zeros, 0, torch.qint8)

    return {("int8", "encode"): median_seconds(clock, args.pairs, encode),
            ("int8", "decode"): median_seconds(clock, args.pairs, lambda: out["q"].dequantize())}, ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sotto-perf", required=True, help="the program sotto-perf")
    parser.add_argument("--n", type=int, default=25_000_000, help="elements")
    parser.add_argument("--pairs", type=int, default=9, help="timed calls, at least 7")
    parser.add_argument("--cpu-clock", action="store_true", help="processor time, for busy machines")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_clock else time.perf_counter
    ours = sotto(args)
    print(f"{'codec':6} {'what':18} {'library':8} {'GB/s':>7} {'sotto / it':>10}")
    for (codec, what), seconds in ours.items():
        print(f"{codec:6} {what:18} {'sotto':8} {4e-9 * args.n / seconds:7.2f}")
    for name, measure in (("piquant", piquant), ("torch", torch_blocks)):
        seconds, reason = measure(args, clock)
        if reason:
            print(f"{name}: skipped, {reason}")
        for (codec, what), time_of_it in seconds.items():
            rate = 4e-9 * args.n / time_of_it
            print(f"{codec:6} {what:18} {name:8} {rate:7.2f} {time_of_it / ours[codec, what]:10.2f}")


if __name__ == "__main__":
    main()
