// Kernel calls with the memory they work on, so that one call can be executed again and again from
// the same state: on every device, SIMD level and thread count, whole or cut.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "core/cpu/cpu_device.h"
#include "core/kernels/pieces.h"
#include "core/kernels/registry.h"
#include "tests/support/random_bits.h"
#include "tests/support/sanitized.h"

namespace sotto::test {

// Memory of an operand or of one tensor of a list operand.
struct Memory {
  std::vector<uint8_t> bytes;
  // Compared as float32, any NaN equal to any other (core/kernels/call.h leaves sign and payload
  // open).
  bool floats = false;
  // First byte lies this far behind a 64-byte border.
  uint32_t misalign = 0;
};

enum class Binding : uint8_t { kNull, kFlat, kList };

struct OperandMemory {
  Binding binding = Binding::kNull;  // absent
  std::vector<size_t> memory;        // indices into KernelCase::memory

  size_t at() const { return memory.empty() ? ~size_t{0} : memory[0]; }
};

class KernelCase {
 public:
  // All operands are absent.
  explicit KernelCase(KernelId kernel)
      : id(kernel), operands(kernel_spec(kernel).operands.size()) {}

  template <class T>
  void set_args(const T& value) {
    args.resize(sizeof(T));
    std::memcpy(args.data(), &value, sizeof(T));
  }
  // The operands by the names that K, or a kernel with the same ones, has.
  template <class K>
  typename K::template Operands<OperandMemory>& named() {
    using Operands = typename K::template Operands<OperandMemory>;
    static_assert(sizeof(Operands) == kOperandCount<K> * sizeof(OperandMemory));
    EXPECT_EQ(operands.size(), kOperandCount<K>);
    operands.resize(kOperandCount<K>);
    return *reinterpret_cast<Operands*>(operands.data());
  }
  template <class T>
  OperandMemory flat(const std::vector<T>& values) {
    return {Binding::kFlat, {add_memory(values, 0)}};
  }
  // One tensor per entry, each with another alignment, a multiple of `element` bytes.
  template <class T>
  OperandMemory list(const std::vector<std::vector<T>>& tensors, uint64_t element = sizeof(T)) {
    OperandMemory out{Binding::kList, {}};
    for (size_t t = 0; t < tensors.size(); ++t) {
      out.memory.push_back(add_memory(tensors[t], static_cast<uint32_t>(t * 5 % 16 * element)));
    }
    return out;
  }

  KernelId id;
  std::vector<uint8_t> args;
  std::vector<Piece> pieces;
  std::vector<OperandMemory> operands;
  std::vector<Memory> memory;
  uint64_t bytes = 0;
  bool paired_ran = false;

 private:
  template <class T>
  size_t add_memory(const std::vector<T>& values, uint32_t misalign) {
    Memory m;
    m.bytes.resize(values.size() * sizeof(T));
    if (!values.empty()) std::memcpy(m.bytes.data(), values.data(), m.bytes.size());
    m.floats = std::is_same_v<T, float>;
    m.misalign = misalign;
    memory.push_back(std::move(m));
    return memory.size() - 1;
  }
};

// Memory after a run, in the order of KernelCase::memory.
struct Outcome {
  std::vector<std::vector<uint8_t>> memory;
  std::string error;  // status, or memory outside the operands that was written

  template <class T>
  std::vector<T> as(size_t index) const {
    std::vector<T> values(memory[index].size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), memory[index].data(), memory[index].size());
    return values;
  }
};

// Executes the case on copies of its memory. max_elements: cut with cut_pieces; 0: one call.
Outcome execute(const KernelCase& work, Device& device, uint64_t max_elements);
// On the scalar table, one thread, one call.
Outcome execute_reference(const KernelCase& work);

// Executes on every target (kernel_targets.h), whole and cut, and compares with the reference byte
// by byte. Returns "" or the first difference. Cases beyond kernel_layout_limit() are left out.
std::string compare_on_all_targets(const KernelCase& work);

// The case with its source (operand 0, a list of float32) stored as `type`, 16 bits: rounded, with
// subnormals at some places and both kinds of NaN where it was NaN. The arguments are as before.
KernelCase with_low_precision_source(const KernelCase& work, Dtype type);
// Compares `narrow` on all targets, and its reference with the one of the same values as float32.
std::string compare_with_wide(const KernelCase& work, const KernelCase& narrow, Dtype type);

// For kernels over a source: both of the above for both 16-bit types. Returns "" or the first
// difference.
template <class Args>
std::string compare_low_precision_sources(const KernelCase& work) {
  std::string e;
  for (const Dtype type : {Dtype::kF16, Dtype::kBF16}) {
    KernelCase narrow = with_low_precision_source(work, type);
    Args args;
    std::memcpy(&args, work.args.data(), sizeof args);
    args.source = type;
    narrow.set_args(args);
    if (e.empty()) e = compare_with_wide(work, narrow, type);
  }
  return e;
}

// Where the pieces of tensors lie.
struct Layout {
  std::vector<uint64_t> sizes;   // elements of each tensor
  std::vector<uint64_t> starts;  // flat index of each tensor's first element
  uint64_t padded = 0;           // length of the flat space: world * chunk
  uint64_t chunk = 0;
  uint64_t world = 1;
  std::vector<Piece>
      by_chunk;               // blocks counted from each chunk's start; padding pieces; instance 0
  uint64_t chunk_blocks = 0;  // block sums of by_chunk
  std::vector<Piece> by_tensor;  // blocks counted from each tensor's start, pieces cut at chunk
                                 // borders; no padding
  uint64_t tensor_blocks = 0;
  std::vector<NormRange> chunk_ranges;   // one per chunk
  std::vector<NormRange> tensor_ranges;  // one per tensor

  uint64_t elements() const;
  // Pieces of one chunk for its server: flat from 0, blocks from 0.
  std::vector<Piece> of_server(uint64_t rank) const;
};
// Tensors one after the other, chunks of a multiple of `align` elements. Tensor t is in parameter
// group t % groups.
Layout make_layout(const std::vector<uint64_t>& sizes, uint64_t world, uint64_t align,
                   uint32_t groups = 1);
// Sizes that meet every border: empty, below, at and above bytes, words, groups, blocks; several
// tensors at odd places.
std::vector<Layout> all_layouts();
// Whole norm blocks and a rest.
inline constexpr uint64_t kLarge = kSanitized ? 20003 : 50003;
// Vector kernels write what is behind the first 65536 elements past the caches.
inline constexpr uint64_t kPastCaches = kSanitized ? 20003 : 66007;

// Random data, the same for the same seed.
class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  std::vector<float> normal(uint64_t n, float sigma = 1.0f);
  // |normal| + low.
  std::vector<float> positive(uint64_t n, float sigma, float low);
  std::vector<uint8_t> bytes(uint64_t n);
  // Bits for n elements, most of them 1, with runs of zeros and mixed words.
  std::vector<uint8_t> mask(uint64_t n);
  uint32_t below(uint32_t limit);
  // Overwrites about one element in 16 by NaN, infinities, zeros of both signs, subnormals,
  // extremes.
  void sprinkle(std::vector<float>* values);
  // A list: one tensor per size.
  std::vector<std::vector<float>> tensors(const std::vector<uint64_t>& sizes, float sigma = 1.0f);

 private:
  RandomBits engine_;
};

// A message area of `world` messages with the scales given, flags 0. scales[r][instance].
std::vector<uint8_t> make_messages(const std::vector<std::vector<float>>& scales);

}  // namespace sotto::test
