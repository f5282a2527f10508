// Row 31: codec topk.
#include <fmt/core.h>

#include "core/kernels/sparse.h"
#include "tests/perf/benchmarks.h"
#include "tests/perf/workload.h"
#include "tests/perf/yardsticks.h"

namespace sotto::perf {
namespace {

constexpr uint64_t kCheckElements = (1 << 20) + 700;
constexpr uint32_t kMostRanks = 8;

// Encoder of n elements of one tensor, and mean of as many ranks as wanted.
struct Sparse {
  Sparse(const Options& options, SimdLevel level, uint32_t k, uint64_t count)
      : work(options, level),
        n(count),
        x(work.random(n, 1)),
        e(work.random(n, 2, 0.3f)),
        y(work.zeros<float>(n)),
        inputs(work.list_of({x})),
        outputs(work.list_of({y})),
        tables(work.pieces(n, n)) {
    args.settings.k = k;
    args.settings.error_decay = 0.95;
    bytes = args.row_bytes = sparse_bytes(args.settings, n);
    rows = work.zeros<uint8_t>(bytes * kMostRanks);
    flags = work.zeros<uint32_t>(1);
    for (std::vector<Piece>& table : tables) {
      for (Piece& piece : table) piece.target = piece.offset;
    }
  }
  void encode(uint32_t rank = 0) {
    work.run(KernelId::kSparseEncode, {inputs, e, rows + rank * bytes, flags, nullptr}, &args,
             tables);
  }
  void mean(uint32_t ranks) {
    args.world = ranks;
    work.run(KernelId::kSparseMean, {rows, nullptr, nullptr, outputs}, &args, tables);
  }

  Workload work;
  uint64_t n;
  float* x;
  float* e;
  float* y;
  void* inputs;
  void* outputs;
  std::vector<std::vector<Piece>> tables;
  uint64_t bytes = 0;
  uint8_t* rows = nullptr;
  uint32_t* flags = nullptr;
  SparseArgs args;
};

std::string check(const Options& options, uint32_t k) {
  Sparse ours(options, options.simd, k, kCheckElements);
  Sparse reference({.threads = 1}, SimdLevel::kScalar, k, kCheckElements);
  for (Sparse* s : {&ours, &reference}) {
    for (uint32_t r = 0; r < 3; ++r) s->encode(r);
    s->mean(3);
  }
  std::string e = difference("payload", ours.rows, reference.rows, 3 * ours.bytes);
  if (e.empty()) e = difference("error", ours.e, reference.e, 4 * ours.n);
  if (e.empty()) e = difference("y", ours.y, reference.y, 4 * ours.n);
  return e;
}

}  // namespace

void codec_topk(const Options& options, std::vector<Measurement>* out) {
  const uint64_t n = options.n / 512 * 512;
  Workload other(options, options.simd);
  float* x = other.random(n, 6);
  float* y = other.random(n, 7);
  constexpr float kFactor = 0.999f;
  for (const uint32_t k : {64u, 128u}) {
    Sparse ours(options, options.simd, k, n);
    for (uint32_t r = 0; r < kMostRanks; ++r) ours.encode(r);
    Case work;
    work.row = 31;
    work.benchmark = "codec_topk";
    work.n = n;
    work.error = check(options, k);
    const double payload = static_cast<double>(ours.bytes) / static_cast<double>(n);
    const auto run = [&](std::string variant, double bytes, double target,
                         std::function<void()> call) {
      work.variant = std::move(variant);
      work.bytes_per_element = bytes;
      work.target = target;
      work.ours = std::move(call);
      measure_into(work, options, out);
    };
    work.yardstick_name = "axpy";
    work.yardstick = [&] {
      in_shares(options, n, [&](uint64_t i, uint64_t m) { axpy_in_place(1e-3f, x + i, y + i, m); });
    };
    work.share = 1 + payload / 12;
    run(fmt::format("encode, k {}", k), 12 + payload, k == 64 ? 1.5 : 1.75, [&] { ours.encode(); });
    // The anchor moves by the mean, and parameters become the anchor (T3): next to what is left of
    // that where nothing has to be decoded.
    work.yardstick_name = "a *= c, x = a";
    work.yardstick = [&] {
      in_shares(options, n,
                [&](uint64_t i, uint64_t m) { move_and_copy(kFactor, nullptr, y + i, x + i, m); });
    };
    work.share = 1;
    for (const uint32_t ranks : {2u, 8u}) {
      run(fmt::format("apply, k {}, W = {}", k, ranks), 20 + ranks * payload,
          ranks == 2 ? 1.35 : 1.7, [&, ranks] {
            ours.mean(ranks);
            in_shares(options, n, [&](uint64_t i, uint64_t m) {
              move_and_copy(kFactor, ours.y + i, y + i, x + i, m);
            });
          });
    }
    work.yardstick_name = "NT fill";
    work.yardstick = [&] {
      in_shares(options, n, [&](uint64_t i, uint64_t m) { fill_streaming(1, y + i, m); });
    };
    for (const uint32_t ranks : {2u, 8u}) {
      run(fmt::format("mean, k {}, W = {}", k, ranks), 4 + ranks * payload, 0,
          [&, ranks] { ours.mean(ranks); });
    }
  }
}

}  // namespace sotto::perf
