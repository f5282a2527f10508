// Row 4: casts and blockwise integers.
#include <fmt/core.h>

#include "tests/perf/benchmarks.h"
#include "tests/perf/workload.h"
#include "tests/perf/yardsticks.h"

namespace sotto::perf {
namespace {

constexpr uint64_t kCheckElements = (1 << 20) + 512;

struct Format {
  const char* name;
  CodecKind kind;
  uint32_t block;
};
constexpr Format kFormats[] = {{"int8", CodecKind::kInt8, 256},
                               {"int4", CodecKind::kInt4, 128},
                               {"bf16", CodecKind::kBf16, 0},
                               {"fp16", CodecKind::kFp16, 0}};

double payload_per_element(const Format& f) {
  const PayloadUnit unit = payload_unit(f.kind, f.block);
  return static_cast<double>(unit.bytes) / unit.elements;
}

// Encoder, with or without residual, and decoder of n elements, a multiple of 512.
struct Blocks {
  Blocks(const Options& options, SimdLevel level, const Format& f, uint64_t count)
      : work(options, level),
        n(count),
        x(work.random(n, 1)),
        e(work.random(n, 2, 0.01f)),
        y(work.zeros<float>(n)),
        inputs(work.list_of({x})),
        outputs(work.list_of({y})),
        bytes(payload_unit(f.kind, f.block).bytes_of(n)),
        payload(work.zeros<uint8_t>(bytes)),
        flags(work.zeros<uint32_t>(1)),
        tables(work.pieces(n, n)) {
    args.kind = f.kind;
    args.block = f.block;
  }
  void encode(bool residual) {
    work.run(KernelId::kQuantEncode, {inputs, residual ? e : nullptr, payload, flags}, &args,
             tables);
  }
  void decode() { work.run(KernelId::kQuantDecode, {payload, outputs}, &args, tables); }

  Workload work;
  uint64_t n;
  float* x;
  float* e;
  float* y;
  void* inputs;
  void* outputs;
  uint64_t bytes;
  uint8_t* payload;
  uint32_t* flags;
  std::vector<std::vector<Piece>> tables;
  QuantArgs args{};
};

std::string check(const Options& options, const Format& f) {
  Blocks ours(options, options.simd, f, kCheckElements);
  Blocks reference({.threads = 1}, SimdLevel::kScalar, f, kCheckElements);
  for (Blocks* b : {&ours, &reference}) {
    b->encode(true);
    b->decode();
  }
  std::string e = difference("payload", ours.payload, reference.payload, ours.bytes);
  if (e.empty()) e = difference("error", ours.e, reference.e, 4 * ours.n);
  if (e.empty()) e = difference("y", ours.y, reference.y, 4 * ours.n);
  return e;
}

}  // namespace

void codec_blocks(const Options& options, std::vector<Measurement>* out) {
  const uint64_t n = options.n / 512 * 512;
  Workload other(options, options.simd);
  float* x = other.random(n, 6);
  float* y = other.random(n, 7);
  for (const Format& f : kFormats) {
    Blocks ours(options, options.simd, f, n);
    Case work;
    work.row = 4;
    work.yardstick_name = "axpy";
    work.n = n;
    work.yardstick = [&] {
      in_shares(options, n, [&](uint64_t i, uint64_t k) { axpy_in_place(1e-3f, x + i, y + i, k); });
    };
    work.error = check(options, f);
    const auto run = [&](const char* variant, double bytes, std::function<void()> call) {
      work.benchmark = fmt::format("codec_{}", f.name);
      work.variant = variant;
      work.bytes_per_element = bytes + payload_per_element(f);
      work.share = work.bytes_per_element / 12;
      work.target = 1.25;
      work.ours = std::move(call);
      measure_into(work, options, out);
    };
    run("encode", 4, [&] { ours.encode(false); });
    run("encode, residual", 12, [&] { ours.encode(true); });
    run("decode", 4, [&] { ours.decode(); });
  }
}

}  // namespace sotto::perf
