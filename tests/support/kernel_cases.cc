#include "tests/support/kernel_cases.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>

#include "core/base/bits.h"
#include "tests/support/access_check.h"
#include "tests/support/kernel_targets.h"

namespace sotto::test {
namespace {

constexpr uint64_t kGuard = 128;  // bytes before and after each memory
constexpr uint8_t kGuardByte = 0xa5;

// A copy of a Memory between guards. From operator new, which tests of devices replace.
class Guarded {
 public:
  explicit Guarded(const Memory& m)
      : size_(m.bytes.size()), total_(size_ + m.misalign + 2 * kGuard) {
    whole_.resize(total_ + kAligned, kGuardByte);
    base_ = whole_.data();
    base_ += -reinterpret_cast<uintptr_t>(base_) % kAligned;
    data_ = base_ + kGuard + m.misalign;
    if (size_ != 0) std::memcpy(data_, m.bytes.data(), size_);
  }
  Guarded(Guarded&&) = default;
  uint8_t* data() const { return data_; }
  std::vector<uint8_t> bytes() const { return {data_, data_ + size_}; }
  bool intact() const {
    const auto guard = [](uint8_t b) { return b == kGuardByte; };
    return std::all_of(base_, data_, guard) && std::all_of(data_ + size_, base_ + total_, guard);
  }

 private:
  static constexpr uint64_t kAligned = 64;
  uint64_t size_, total_;
  std::vector<uint8_t> whole_;
  uint8_t *base_, *data_;
};

bool same_value(const Memory& m, const std::vector<uint8_t>& a, const std::vector<uint8_t>& b,
                uint64_t i) {
  if (a[i] == b[i]) return true;
  if (!m.floats) return false;
  float x, y;
  std::memcpy(&x, a.data() + i / 4 * 4, 4);
  std::memcpy(&y, b.data() + i / 4 * 4, 4);
  return std::isnan(x) && std::isnan(y);
}

std::string first_difference(const KernelCase& work, const Outcome& expected,
                             const Outcome& found) {
  if (!found.error.empty()) return found.error;
  for (size_t m = 0; m < work.memory.size(); ++m) {
    for (uint64_t i = 0; i < expected.memory[m].size(); ++i) {
      if (same_value(work.memory[m], expected.memory[m], found.memory[m], i)) continue;
      const uint64_t unit = work.memory[m].floats ? 4 : 1;
      float a = expected.memory[m][i], b = found.memory[m][i];
      if (unit == 4) {
        std::memcpy(&a, expected.memory[m].data() + i / 4 * 4, 4);
        std::memcpy(&b, found.memory[m].data() + i / 4 * 4, 4);
      }
      return fmt::format("memory {} element {}: reference {:g}, here {:g}", m, i / unit, a, b);
    }
  }
  return "";
}

std::vector<KernelTarget>& targets() {
  static std::vector<KernelTarget> all = kernel_targets();
  return all;
}

}  // namespace

// Which bytes of the copies a call may write.
class Writable {
 public:
  explicit Writable(const std::vector<Guarded>& copies) {
    for (const Guarded& copy : copies) marks_.emplace_back(copy.bytes().size(), uint8_t{0});
  }
  void add(const KernelCall& call, const std::vector<Guarded>& copies) {
    std::vector<WrittenBytes> written;
    known_ = written_bytes(call, &written) && known_;
    for (const WrittenBytes& w : written) {
      for (size_t m = 0; m < copies.size(); ++m) mark(w, copies[m], &marks_[m]);
    }
  }
  // "" or which byte changed that may not.
  std::string violation(const KernelCase& work, const std::vector<Guarded>& copies) const {
    for (size_t m = 0; known_ && m < copies.size(); ++m) {
      const std::vector<uint8_t> now = copies[m].bytes();
      for (size_t i = 0; i < now.size(); ++i) {
        if (marks_[m][i] == 0 && now[i] != work.memory[m].bytes[i])
          return fmt::format(
              "byte {} of memory {} was written, which the description of {} does "
              "not say",
              i, m, kernel_name(work.id));
      }
    }
    return "";
  }

