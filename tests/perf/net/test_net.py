"""The network benchmarks without a network: formulas, ratios and verdicts, what counts as wrong, options, the figure."""

import contextlib
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(ROOT / "integration")]

import formulas  # noqa: E402
import gap  # noqa: E402
import measure  # noqa: E402
import output  # noqa: E402
import rows  # noqa: E402
import run  # noqa: E402
import sides  # noqa: E402
import timeline  # noqa: E402
from report import net  # noqa: E402

MILLION = 1 << 20
RANK = """
import json, socket, sys
control = socket.socket(socket.AF_UNIX); control.connect(sys.argv[1])
def write(reply): control.sendall(json.dumps(reply).encode() + b"\\n")
write({"rank": int(sys.argv[2]), "pid": 1})
for line in control.makefile():
    if line.startswith("size"): write({})
    elif line.startswith("series"): write({"ns": 1000 * (1 + int(sys.argv[2]))})
    else:
        print("on its log"); sys.stdout.flush(); write({"error": "no such thing"})
"""


class FakeSide:
    """Answers every command with the same replies."""

    def __init__(self, *replies):
        self.name, self.ranks, self.replies = "sotto", len(replies), list(replies)

    def tell(self, _command, _limit_s=0):
        return self.replies

    def payload(self, method, n, rank):
        return formulas.payload(method, n, self.ranks, rank)

    on_interface = payload


def figure(side, method, *ms, **more):
    return measure.Figure(side, method, ms=list(ms), payload=1000.0, headers=0.0, **{"on_interface": 1000.0, **more})


