#include "tests/perf/workload.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

#include "core/kernels/registry.h"

namespace sotto::perf {
namespace {

// SplitMix64.
uint64_t next_random(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

Workload::Workload(const Options& options, SimdLevel level) : device_(options.threads, level) {}

Workload::~Workload() {
  for (const Block& block : blocks_) device_.free(block.memory, block.bytes);
}

void* Workload::allocate(uint64_t bytes) {
  Result<void*> memory = device_.alloc(bytes);
  if (!memory.ok()) throw std::bad_alloc();
  std::memset(*memory, 0, bytes);  // pages are there before anything is timed
  blocks_.push_back({*memory, bytes});
  return *memory;
}

float* Workload::random(uint64_t count, uint64_t seed, float sigma) {
  float* values = zeros<float>(count);
  uint64_t state = seed;
  const float unit = sigma * std::sqrt(3.0f) / 65536.0f;  // four uniform 16-bit numbers
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t r = next_random(&state);
    const int sum = static_cast<int>(r & 0xffff) + static_cast<int>(r >> 16 & 0xffff) +
                    static_cast<int>(r >> 32 & 0xffff) + static_cast<int>(r >> 48) - 2 * 65535;
    values[i] = static_cast<float>(sum) * unit;
  }
  return values;
}

float* Workload::positive(uint64_t count, uint64_t seed, float sigma, float low) {
  float* values = random(count, seed, sigma);
  for (uint64_t i = 0; i < count; ++i) values[i] = std::fabs(values[i]) + low;
  return values;
}

uint8_t* Workload::random_bits(uint64_t bytes, uint64_t seed) {
  uint8_t* bits = zeros<uint8_t>(bytes);
  for (uint64_t i = 0; i < bytes; ++i) bits[i] = static_cast<uint8_t>(next_random(&seed));
  return bits;
}

void* Workload::list_of(std::vector<void*> tensors) {
  lists_.push_back(std::make_unique<std::vector<void*>>(std::move(tensors)));
  return lists_.back()->data();
}

std::vector<std::vector<Piece>> Workload::pieces(uint64_t n, uint64_t chunk) const {
  return pieces(n, chunk, device_.caps().split_elements);
}

std::vector<std::vector<Piece>> Workload::pieces(uint64_t n, uint64_t chunk, uint64_t split) {
  std::vector<Piece> all;
  for (uint64_t first = 0; first < n; first += chunk) {
    Piece p;
    p.flat = p.offset = p.target = first;
    p.count = std::min(chunk, n - first);
    p.block = first / kNormBlock;
    p.lane = static_cast<uint32_t>(first % kNormBlock);
    p.chunk = static_cast<uint32_t>(first / chunk);
    all.push_back(p);
  }
  if (split == 0) return {all};
  return cut_pieces(all, split);
}

void Workload::launch(KernelId id, std::initializer_list<void*> operands, const void* args,
                      std::span<const Piece> pieces) {
  const KernelSpec& kernel = kernel_spec(id);
  if (operands.size() != kernel.operands.size()) {
    throw std::runtime_error(fmt::format("{}: {} operands, it has {}", kernel.name, operands.size(),
                                         kernel.operands.size()));
  }
  std::array<Operand, 16> bound;
  std::transform(operands.begin(), operands.end(), bound.begin(),
                 [](void* p) { return Operand{p}; });
  KernelCall call;
  call.id = id;
  call.operands = std::span(bound).first(operands.size());
  call.pieces = pieces;
  call.args = args;
  const Status status = device_.launch(0, call, {});
  if (!status.ok()) throw std::runtime_error(status.text());
}

void Workload::run(KernelId id, std::initializer_list<void*> operands, const void* args,
                   const std::vector<std::vector<Piece>>& tables) {
  for (const std::vector<Piece>& table : tables) launch(id, operands, args, table);
}

void Workload::run(KernelId id, std::initializer_list<void*> operands, const void* args) {
  launch(id, operands, args, {});
}

void in_shares(const Options& options, uint64_t n,
               const std::function<void(uint64_t, uint64_t)>& f) {
  static ThreadPool pool(options.threads);
  const uint64_t share = (n / options.threads + 15) / 16 * 16;
  struct Context {
    const std::function<void(uint64_t, uint64_t)>& f;
    uint64_t share, n;
  } context{f, share, n};
  pool.run(
      [](void* opaque, uint32_t index) {
        const Context& c = *static_cast<Context*>(opaque);
        const uint64_t first = std::min(c.n, index * c.share);
        c.f(first, std::min(c.n - first, c.share));
      },
      &context);
}

std::string difference(const char* what, const void* a, const void* b, uint64_t bytes) {
  const auto* left = static_cast<const uint8_t*>(a);
  const auto* right = static_cast<const uint8_t*>(b);
  for (uint64_t i = 0; i < bytes; ++i) {
    if (left[i] != right[i])
      return fmt::format("{} differs from the reference at byte {}", what, i);
  }
  return "";
}

}  // namespace sotto::perf
