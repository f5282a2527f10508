// Rows 1 to 3: the 1-bit codec.
#include <fmt/core.h>

#include <cstring>

#include "tests/perf/benchmarks.h"
#include "tests/perf/workload.h"
#include "tests/perf/yardsticks.h"

namespace sotto::perf {
namespace {

constexpr uint64_t kCheckElements = (1 << 20) + 13;

uint64_t blocks_of(uint64_t n) { return (n + kNormBlock - 1) / kNormBlock; }
double target_by_level(const Options& options, double avx512, double below) {
  return simd_level_in_use(options.simd) == SimdLevel::kAvx512 ? avx512 : below;
}

// Encoder of one worker; the scale of each call is the old scale of the next, as in a real run.
struct Encoder {
  Encoder(const Options& options, SimdLevel level, uint64_t count)
      : work(options, level),
        n(count),
        x(work.random(n, 1)),
        list(work.list_of({x})),
        c(work.random(n, 2)),
        scale(work.zeros<float>(1)),
        bits(work.zeros<uint8_t>(n / 8 + 1)),
        sums(work.zeros<float>(blocks_of(n))),
        flags(work.zeros<uint32_t>(1)),
        valid_count(work.zeros<uint64_t>(1)),
        message(work.zeros<uint32_t>(2)),
        tables(work.pieces(n, n)) {
    args.scale = ScaleKind::kL2;
    *valid_count = n;
    range.blocks = blocks_of(n);
    norm.ranges = &range;
    norm.n = 1;
    norm.scale = ScaleKind::kL2;
  }
  void run() {
    work.run(KernelId::kOnebitEncode, {list, c, scale, bits, sums, nullptr, flags, nullptr}, &args,
             tables);
    work.run(KernelId::kNormFinish, {sums, valid_count, scale, message, flags}, &norm);
  }

  Workload work;
  uint64_t n;
  float* x;
  void* list;
  float* c;
  float* scale;
  uint8_t* bits;
  float* sums;
  uint32_t* flags;
  uint64_t* valid_count;
  uint32_t* message;
  std::vector<std::vector<Piece>> tables;
  EncodeArgs args{};
  NormRange range;
  NormArgs norm{};
};

std::string check_encoder(const Options& options) {
  Encoder ours(options, options.simd, kCheckElements);
  Encoder reference({.threads = 1}, SimdLevel::kScalar, kCheckElements);
  for (int step = 0; step < 2; ++step) {
    ours.run();
    reference.run();
  }
  std::string e = difference("c", ours.c, reference.c, 4 * ours.n);
  if (e.empty()) e = difference("bits", ours.bits, reference.bits, ours.n / 8);
  if (e.empty()) e = difference("scale", ours.scale, reference.scale, 4);
  return e;
}

// Server of a chunk of n elements.
struct Server {
  Server(const Options& options, SimdLevel level, uint32_t w, uint64_t count)
      : work(options, level),
        n(count),
        row_bytes(n / 8 + 1),
        rows(work.random_bits(w * row_bytes, 3)),
        messages(work.zeros<uint8_t>(w * scale_message_bytes(1))),
        c(work.random(n, 4)),
        new_c(work.zeros<float>(n)),
        old_scale(work.zeros<float>(1)),
        bits(work.zeros<uint8_t>(row_bytes)),
        sums(work.zeros<float>(blocks_of(n))),
        tables(work.pieces(n, n)) {
    args.row_bytes = row_bytes;
    args.instances = 1;
    args.world = w;
    args.scale = ScaleKind::kL2;
    *old_scale = 0.5f;
    for (uint32_t r = 0; r < w; ++r) {
      const float s = 1.0f + 0.01f * static_cast<float>(r);
      std::memcpy(messages + r * scale_message_bytes(1), &s, 4);
    }
  }
  void run() {
    work.run(KernelId::kOnebitServer, {rows, messages, c, old_scale, bits, sums, nullptr, new_c},
             &args, tables);
  }

