// Row 34: kernels of outer optimizers: the difference from the anchor, and the step of the anchor
// with merge "reset", at once and in two passes around a limit of the whole momentum.
#include "tests/perf/benchmarks.h"
#include "tests/perf/workload.h"
#include "tests/perf/yardsticks.h"

namespace sotto::perf {
namespace {

constexpr uint64_t kCheckElements = (1 << 20) + 13;

uint64_t blocks_of(uint64_t n) { return (n + kNormBlock - 1) / kNormBlock; }

// One rank of 4, whose sums over ranks have come already.
struct Outer {
  Outer(const Options& options, SimdLevel level, uint64_t count)
      : work(options, level),
        n(count),
        x(work.random(n, 41)),
        anchor(work.random(n, 42)),
        sum(work.random(n, 43, 0.1f)),
        m(work.random(n, 44, 0.1f)),
        y(work.zeros<float>(n)),
        x_list(work.list_of({x})),
        sums(work.zeros<float>(blocks_of(n))),
        clipped(work.zeros<float>(blocks_of(n))),
        flags(work.zeros<uint32_t>(1)),
        numbers(work.zeros<OuterNumbers>(1)),
        factors(work.zeros<OuterFactor>(1)),
        tables(work.pieces(n, n)) {
    *numbers = OuterNumbers();
    numbers->phi = 2;
    numbers->mean = 0.25f;
    numbers->alpha = 0.01f;
    numbers->beta = 0.2f;
    *factors = OuterFactor();
    factors->inv_lambda = 0.5f;
    limit.blocks = blocks_of(n);
    limit.elements = n;
    limit.clip = OuterClip::kRms;
  }
  void delta() {
    const OuterDeltaArgs args;
    work.run(KernelId::kOuterDelta, {x_list, anchor, y, sums, flags}, &args, tables);
  }
  void pass(OuterPass which, OuterClip clip) {
    OuterStepArgs args;
    args.pass = which;
    args.clip = clip;
    work.run(KernelId::kOuterStep,
             {sum, nullptr, nullptr, nullptr, nullptr, nullptr, numbers, factors, m, anchor, x_list,
              sums, sums, clipped},
             &args, tables);
  }
  void at_once() { pass(OuterPass::kWhole, OuterClip::kNone); }
  void in_two_passes() {
    pass(OuterPass::kMomentum, OuterClip::kRms);
    work.run(KernelId::kOuterLimit, {sums, numbers}, &limit);
    pass(OuterPass::kUpdate, OuterClip::kRms);
  }

  Workload work;
  uint64_t n;
  float *x, *anchor, *sum, *m, *y;
  void* x_list;
  float *sums, *clipped;
  uint32_t* flags;
  OuterNumbers* numbers;
  OuterFactor* factors;
  std::vector<std::vector<Piece>> tables;
  OuterLimitArgs limit;
};

std::string check(const Options& options) {
  Outer ours(options, options.simd, kCheckElements);
  Outer reference({.threads = 1}, SimdLevel::kScalar, kCheckElements);
  for (Outer* outer : {&ours, &reference}) {
    outer->delta();
    outer->at_once();
    outer->in_two_passes();
  }
  std::string e = difference("difference", ours.y, reference.y, 4 * ours.n);
  if (e.empty()) e = difference("m", ours.m, reference.m, 4 * ours.n);
  if (e.empty()) e = difference("anchor", ours.anchor, reference.anchor, 4 * ours.n);
  if (e.empty()) e = difference("x", ours.x, reference.x, 4 * ours.n);
  if (e.empty()) e = difference("sums", ours.sums, reference.sums, 4 * blocks_of(ours.n));
  if (e.empty()) e = difference("clipped", ours.clipped, reference.clipped, 4 * blocks_of(ours.n));
  return e;
}

}  // namespace

void outer_step(const Options& options, std::vector<Measurement>* out) {
  Outer ours(options, options.simd, options.n);
  Outer other(options, options.simd, options.n);
  Case work;
  work.row = 34;
  work.benchmark = "outer_step";
  work.n = options.n;
  work.error = check(options);
  const auto run = [&](const char* variant, double bytes, std::function<void()> call) {
    work.variant = variant;
    work.bytes_per_element = bytes;
    work.ours = std::move(call);
    measure_into(work, options, out);
  };
  work.yardstick_name = "axpy";
  work.yardstick = [&] {
    in_shares(options, other.n,
              [&](uint64_t i, uint64_t n) { axpy_in_place(1e-3f, other.x + i, other.y + i, n); });
  };
  run("difference", 12, [&] { ours.delta(); });
  work.yardstick_name = "4 in 3 out";
  work.yardstick = [&] {
    in_shares(options, other.n, [&](uint64_t i, uint64_t n) {
      four_loads_three_stores(other.sum + i, other.m + i, other.anchor + i, other.x + i, n);
    });
  };
  work.share = 24 / 28.0;
  run("one pass", 24, [&] { ours.at_once(); });
  work.share = 32 / 28.0;
  run("two passes, rms", 32, [&] { ours.in_two_passes(); });
}

}  // namespace sotto::perf