class Formulas(unittest.TestCase):
    def total(self, method, n, ranks):
        return sum(formulas.payload(method, n, ranks, rank) for rank in range(ranks))

    def test_bytes_of_all_ranks(self):
        for method, ranks, expected in (("fp32", 2, 8388608), ("fp32", 4, 25165824), ("1bit", 2, 262144), ("1bit", 4, 786432),
                                        ("int8", 4, 6389760), ("int4", 4, 3342336), ("bf16", 4, 12582912)):
            self.assertEqual(self.total(method, MILLION, ranks), expected, method)

    def test_a_small_one_goes_to_everybody(self):
        self.assertEqual(formulas.payload("fp32", 1, 4, 2), 12)
        self.assertEqual(formulas.payload("fp32", 5461, 4, 0), 65532)
        self.assertLess(formulas.payload("fp32", 5462, 4, 0), 65532)

    def test_a_compressed_one_is_padded(self):
        self.assertEqual(formulas.payload("1bit", 1, 4, 0), 2 * 3 * 64)

    def test_topk_goes_to_everybody(self):
        self.assertEqual(formulas.payload("topk", 4096, 2, 0), 84)
        self.assertEqual(formulas.payload("topk", 3 * 4096 + 1, 4, 1), 3 * (3 * 84 + 5))  # of one element: a code and levels
        self.assertEqual(formulas.topk_block(2049), 32 * 6 // 8 + 8 + 8 + 4)  # 32 of them, 6 low bits, 64 upper ones

    def test_two_levels(self):
        hosts, per_host = 2, 2
        for method in ("fp32", "int8", "1bit"):
            whole = {"fp32": 4.0, "int8": 260 / 256, "1bit": 1 / 8}[method] * MILLION
            for rank in range(4):
                levels, flat = (f(method, MILLION, hosts, per_host, rank) for f in
                                (formulas.between_hosts, formulas.flat_between_hosts))
                self.assertEqual(levels, whole / 2, method)  # 2 (M - 1) / M of a half
                self.assertEqual(flat, whole, method)
                # Float32: half of the vector to the other, then their halves of the result.
                inside = 4 * MILLION / 2 + whole / 2
                self.assertEqual(formulas.sharded(method, MILLION, hosts, per_host, rank) - levels, inside, method)
        total = sum(formulas.sharded("fp32", 1001, 3, 2, rank) for rank in range(6))
        between = sum(formulas.between_hosts("fp32", 1001, 3, 2, rank) for rank in range(6))
        self.assertEqual(total - between, 2 * 3 * 4 * 1001)

    def test_dropped_operations_empty_the_bucket(self):
        for bytes_ in (1000, 300_000, 2_000_000, 30_000_000):
            carried = measure.drops(bytes_) * bytes_
            self.assertTrue(carried >= measure.BURST or bytes_ < measure.BURST or bytes_ >= 100 * measure.BURST, bytes_)

    def test_quantiles(self):
        self.assertEqual(measure.quantile([3, 1, 2], 0.5), 2)
        self.assertEqual(measure.quantile([1, 2], 0.25), 1.25)
        self.assertEqual(measure.spread([1, 2, 3, 4, 5]), 2 / 3)


class Wrong(unittest.TestCase):
    def check(self, method, *replies):
        return measure.check(FakeSide(*replies), method, 100_000, 1).wrong

    def reply(self, **more):
        return {"checksum": "a", "error_max": 0.0, "error_rms": 0.0, **more}

    def test_right(self):
        self.assertEqual(self.check("fp32", self.reply(), self.reply()), [])

    def test_ranks_that_differ(self):
        self.assertIn("differ between ranks", self.check("fp32", self.reply(), self.reply(checksum="b"))[0])

    def test_an_element_that_is_off(self):
        self.assertIn("off by 0.3", self.check("int4", self.reply(), self.reply(error_max=0.3))[0])
        self.assertIn("off by nan", self.check("int4", self.reply(error_max=float("nan")))[0])

    def test_one_bit_that_points_nowhere(self):
        self.assertIn("relative error", self.check("1bit", self.reply(error_rms=1.0))[0])

    def test_topk_that_sends_nothing(self):
        self.assertIn("relative error 1.000; at most 0.99", self.check("topk", self.reply(error_rms=1.0))[0])
        self.assertEqual(self.check("topk", self.reply(error_rms=0.98)), [])

    def test_counters(self):
        n, ranks = 100_000, 2
        right = [{"payload": 3 * formulas.payload("1bit", n, ranks, r), "header": 10} for r in range(ranks)]
        for reply in right:
            reply |= {"payload_planned": reply["payload"], "header_planned": 10}
        for change in ({}, {"header": 11}, {"payload": 5}, {"payload": 5, "payload_planned": 5}):
            subject = figure("sotto", "1bit")
            measure.compare_counters(FakeSide(None, None), subject, 3, [right[0], {**right[1], **change}], n)
            self.assertEqual(bool(subject.wrong), bool(change), change)


class Rows(unittest.TestCase):
    def setUp(self):
        kernels = [(1.0, 1.0, 1.0)] * 3
        self.figures = {(f.side, f.method): f for f in (
            figure("sotto", "fp32", 40, 44, 40), figure("sotto", "bf16", 20, 20, 20), figure("sotto", "int8", 10, 10, 10),
            figure("sotto", "int4", 5, 5, 5), figure("sotto", "1bit", 1.0, 1.1, 1.0, kernels=kernels),
            figure("gloo", "fp32", 60, 66, 60), figure("mpich", "fp32", 32, 35.2, 32))}

    def rows(self, wanted, bits):
        return {(r.row, r.what): r for r in rows.large_rows(self.figures, wanted, bits, 2.0)}

    def test_the_best_peer_counts(self):
        row = self.rows({10}, 100e6)[10, "mpich fp32 / our 1bit"]
        self.assertAlmostEqual(row.ratio, 32)
        self.assertEqual(row.verdict, "reached")

    def test_without_peers_there_is_no_target(self):
        for side in ("gloo", "mpich"):
            del self.figures[side, "fp32"]
        row = self.rows({10}, 100e6)[10, "sotto fp32 / our 1bit"]
        self.assertEqual(row.verdict, "no target")

    def test_operations_over_gloo_are_row_15_and_no_peer_in_float32(self):
        self.figures["gloo", "1bit"] = figure("gloo", "1bit", 26, 28.6, 26)
        row = self.rows({15}, None)[15, "1bit of tensor operations over gloo / our 1bit"]
        self.assertAlmostEqual(row.ratio, 26)
        self.assertEqual(row.verdict, "reached")
        self.assertEqual(rows.best_peer(self.figures).side, "mpich")

    def test_topk_is_row_31(self):
        self.figures["sotto", "topk"] = figure("sotto", "topk", 0.9, 1.0, 0.9)
        row = self.rows({31}, 100e6)[31, "gloo fp32 / our topk"]
        self.assertAlmostEqual(row.ratio, 60 / 0.9)
        self.assertEqual(row.verdict, "reached")
        self.assertEqual([r for r, _ in self.rows({31}, 10e9)], [31])
        del self.figures["gloo", "fp32"]
        self.assertEqual(self.rows({31}, 100e6), {})

    def test_bound(self):
        # Wire: 1000 bytes at 10 Mbit/s and 95.6 %: 0.837 ms, half of it below the kernels' 2 and 4 ms (2 ranks per core).
        self.assertAlmostEqual(rows.bound_ms(self.figures["sotto", "1bit"], 0, 10e6, 2.0), 2 + 4)
        self.assertAlmostEqual(rows.bound_ms(self.figures["sotto", "1bit"], 0, 0.1e6, 1.0), 80 / 0.956)

    def test_verdicts(self):
        self.assertEqual(rows.Row(14, "", 1.02, 0.01, 1.03, True).verdict, "reached")
        self.assertEqual(rows.Row(14, "", 1.04, 0.01, 1.03, True).verdict, "not reached")
        self.assertEqual(rows.Row(10, "", 30, 0.01, 31).verdict, "not reached")
        self.assertIn("not settled", rows.Row(10, "", 32, 0.2, 31).verdict)

    def test_small(self):
        latencies = [measure.Latency(side, "fp32", 4, medians=medians, all=medians)
                     for side, medians in (("sotto", [1, 1, 1]), ("openmpi", [2, 2, 2]), ("gloo", [20, 20, 20]))]
        found = {r.what: r for r in rows.small_rows(latencies)}
        self.assertAlmostEqual(found["4 B: our fp32 / openmpi"].ratio, 0.5)
        self.assertEqual(found["4 B: gloo / our fp32"].verdict, "reached")
        self.assertIn("gloo", output.small_table(latencies))

    def test_lines_have_the_same_columns(self):
        setting = output.Setting(100e6, {"rate": "100mbit"})
        best = rows.best_peer(self.figures)
        lines = [output.figure_line(f, 1000, best, setting) for f in self.figures.values()]
        lines += [output.row_line(row, 1000, setting) for row in self.rows({10, 14, 16, 17}, 100e6).values()]
        lines += [output.latency_line(measure.Latency("gloo", "fp32", 4, [1, 2], [1, 2]), setting)]
        for line in lines:
            self.assertEqual(tuple(json.loads(line)), output.COLUMNS)
        self.assertIn("mpich fp32 / it", output.large_table(self.figures, 1000, setting))


class Options(unittest.TestCase):
    def parse(self, *words):
        with contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                return run.parse([*words, "--sotto-perf", "x"])
            except SystemExit as end:
                self.assertEqual(end.code, 2)
                return err.getvalue()

    def test_rows(self):
        self.assertEqual(self.parse().rows, {10, 14, 16, 17, 19, 31})
        self.assertEqual(self.parse("--rate", "none", "--peers", "").rows, {13, 19})
        self.assertEqual(self.parse("--rate", "none").rows, {13, 15, 16, 19})
        self.assertEqual(self.parse("--rate", "1gbit", "--delay", "50ms", "--rows", "28,11").rows, {11, 28})

    def test_hosts(self):
        options = self.parse("--hosts", "2x3", "--peers", "openmpi")
        self.assertEqual((options.hosts, options.ranks), ((2, 3), 6))
        for words, text in ((("4",), "not like 2x2"), (("1x4",), "not like 2x2"), (("2x2", "--ranks", "4"), "neither --ranks"),
                            (("2x2", "--rows", "10"), "nor --rows"), (("2x2", "--ucx"), "--ucx does not go with it"),
                            (("2x2", "--one-host"), "--hosts does not go with it")):
            self.assertIn(text, self.parse("--hosts", *words))

    def test_gap(self):
        plain = self.parse("--gap", "10ms")
        self.assertEqual((plain.rate, plain.gap_ranks, plain.sizes), ("none", (2, 4), gap.SIZES))
        one = self.parse("--gap", "10ms", "--ranks", "8", "--n", "1000", "--rate", "1gbit")
        self.assertEqual((one.rate, one.gap_ranks, one.sizes), ("1gbit", (8,), (4000,)))
        self.assertEqual((self.parse().rate, self.parse().ranks, self.parse().n), ("100mbit", 4, 25_000_000))

    def test_one_host(self):
        options = self.parse("--one-host", "--ranks", "2")
        self.assertEqual((options.rate, options.rows), ("none", {13, 15, 16, 19}))
        for words in (("--rate", "1gbit"), ("--delay", "1ms"), ("--loopback",), ("--gap", "10ms"), ("--short",), ("--beside-bulk",)):
            self.assertIn(f"{words[0]} does not go with it", self.parse("--one-host", *words))

    def test_errors(self):
        for words, text in ((("--rate", "fast"), "'fast'"), (("--rate", "0mbit"), "'0mbit'"), (("--delay", "3"), "'3'"),
                            (("--rows", "28"), "row 28 applies to"), (("--rows", "1"), "'1' is not one of"),
                            (("--peers", "nccl"), "'nccl'"), (("--pairs", "6"), "from 7"), (("--ranks", "1"), "from 2"),
                            (("--loopback", "--mtu", "9000"), "--mtu"), (("--mtu", "1000"), "from 1280"),
                            (("--mtu", "9000", "--loss", "1"), "1500"), (("--gap", "10"), "'10'"),
                            (("--gap", "10ms", "--rows", "10"), "--gap"), (("--one-host", "--ucx"), "--ucx"), (("--gap", "10ms", "--peers", "gloo"), "--gap"),
                            (("--plot", "x.svg"), "--json"), (("--gap", "10ms", "--timeline", "x"), "not allowed with"),
                            (("--short", "--beside-bulk"), "not allowed with"), (("--beside-bulk", "--rows", "10"), "--rows"),
                            (("--timeline", "x", "--json", "x"), "--json does not go with it"),
                            (("--ucx", "--gap", "10ms"), "--gap does not go with it"), (("--ucx", "--timeline", "x"), "--timeline does not go with it"),
                            (("--timeline", "/nonexistent/x"), "/nonexistent")):
            self.assertIn(text, self.parse(*words))


class OneHost(unittest.TestCase):
    def latency(self, side, *medians):
        return measure.Latency(side, "fp32", 4, medians=list(medians))

    def test_rows_of_shared_memory(self):
        figures = {(f.side, f.method): f for f in (
            figure("sotto", "fp32", 10, 10), figure("sotto", "1bit", 5, 5), figure(sides.OVER_TCP, "fp32", 16, 16),
            figure("openmpi", "fp32", 9, 9), figure("gloo", "fp32", 30, 30))}
        found = {r.what: (r.ratio, r.target, r.verdict) for r in rows.host_rows(figures, [], 4)}
        self.assertEqual(found, {"our fp32 over TCP / by shared memory": (1.6, 1.5, "reached"),
                                 "openmpi fp32 / by shared memory": (0.9, 1.0, "not reached")})
        small = rows.host_rows({}, [self.latency("sotto", 2, 2), self.latency(sides.OVER_TCP, 5, 5)], 2)
        self.assertEqual([(r.ratio, r.target, r.verdict) for r in small], [(0.4, 0.5, "reached")])
        self.assertEqual({r.target for r in rows.host_rows(figures, [], 3)}, {None})

    def test_ours_over_tcp_is_no_peer(self):
        figures = {(f.side, f.method): f for f in (figure("sotto", "fp32", 10), figure(sides.OVER_TCP, "fp32", 1))}
        self.assertEqual(rows.best_peer(figures).side, "sotto")
        self.assertEqual(rows.small_rows([self.latency("sotto", 2), self.latency(sides.OVER_TCP, 5)]), [])
        self.assertIn("our fp32 over TCP", output.rows_table(rows.host_rows(figures, [], 4)))


class Ucx(unittest.TestCase):
    def test_rows(self):
        figures = {(f.side, f.method): f for f in (figure("sotto", "fp32", 10, 10), figure(sides.OVER_UCX, "fp32", 11, 11))}
        self.assertEqual(rows.best_peer(figures).side, "sotto")
        found = {rate: [(r.ratio, r.target, r.verdict) for r in rows.ucx_rows(figures, [], rate)] for rate in (1e9, 1e8)}
        self.assertEqual(found, {1e9: [(1.1, 1.03, "not reached")], 1e8: [(1.1, None, "no target")]})
        latencies = [measure.Latency(side, "fp32", size, medians=[ms, ms])
                     for side, ms in (("sotto", 10), (sides.OVER_UCX, 11)) for size in (8192, 65536)]
        self.assertEqual([(r.target, r.verdict) for r in rows.ucx_rows({}, latencies, None)],
                         [(1.2, "reached"), (None, "no target")])


class Levels(unittest.TestCase):
    def test_rows(self):
        goodput = measure.GOODPUT * 1e8
        figures = {(f.side, f.method): f for f in (
            figure("sotto", "fp32", 20, 20), figure("sotto", "1bit", 3, 3), figure("openmpi", "fp32", 24, 24),
            figure(sides.SHARDED, "fp32", 10, 10, on_interface=goodput / 8 * 9.6e-3),
            figure(sides.SHARDED, "1bit", 2, 2, on_interface=goodput / 8 * 1e-3))}
        found = {r.what: (round(r.ratio, 2), r.target) for r in rows.level_rows(figures, (2, 2), 1e8)}
        bound = "its bytes between hosts at the rate"
        self.assertEqual(found, {
            "sotto fp32 / sotto sharded fp32": (2, None), "openmpi fp32 / sotto sharded fp32": (2.4, 1.5),
            "sotto 1bit / sotto sharded 1bit": (1.5, 1.8), f"sotto sharded fp32 / {bound}": (1.04, 1.1),
            f"sotto sharded 1bit / {bound}": (2, 1.1)})
        self.assertEqual({r.target for hosts, rate in (((2, 3), 1e8), ((2, 2), 1e9)) for r in rows.level_rows(figures, hosts, rate)},
                         {None})
        self.assertEqual(rows.best_peer(figures).side, "openmpi")


class Processes(unittest.TestCase):
    def start(self, code, ranks=2):
        side = sides.Side("fake", ranks, [([sys.executable, "-c", code, "CONTROL", str(r)], None) for r in range(ranks)])
        self.addCleanup(side.stop)
        side.start()
        return side

    def test_commands(self):
        side = self.start(RANK)
        self.assertEqual([r["ns"] for r in side.tell("series fp32 0 1", 20)], [1000, 2000])
        with self.assertRaisesRegex(sides.SideError, "(?s)fake: no such thing.*on its log"):
            side.tell("check fp32", 20)

    def test_a_rank_that_does_not_start(self):
        with self.assertRaisesRegex(sides.SideError, "(?s)ended with an error.*so it goes"):
            self.start("import sys; sys.exit('so it goes')")

    def test_a_library_that_is_not_there(self):
        with self.assertRaisesRegex(sides.Missing, "mpicc.nothing"):
            sides._compiled("nothing", "/nonexistent")  # pylint: disable=protected-access


class TurnTaker:
    def __init__(self, name, fails_at=None):
        self.name, self.fails_at, self.calls, self.stopped = name, fails_at, 0, False

    def act(self):
        self.calls += 1
        if self.calls == self.fails_at:
            raise sides.SideError(f"{self.name}: no answer")

    def stop(self):
        self.stopped = True


class Turns(unittest.TestCase):
    def turns(self, ours, *peers):
        said = []
        entries = [(side, method) for side in (ours, *peers) for method in ("fp32", "1bit")]
        return measure.Turns(entries, ours, said.append), said

    def test_a_peer_that_fails_is_left_out(self):
        ours, good, bad = TurnTaker("sotto"), TurnTaker("good"), TurnTaker("bad", fails_at=3)
        turns, said = self.turns(ours, good, bad)
        for _ in range(3):
            turns.each(lambda side, _: side.act())
        self.assertEqual((ours.calls, good.calls, bad.calls), (6, 6, 3))
        self.assertEqual(turns.lost, {"bad": "bad: no answer"})
        self.assertEqual((good.stopped, bad.stopped), (False, True))
        self.assertIn("bad: no answer", said[0])

    def test_ours_may_not_fail(self):
        turns, _ = self.turns(TurnTaker("sotto", fails_at=2), TurnTaker("good"))
        with self.assertRaisesRegex(sides.SideError, "sotto: no answer"):
            turns.each(lambda side, _: side.act())


class Figure(unittest.TestCase):
    def lines(self, *records):
        file = tempfile.NamedTemporaryFile("w", suffix=".jsonl")
        self.addCleanup(file.close)
        for side, method, rate, mbit, n, ms in records:
            file.write(json.dumps({**dict.fromkeys(output.COLUMNS), "benchmark": "net", "kind": "time", "side": side,
                                   "method": method, "rate": rate, "rate_mbit": mbit, "ranks": 4, "n": n, "ms_p50": ms}) + "\n")
        file.flush()
        return Path(file.name)

    def test_drawn(self):
        path = self.lines(("sotto", "1bit", "100mbit", 100, 9, 40), ("sotto", "1bit", "none", None, 9, 10),
                          ("gloo", "fp32", "100mbit", 100, 9, 1255), ("gloo", "fp32", "100mbit", 100, 9, 1265),
                          ("sotto", "topk", "100mbit", 100, 9, 30))
        times = net.read_times(path)
        self.assertEqual(times[0]["gloo", "fp32"], {"100mbit": 1260})
        self.assertTrue(net.time_against_rate(times).startswith("<svg"))
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            out = Path(folder, "net.svg")
            self.assertEqual(run.main(["--plot", str(out), "--json", str(path), "--sotto-perf", "x"]), 0)
            self.assertIn("<svg", out.read_text(encoding="utf-8"))

    def test_what_does_not_belong_together(self):
        with tempfile.NamedTemporaryFile("wb") as file:
            file.write(b"\xff\xfe{}\n")
            file.flush()
            with self.assertRaisesRegex(net.ReportError, f"{file.name}: not UTF-8"):
                net.read_times(file.name)
        for records, text in (((), "no times"), ((("sotto", "1bit", "none", None, 9, 1), ("sotto", "1bit", "none", None, 8, 1)),
                                                 "different runs")):
            with self.assertRaisesRegex(net.ReportError, text):
                net.read_times(self.lines(*records))


def trace_of(rank, shift=0.0):
    """An earlier operation and one all-reduce of 2 ranks, 2 segments of 64 elements each: encode, rows, reduce, results, decode."""
    def x(name, ts, dur, **args):
        return {"ph": "X", "name": name, "ts": ts + shift, "dur": dur, "args": {"operation": args.pop("operation", 7), **args}}

    def message(name, ts, dur, phase, segment):
        return x(name, ts, dur, bytes=8, peer=1 - rank, round=phase - 1, segment=segment, phase=phase)
    events = [{"ph": p, "id2": {"local": hex(op)}, "ts": ts + shift} for op, p, ts in ((3, "b", 0), (3, "e", 900), (7, "b", 1000), (7, "e", 11000))]
    events.append(x("recv", 100, 5, operation=3, bytes=8, peer=1 - rank, round=0, segment=0, phase=1))
    for k in range(4):
        events += [x("onebit_encode", 1000 + 100 * k, 100, first=64 * k, elements=64),
                   x("onebit_decode", 10000 + 100 * k, 100, first=64 * k, elements=64)]
    for k in range(2):
        events += [message("send", 2000 + 1000 * k, 1000, 1, k), message("recv", 2000 + 1000 * k, 1000, 1, k),
                   x("onebit_server", 3000 + 1000 * k, 500, first=64 * k, elements=64),
                   message("send", 6000 + 1000 * k, 1000, 2, k), message("recv", 6000 + 1000 * k, 1000, 2, k)]
    return events


class Timeline(unittest.TestCase):
    def read(self, *traces):
        with tempfile.TemporaryDirectory() as folder:
            prefix = str(Path(folder, "line"))
            for path, trace in zip(timeline.files(prefix, len(traces)), traces):
                path.write_text(json.dumps(trace), encoding="utf-8")
            return timeline.read(prefix, len(traces))

    def test_segments_of_the_last_reduction(self):
        events, total = self.read(trace_of(0), trace_of(1, 1000.0))
        self.assertEqual(total, 11.0)
        first, second = timeline.segments(events)
        # Rank 0's chunk: encoded and decoded by rank 1, which is 1 ms later.
        self.assertEqual([round(t, 3) for t in first[0]], [1.1, 2.0, 2.0, 2.5, 7.0, 7.0, 10.1])
        self.assertEqual([round(t, 3) for t in first[1]], [1.2, 3.0, 3.0, 3.5, 8.0, 8.0, 10.2])
        self.assertEqual([round(t, 3) for t in second[1]], [0.4, 4.0, 4.0, 4.5, 7.0, 7.0, 9.4])

    def test_links(self):
        events, total = self.read(trace_of(0), trace_of(1))
        sent = timeline.carried(events[0], "send", total)
        self.assertAlmostEqual(sum(sent), 32)
        self.assertAlmostEqual(sent[1], 8)
        self.assertAlmostEqual(sent[0], 0)
        text = timeline.describe(events, total, 1e6)
        self.assertIn("10.00 ms", text)
        self.assertIn("onebit_server 1.00", text)

    def test_a_trace_without_a_reduction(self):
        with self.assertRaisesRegex(timeline.TimelineError, "rank 0 shows no message"):
            self.read([{"ph": "X", "args": {"operation": 1}}])
        events, _ = self.read(trace_of(0), trace_of(1))
        events[1] = [e for e in events[1] if e.args.get("phase") != 2]
        with self.assertRaisesRegex(timeline.TimelineError, "rank 0 received"):
            timeline.segments(events)


class ShortForm(unittest.TestCase):
    def missed(self, bits, **figures):
        made = {("sotto", method): figure("sotto", method, ms, interface=interface) for method, (ms, interface) in figures.items()}
        return run.below_limits(made, [], [], bits)

    def test_what_our_links_carry(self):
        # 1000 bytes at 1 Mbit/s take 8 ms.
        self.assertEqual(self.missed(1e6, fp32=(9.0, 1010.0)), [])
        self.assertIn("0.5 of the link's rate", self.missed(1e6, fp32=(17.0, 1010.0))[0])
        self.assertIn("1200 bytes on an interface", self.missed(1e6, onebit=(9.0, 1200.0))[0])
        self.assertEqual(self.missed(None, fp32=(17.0, None)), [])

    def test_ratios(self):
        low, high = rows.Row(10, "", 4.9, 0.0), rows.Row(14, "", 3.1, 0.0)
        self.assertEqual(len(run.below_limits({}, [low, high], [], 1e8)), 2)
        slow = measure.Latency("sotto", "fp32", 4, all=[31.0])
        self.assertIn("4 bytes", run.below_limits({}, [], [slow], None)[0])


class BesideBulk(unittest.TestCase):
    def test_what_began_too_late_does_not_count(self):
        side = FakeSide(*[{"ns": 2_000_000, "bulk_ns": 1_000_000_000}] * 2)
        side.tell = lambda command, _=0: [{"ns": [1_000_000] * 100}] * 2 if command.startswith("singles") else side.replies
        found = measure.urgent(side, 1 << 20, 100e6)
        self.assertEqual(found.alone[0], 1.0)
        self.assertEqual((found.beside[0], found.bulk[0], len(found.beside)), (2.0, 1000.0, 15))
        self.assertAlmostEqual(found.segment_ms, 10.97, 1)
        self.assertIn("10.97 ms", output.urgent_table(found))


class Gap(unittest.TestCase):
    def rows(self, *means):
        """One row; means: of each side's turns, the first with the send window."""
        sides_ = [measure.Latency(name, "fp32", 4000, medians=[1], means=list(ms), all=list(ms))
                  for name, ms in zip(("sotto", "sotto, 64 KiB", "sotto, 1024 KiB"), means)]
        return [gap.Row(sides_)]

    def test_the_best_fixed_buffer_counts_turn_by_turn(self):
        row = self.rows([2.2, 5.5, 2.2], [9, 3, 9], [2, 5, 2])[0]
        self.assertEqual(row.best.side, "sotto, 1024 KiB")
        self.assertAlmostEqual(row.ratio, 1.1)
        self.assertEqual(row.verdict, "reached")
        self.assertEqual(self.rows([2.5, 2.5, 2.5], [9, 3, 9], [2, 2, 2])[0].verdict, "not reached")
        self.assertIn("not settled", self.rows([2.5, 2.5, 2], [9, 9, 9], [2, 2, 2])[0].verdict)

    def test_a_stall_in_some_operations_shows(self):
        side = FakeSide({"ns": []}, {"ns": []})
        times = [2_000_000] * 9 + [44_000_000]
        side.tell = lambda command, _=0: [
            {"ns": times} if command.startswith("singles") else
            {"checksum": "a", "error_max": 0.0, "error_rms": 0.0}] * 2
        found = measure.small([side], [(side, "fp32")], [4000], 7, 10, 1, lambda _: None, 10_000)[0]
        self.assertEqual((found.medians[0], found.means[0]), (2.0, 6.2))
        self.assertEqual(gap.stalls(self.rows([6.2], [9], [2])), [])
        self.assertIn("times as long", gap.stalls(self.rows([44], [9], [2]))[0])

    def test_lines_and_table(self):
        rows_ = self.rows([2.2], [9], [2])
        lines = gap.lines(rows_, output.Setting(None, {"rate": "none", "gap": "10ms"}))
        self.assertEqual(tuple(json.loads(lines[-1])), output.COLUMNS)
        self.assertEqual((json.loads(lines[-1])["ratio"], json.loads(lines[-1])["what"]), (1.1, "this / sotto, 1024 KiB"))
        self.assertIn("1024 KiB", gap.table(rows_))

    def test_only_ours_pauses(self):
        told = []
        side = FakeSide({"ns": [1, 1]})
        side.tell = lambda command, _=0: told.append(command) or [{"ns": [1, 1]}]
        measure.one_turn(side, measure.Latency("gloo", "fp32", 4), 2)
        measure.one_turn(side, measure.Latency("sotto", "fp32", 4), 2, 10_000)
        self.assertEqual(told, ["singles fp32 2", "singles fp32 2 10000"])


if __name__ == "__main__":
    unittest.main()