  Workload work;
  uint64_t n, row_bytes;
  uint8_t* rows;
  uint8_t* messages;
  float* c;
  float* new_c;
  float* old_scale;
  uint8_t* bits;
  float* sums;
  std::vector<std::vector<Piece>> tables;
  ServerArgs args{};
};

std::string check_server(const Options& options, uint32_t w) {
  Server ours(options, options.simd, w, kCheckElements);
  Server reference({.threads = 1}, SimdLevel::kScalar, w, kCheckElements);
  ours.run();
  reference.run();
  std::string e = difference("c", ours.new_c, reference.new_c, 4 * ours.n);
  if (e.empty()) e = difference("bits", ours.bits, reference.bits, ours.n / 8);
  if (e.empty()) e = difference("sums", ours.sums, reference.sums, 4 * blocks_of(ours.n));
  return e;
}

struct Decoder {
  Decoder(const Options& options, SimdLevel level, uint64_t count)
      : work(options, level),
        n(count),
        bits(work.random_bits(n / 8 + 1, 5)),
        messages(work.zeros<uint8_t>(4 * scale_message_bytes(1))),
        y(work.zeros<float>(n)),
        list(work.list_of({y})),
        tables(work.pieces(n, (n / 4 + 511) / 512 * 512)) {
    for (auto& table : tables) {
      for (Piece& p : table) p.message = 2 * p.chunk;
    }
    for (uint32_t r = 0; r < 4; ++r) {
      const float s = 1.0f + 0.1f * static_cast<float>(r);
      std::memcpy(messages + r * scale_message_bytes(1), &s, 4);
    }
  }
  void run() {
    work.run(KernelId::kOnebitDecode, {bits, messages, list, nullptr}, nullptr, tables);
  }

  Workload work;
  uint64_t n;
  uint8_t* bits;
  uint8_t* messages;
  float* y;
  void* list;
  std::vector<std::vector<Piece>> tables;
};

std::string check_decoder(const Options& options) {
  Decoder ours(options, options.simd, kCheckElements);
  Decoder reference({.threads = 1}, SimdLevel::kScalar, kCheckElements);
  ours.run();
  reference.run();
  return difference("y", ours.y, reference.y, 4 * ours.n);
}

}  // namespace

void codec_encode(const Options& options, std::vector<Measurement>* out) {
  Encoder ours(options, options.simd, options.n);
  Workload other(options, options.simd);
  float* x = other.random(options.n, 6);
  float* y = other.random(options.n, 7);
  Case work;
  work.row = 1;
  work.benchmark = "codec_encode";
  work.variant = "1-bit, l2";
  work.yardstick_name = "axpy";
  work.n = options.n;
  work.bytes_per_element = 12.125;
  work.target = target_by_level(options, 1.08, 1.25);
  work.ours = [&] { ours.run(); };
  work.yardstick = [&] {
    in_shares(options, options.n,
              [&](uint64_t i, uint64_t n) { axpy_in_place(1e-3f, x + i, y + i, n); });
  };
  work.error = check_encoder(options);
  measure_into(work, options, out);
}

void codec_decode(const Options& options, std::vector<Measurement>* out) {
  Decoder ours(options, options.simd, options.n);
  Workload other(options, options.simd);
  float* y = other.zeros<float>(options.n);
  Case work;
  work.row = 2;
  work.benchmark = "codec_decode";
  work.variant = "1-bit, 4 chunks";
  work.yardstick_name = "NT fill";
  work.n = options.n;
  work.bytes_per_element = 4.125;
  work.target = 1.05;
  work.ours = [&] { ours.run(); };
  work.yardstick = [&] {
    in_shares(options, options.n, [&](uint64_t i, uint64_t n) { fill_streaming(1.0f, y + i, n); });
  };
  work.error = check_decoder(options);
  measure_into(work, options, out);
}

void codec_server(const Options& options, std::vector<Measurement>* out) {
  Workload other(options, options.simd);
  float* x = other.random(options.n, 6);
  float* y = other.random(options.n, 7);
  for (const uint32_t w : {4u, 8u, 16u}) {
    Server ours(options, options.simd, w, options.n);
    Case work;
    work.row = 3;
    work.benchmark = "codec_server";
    work.variant = fmt::format("W={}", w);
    work.yardstick_name = "axpy";
    work.n = options.n;
    work.bytes_per_element = 8.125 + w / 8.0;
    work.share = work.bytes_per_element / 12;
    work.target = 1.25;
    work.ours = [&] { ours.run(); };
    work.yardstick = [&] {
      in_shares(options, options.n,
                [&](uint64_t i, uint64_t n) { axpy_in_place(1e-3f, x + i, y + i, n); });
    };
    work.error = check_server(options, w);
    measure_into(work, options, out);
  }
}

}  // namespace sotto::perf