 private:
  static void mark(const WrittenBytes& w, const Guarded& copy, std::vector<uint8_t>* marks) {
    const auto first = reinterpret_cast<uintptr_t>(w.at);
    const auto begin = reinterpret_cast<uintptr_t>(copy.data());
    if (first < begin || first >= begin + marks->size()) return;
    const uint64_t n = std::min<uint64_t>(w.bytes, begin + marks->size() - first);
    std::fill_n(marks->begin() + static_cast<ptrdiff_t>(first - begin), n, uint8_t{1});
  }

  std::vector<std::vector<uint8_t>> marks_;
  bool known_ = true;
};

Outcome execute(const KernelCase& work, Device& device, uint64_t max_elements) {
  std::vector<Guarded> copies;
  copies.reserve(work.memory.size());
  for (const Memory& m : work.memory) copies.emplace_back(m);
  std::vector<std::vector<void*>> lists(work.operands.size());
  std::vector<Operand> operands(work.operands.size());
  for (size_t k = 0; k < work.operands.size(); ++k) {
    const OperandMemory& spec = work.operands[k];
    if (spec.binding == Binding::kFlat) operands[k].data = copies[spec.memory[0]].data();
    if (spec.binding == Binding::kList) {
      for (const size_t m : spec.memory) lists[k].push_back(copies[m].data());
      operands[k].data = lists[k].data();
    }
  }
  KernelCall call;
  call.id = work.id;
  call.operands = operands;
  call.args = work.args.data();
  call.bytes = work.bytes;
  call.paired_ran = work.paired_ran;
  std::vector<std::vector<Piece>> tables = {work.pieces};
  if (max_elements != 0) tables = cut_pieces(work.pieces, max_elements);
  Outcome outcome;
  Writable writable(copies);
  for (const std::vector<Piece>& table : tables) {
    call.pieces = table;
    const AccessCheck check(call);
    writable.add(call, copies);
    const Status status = device.launch(0, call, {});
    if (!status.ok()) outcome.error = status.text();
    if (!check.missing().empty()) outcome.error = check.missing();
    if (std::string e = check.changed(); !e.empty()) outcome.error = e;
  }
  if (std::string e = writable.violation(work, copies); !e.empty()) outcome.error = e;
  for (size_t m = 0; m < copies.size(); ++m) {
    outcome.memory.push_back(copies[m].bytes());
    if (!copies[m].intact()) outcome.error = fmt::format("bytes around memory {} were written", m);
  }
  return outcome;
}

Outcome execute_reference(const KernelCase& work) {
  static const std::unique_ptr<Device> device = make_cpu_device(1, SimdLevel::kScalar).take();
  return execute(work, *device, 0);
}

std::string compare_on_all_targets(const KernelCase& work) {
  if (const uint64_t limit = kernel_layout_limit();
      limit != 0 && piece_elements(work.pieces) > limit)
    return "";
  const Outcome expected = execute_reference(work);
  if (!expected.error.empty()) return "reference: " + expected.error;
  for (const KernelTarget& target : targets()) {
    for (const uint64_t cut : target.cuts) {
      if (cut != 0 && !kernel_cuts(work.id)) continue;
      const std::string way = target.next_way ? ", " + target.next_way() : "";
      const std::string e = first_difference(work, expected, execute(work, *target.device, cut));
      if (!e.empty())
        return fmt::format("{} on {}{}, cut {}: {}", kernel_name(work.id), target.name, way, cut,
                           e);
    }
  }
  return "";
}

KernelCase with_low_precision_source(const KernelCase& work, Dtype type) {
  const uint16_t mantissa = type == Dtype::kF16 ? 0x3ff : 0x7f;
  const uint16_t infinity = static_cast<uint16_t>(0x7fff & ~mantissa);
  KernelCase narrow = work;
  for (const size_t m : work.operands[0].memory) {
    const uint8_t* from = work.memory[m].bytes.data();
    std::vector<uint16_t> values(work.memory[m].bytes.size() / 4);
    for (size_t i = 0; i < values.size(); ++i) {
      const float x = float_at(Dtype::kF32, from, i);
      values[i] = type == Dtype::kF16 ? f32_to_f16(x) : f32_to_bf16(x);
      if (std::isnan(x) && i % 2 == 0) values[i] = infinity | 1;  // signalling
      if (i % 19 == 3) values[i] = static_cast<uint16_t>((i % 2 << 15) | (1 + i % mantissa));
    }
    Memory& to = narrow.memory[m];
    to.floats = false;
    to.misalign /= 2;
    to.bytes.resize(2 * values.size());
    if (!values.empty()) std::memcpy(to.bytes.data(), values.data(), to.bytes.size());
  }
  return narrow;
}

std::string compare_with_wide(const KernelCase& work, const KernelCase& narrow, Dtype type) {
  std::string e = compare_on_all_targets(narrow);
  KernelCase wide = work;
  for (const size_t m : work.operands[0].memory) {
    std::vector<uint8_t>& bytes = wide.memory[m].bytes;
    for (size_t i = 0; i < bytes.size() / 4; ++i) {
      const float x = float_at(type, narrow.memory[m].bytes.data(), i);
      std::memcpy(&bytes[4 * i], &x, 4);
    }
  }
  const Outcome expected = execute_reference(wide);
  Outcome found = execute_reference(narrow);
  for (const size_t m : work.operands[0].memory) found.memory[m] = expected.memory[m];
  if (e.empty()) e = first_difference(wide, expected, found);
  return e.empty() ? "" : fmt::format("{} source: {}", dtype_name(type), e);
}

uint64_t Layout::elements() const {
  uint64_t sum = 0;
  for (const uint64_t size : sizes) sum += size;
  return sum;
}

std::vector<Piece> Layout::of_server(uint64_t rank) const {
  std::vector<Piece> own;
  for (Piece p : by_chunk) {
    if (p.chunk != rank) continue;
    p.flat -= rank * chunk;
    p.block -= chunk_ranges[rank].first_block;
    p.message = 0;
    own.push_back(p);
  }
  return own;
}

Layout make_layout(const std::vector<uint64_t>& sizes, uint64_t world, uint64_t align,
                   uint32_t groups) {
  Layout out;
  out.sizes = sizes;
  out.world = world;
  const uint64_t n = out.elements();
  out.chunk = (n + align * world - 1) / (align * world) * align;
  out.padded = out.chunk * world;
  const uint64_t blocks = (out.chunk + kNormBlock - 1) / kNormBlock;  // of one chunk
  out.chunk_blocks = blocks * world;
  uint64_t flat = 0;
  // A piece for [flat, flat + count) of one chunk.
  const auto add_by_chunk = [&](Piece p, uint64_t count) {
    const uint64_t inside = p.flat % out.chunk;
    p.count = count;
    p.chunk = static_cast<uint32_t>(p.flat / out.chunk);
    p.block = p.chunk * blocks + inside / kNormBlock;
    p.lane = static_cast<uint32_t>(inside % kNormBlock);
    p.message = 2 * p.chunk;
    out.by_chunk.push_back(p);
  };
  for (size_t t = 0; t < sizes.size(); ++t) {
    out.starts.push_back(flat);
    NormRange range;
    range.first_block = out.tensor_blocks;
    range.blocks = (sizes[t] + kNormBlock - 1) / kNormBlock;
    range.count = sizes[t];
    range.group = static_cast<uint32_t>(t % groups);
    range.tensor = static_cast<uint32_t>(t);
    for (uint64_t done = 0; done < sizes[t];) {
      const uint64_t count = std::min(sizes[t] - done, out.chunk - flat % out.chunk);
      Piece p;
      p.flat = flat;
      p.offset = p.target = done;
      p.tensor = static_cast<uint32_t>(t);
      p.group = range.group;
      add_by_chunk(p, count);
      p.count = count;
      p.chunk = static_cast<uint32_t>(flat / out.chunk);
      p.message = 2 * p.chunk;
      p.block = range.first_block + done / kNormBlock;
      p.lane = static_cast<uint32_t>(done % kNormBlock);
      out.by_tensor.push_back(p);
      done += count;
      flat += count;
    }
    out.tensor_blocks += range.blocks;
    out.tensor_ranges.push_back(range);
  }
  while (flat < out.padded) {
    const uint64_t count = out.chunk - flat % out.chunk;
    Piece p;
    p.flat = flat;
    p.tensor = kNoTensor;
    add_by_chunk(p, count);
    flat += count;
  }
  for (uint64_t r = 0; r < world; ++r) {
    NormRange range;
    range.first_block = r * blocks;
    range.blocks = blocks;
    range.count = std::min(out.chunk, n - std::min(n, r * out.chunk));
    out.chunk_ranges.push_back(range);
  }
  return out;
}

std::vector<Layout> all_layouts() {
  std::vector<Layout> all;
  for (const uint64_t n : {0, 1, 7, 8, 9, 63, 64, 65, 1023, 1025, 8193})
    all.push_back(make_layout({n}, 1, 8));
  if (!kSanitized) {
    for (const uint64_t n : {8191, 8192}) all.push_back(make_layout({n}, 1, 8));
  }
  all.push_back(make_layout({7, 0, 65, 1, 1030, 130, 63}, 2, 8, 3));
  all.push_back(make_layout({kPastCaches}, 1, 8));
  all.push_back(make_layout({kLarge}, 3, 512));
  all.push_back(make_layout({7, 0, 65, 1, 8193, 130, 9000, 63}, 2, 8, 3));
  all.push_back(make_layout({5, 20000, 3, 16384, 77, kLarge}, 4, 512, 2));
  if (const uint64_t limit = kernel_layout_limit(); limit != 0)
    std::erase_if(all, [&](const Layout& layout) { return layout.elements() > limit; });
  return all;
}

std::vector<float> Random::normal(uint64_t n, float sigma) {
  std::normal_distribution<float> distribution(0.0f, sigma);
  std::vector<float> values(n);
  for (float& v : values) v = distribution(engine_);
  return values;
}

std::vector<float> Random::positive(uint64_t n, float sigma, float low) {
  std::vector<float> values = normal(n, sigma);
  for (float& v : values) v = std::fabs(v) + low;
  return values;
}

std::vector<uint8_t> Random::bytes(uint64_t n) {
  std::vector<uint8_t> values(n);
  for (uint8_t& v : values) v = static_cast<uint8_t>(engine_());
  return values;
}

std::vector<uint8_t> Random::mask(uint64_t n) {
  std::vector<uint8_t> bits((n + 7) / 8, 0xff);
  for (uint64_t i = 0; i < n;) {
    const uint64_t run = 1 + below(400);
    const uint32_t kind = below(6);  // 0: masked, 1: mixed, else valid
    for (uint64_t j = i; j < std::min(n, i + run); ++j) {
      if (kind == 0 || (kind == 1 && below(2) == 0)) set_bit(bits.data(), j, false);
    }
    i += run;
  }
  return bits;
}

uint32_t Random::below(uint32_t limit) { return static_cast<uint32_t>(engine_() % limit); }

void Random::sprinkle(std::vector<float>* values) {
  using Limits = std::numeric_limits<float>;
  const float specials[] = {Limits::quiet_NaN(),
                            Limits::infinity(),
                            -Limits::infinity(),
                            0.0f,
                            -0.0f,
                            Limits::denorm_min(),
                            -Limits::denorm_min(),
                            3 * Limits::denorm_min(),
                            Limits::min(),
                            Limits::max(),
                            -Limits::max(),
                            1e-20f,
                            -1e20f};
  for (float& v : *values) {
    if (below(16) == 0) v = specials[below(std::size(specials))];
  }
}

std::vector<std::vector<float>> Random::tensors(const std::vector<uint64_t>& sizes, float sigma) {
  std::vector<std::vector<float>> all;
  for (const uint64_t size : sizes) all.push_back(normal(size, sigma));
  return all;
}

std::vector<uint8_t> make_messages(const std::vector<std::vector<float>>& scales) {
  std::vector<uint8_t> area;
  for (const std::vector<float>& message : scales) {
    const size_t at = area.size();
    area.resize(at + scale_message_bytes(message.size()));
    std::memcpy(area.data() + at, message.data(), 4 * message.size());
  }
  return area;
}

}  // namespace sotto::test
