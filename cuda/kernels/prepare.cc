// What each thread block does is decided here, once per call.
#include "cuda/kernels/prepare.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <type_traits>

#include "core/kernels/registry.h"
#include "cuda/kernels/tables.h"

namespace sotto::cuda {
namespace {

#define SOTTO_KERNEL(type, function, family) \
  static_assert(kOperandCount<kernels::type> <= kMaxOperands);
#include "core/kernels/kernels.def"

class WorkTable {
 public:
  explicit WorkTable(const KernelSpec& spec) : spec_(spec) {}

  Status add(std::span<const Piece> pieces) {
    if (pieces.size() > UINT32_MAX)
      return error(Code::kUnsupported, "a kernel call of {} pieces: at most {} are possible",
                   pieces.size(), UINT32_MAX);
    for (const Piece& piece : pieces) {
      const bool padding = piece.tensor == kNoTensor;
      if (piece.count == 0 || (padding && !with_padding())) continue;
      if (!padding) tensors_ = std::max<uint64_t>(tensors_, uint64_t{piece.tensor} + 1);
      for (uint64_t first = 0; first < piece.count;) first += add_run(pieces, piece, first);
    }
    if (disorder_)
      return error(Code::kInternal, "the pieces of a kernel call are not in ascending order");
    if (runs.size() > UINT32_MAX || work.size() > INT32_MAX)
      return error(Code::kUnsupported, "a kernel call of {} runs in {} thread blocks is too large",
                   runs.size(), work.size());
    return ok_status();
  }
  uint32_t tensors() const { return static_cast<uint32_t>(tensors_); }

  std::vector<Run> runs;
  std::vector<Work> work;

 private:
  bool with_padding() const {
    return spec_.division == Division::kNorms || spec_.division == Division::kFlatSpace;
  }

  // Elements that the next run takes.
  uint64_t add_run(std::span<const Piece> pieces, const Piece& piece, uint64_t first) {
    uint64_t position = 0;
    uint64_t block = 0;
    bool opens = work.empty();
    switch (spec_.division) {
      case Division::kNorms:
        position = (piece.lane + first) % kNormBlock;
        block = piece.block + (piece.lane + first) / kNormBlock;
        opens = opens || work.back().block != block;
        break;
      case Division::kFlatSpace:
        position = (piece.flat + first) % kNormBlock;
        block = (piece.flat + first) / kNormBlock;
        opens = opens || work.back().block != block || position < end_;
        break;
      case Division::kCounters:
        block = piece.block;
        opens = true;
        break;
      default: {
        // The first position from `end_` on that is aligned as the element is.
        const uint64_t wanted = (piece.*spec_.alignment + first) % 8;
        position = opens ? wanted : end_ + ((wanted - end_) & 3);
        if (position >= kNormBlock) {
          opens = true;
          position = wanted;
        }
      }
    }
    if (opens) {
      work.push_back({block, static_cast<uint32_t>(runs.size()), 0});
      end_ = 0;
    }
    disorder_ = disorder_ || position < end_;
    const uint64_t count = std::min(piece.count - first, kNormBlock - position);
    runs.push_back({first, static_cast<uint32_t>(&piece - pieces.data()),
                    static_cast<uint32_t>(count), static_cast<uint32_t>(position), 0});
    ++work.back().runs;
    end_ = position + count;
    return count;
  }

  const KernelSpec& spec_;
  uint64_t tensors_ = 0;
  uint64_t end_ = 0;  // position behind the last run of the last work
  bool disorder_ = false;
};

template <class T>
uint64_t append(std::span<const T> values, std::vector<std::byte>* tables) {
  const uint64_t at = tables->size();
  const uint64_t padded =
      (values.size_bytes() + kTableAlignment - 1) / kTableAlignment * kTableAlignment;
  tables->resize(at + padded);
  if (!values.empty()) std::memcpy(tables->data() + at, values.data(), values.size_bytes());
  return at;
}

template <class Args>
void keep(const Args& args, PreparedKernel* out) {
  static_assert(sizeof(Args) <= kMaxArgBytes);
  std::memcpy(out->args, &args, sizeof args);
}

// Arguments without their host pointers, whose tables are appended.
template <class Args>
void keep_ranges(const KernelCall& call, PreparedKernel* out) {
  Args args = call.arguments<Args>();
  out->offsets.ranges = append(std::span(args.ranges, args.n), &out->tables);
  args.ranges = nullptr;
  keep(args, out);
}

template <class Args>
void keep_arguments(const KernelCall& call, PreparedKernel* out) {
  if constexpr (std::is_same_v<Args, NoArgs>) {
    return;
  } else if constexpr (std::is_same_v<Args, GateArgs>) {
    GateArgs args = call.arguments<GateArgs>();
    out->offsets.sections = append(std::span(args.sections, args.n_sections), &out->tables);
    args.sections = nullptr;
    keep(args, out);
  } else if constexpr (requires(Args args) { args.ranges; }) {
    keep_ranges<Args>(call, out);
  } else {
    keep(call.arguments<Args>(), out);
  }
}

void keep_arguments(const KernelCall& call, PreparedKernel* out) {
  switch (call.id) {
#define SOTTO_KERNEL(type, function, family) \
  case KernelId::k##type:                    \
    return keep_arguments<kernels::type::Args>(call, out);
#include "core/kernels/kernels.def"
    case KernelId::kCount: return;
  }
}

}  // namespace

Result<PreparedKernel> prepare(const KernelCall& call) {
  const KernelSpec& spec = kernel_spec(call.id);
  if (spec.operands.empty())
    return error(Code::kInternal, "there is no kernel {}", static_cast<uint32_t>(call.id));
  PreparedKernel out;
  out.id = call.id;
  out.operands = static_cast<uint32_t>(spec.operands.size());
  out.lists = list_operands(call.id, call.args);
  out.bytes = call.bytes;
  keep_arguments(call, &out);
  if (spec.division == Division::kBytes) {
    out.blocks = byte_blocks(call.bytes);
    return out;
  }
  if (spec.division == Division::kRanges) {
    const uint64_t blocks = range_blocks(call.arguments<TensorArgs>().n);
    if (blocks > INT32_MAX)
      return error(Code::kUnsupported, "a kernel call over {} tensors is too large",
                   call.arguments<TensorArgs>().n);
    out.blocks = static_cast<uint32_t>(blocks);
    return out;
  }
  if (spec.division == Division::kNever) {
    out.blocks = 1;
    return out;
  }
  WorkTable table(spec);
  if (Status status = table.add(call.pieces); !status.ok()) return status;
  out.blocks = static_cast<uint32_t>(table.work.size());
  out.list_tensors = table.tensors();
  out.offsets.pieces = append(call.pieces, &out.tables);
  out.offsets.runs = append(std::span<const Run>(table.runs), &out.tables);
  out.offsets.work = append(std::span<const Work>(table.work), &out.tables);
  return out;
}

}  // namespace sotto::cuda
