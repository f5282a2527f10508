// Any bytes as payloads of a compressed all-reduce: servers and decoders stay inside their memory,
// all kernels agree, and what is not finite is flagged and never reaches a residual.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/cpu/cpu_device.h"

namespace {

using namespace sotto;

constexpr uint64_t kElements = 512;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

struct Outcome {
  std::vector<float> y, error;
  std::vector<uint8_t> payload;
  uint32_t flags = 0;
};

void launch(Device& device, KernelId id, std::vector<Operand> operands, const Piece& piece,
            const QuantArgs& args) {
  KernelCall call;
  call.id = id;
  call.operands = operands;
  call.pieces = std::span(&piece, 1);
  call.args = &args;
  require(device.launch(0, call, {}).ok(), "the device takes the call");
}

Outcome run(Device& device, QuantArgs args, std::vector<uint8_t> rows) {
  Outcome r;
  r.y.assign(kElements, 0);
  r.error.assign(kElements, 0);
  r.payload.assign(args.row_bytes, 0);
  std::vector<float> before(kElements, 0.25f);
  Piece piece;
  piece.count = kElements;
  launch(device, KernelId::kQuantServer,
         {{rows.data()}, {before.data()}, {r.error.data()}, {r.payload.data()}, {&r.flags}}, piece,
         args);
  void* list[] = {r.y.data()};
  launch(device, KernelId::kQuantDecode, {{rows.data()}, {list}}, piece, args);
  return r;
}

void check(const Outcome& r, CodecKind kind) {
  for (const float e : r.error) {
    require(std::isfinite(e) || r.flags != 0, "an error that is not finite is flagged");
  }
  for (const float v : r.y) {
    require(!codec_has_blocks(kind) || !std::isnan(v), "blocks decode to numbers");
  }
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y) ||
           (std::isnan(x) && std::isnan(y));
  });
}

}  // namespace

// First byte: codec and block; second: ranks; the rest: rows.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  constexpr CodecKind kKinds[] = {CodecKind::kBf16, CodecKind::kFp16, CodecKind::kInt8,
                                  CodecKind::kInt4};
  QuantArgs args{};
  args.kind = kKinds[data[0] % 4];
  args.block = 32u << (data[0] / 4 % 5);
  args.world = 1u + data[1] % 10;
  args.row_bytes = payload_unit(args.kind, args.block).bytes_of(kElements);
  std::vector<uint8_t> rows(args.world * args.row_bytes);
  if (size > 2) std::memcpy(rows.data(), data + 2, std::min(size - 2, rows.size()));
  static const auto scalar = make_cpu_device(1, SimdLevel::kScalar).take();
  static const auto fastest = make_cpu_device(1, SimdLevel::kAuto).take();
  const Outcome a = run(*scalar, args, rows);
  const Outcome b = run(*fastest, args, rows);
  check(a, args.kind);
  require(a.flags == b.flags && a.payload == b.payload && same(a.error, b.error) && same(a.y, b.y),
          "all kernels give the same");
  return 0;
}
