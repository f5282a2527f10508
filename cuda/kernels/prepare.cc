// What each thread block does is decided here, once per call.
#include "cuda/kernels/prepare.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "cuda/kernels/tables.h"

namespace sotto::cuda {
namespace {

// How the elements of a call are spread over thread blocks.
enum class Spread : uint8_t {
  kNothing,   // one thread block, no pieces
  kQuads,     // up to kNormBlock elements each, padding left out
  kNorms,     // one norm block each, with padding
  kFlat,      // the flat elements from one multiple of kNormBlock to the next, with padding
  kCounters,  // runs of one piece; the block of a run is the index of its counter
  kRanges,    // TensorArgs::ranges, some per thread block
  kBytes,     // kFill
};

// How many operands a kernel has, and which of them are lists.
struct Shape {
  Spread spread;
  uint32_t operands;
  uint32_t lists;
  // Which index of a piece decides where quads begin: that of most of the memory.
  uint64_t Piece::*alignment = &Piece::flat;
};

constexpr uint32_t bit(uint32_t k) { return 1u << k; }

Shape shape_of(const KernelCall& call) {
  switch (call.id) {
    case KernelId::kFill: return {Spread::kBytes, 1, 0};
    case KernelId::kPack: return {Spread::kQuads, 2, bit(0)};
    case KernelId::kUnpack: return {Spread::kQuads, 2, bit(1)};
    case KernelId::kConvert: return {Spread::kQuads, 2, bit(0) | bit(1), &Piece::offset};
    case KernelId::kAccumulate: return {Spread::kQuads, 3, bit(0) | bit(1), &Piece::offset};
    case KernelId::kReduce: {
      const auto& a = call.arguments<ReduceArgs>();
      return {Spread::kQuads, 4, (a.own_flat ? 0 : bit(0)) | (a.out_flat ? 0 : bit(2))};
    }
    case KernelId::kOnebitEncode: return {Spread::kNorms, 8, bit(0)};
    case KernelId::kOnebitEncodeUndo: return {Spread::kQuads, 8, bit(0)};
    case KernelId::kOnebitLambEncode: return {Spread::kNorms, 13, bit(0)};
    case KernelId::kOnebitLambEncodeUndo: return {Spread::kQuads, 13, bit(0)};
    case KernelId::kNormFinish: return {Spread::kNothing, 5, 0};
    case KernelId::kOnebitServer: return {Spread::kNorms, 8, 0};
    case KernelId::kOnebitDecode: return {Spread::kQuads, 4, bit(2), &Piece::target};
    case KernelId::kQuantEncode: return {Spread::kFlat, 4, bit(0)};
    case KernelId::kQuantEncodeUndo: return {Spread::kQuads, 4, bit(0)};
    case KernelId::kQuantServer: return {Spread::kFlat, 5, 0};
    case KernelId::kQuantDecode: return {Spread::kQuads, 2, bit(1), &Piece::target};
    case KernelId::kGate: return {Spread::kNothing, 3, 0};
    case KernelId::kSumSquares: return {Spread::kNorms, 2, bit(0)};
    case KernelId::kNormMessage: return {Spread::kNothing, 3, 0};
    case KernelId::kClipCoefficient: return {Spread::kNothing, 6, 0};
    case KernelId::kAdam: return {Spread::kQuads, 7, bit(0) | bit(3)};
    case KernelId::kAdamNarrow: return {Spread::kNorms, 10, bit(0) | bit(3)};
    case KernelId::kLambMoments: return {Spread::kNorms, 10, bit(0) | bit(3) | bit(9)};
    case KernelId::kLambScalars: return {Spread::kRanges, 5, 0};
    case KernelId::kLambUpdate: return {Spread::kQuads, 3, bit(0) | bit(1), &Piece::offset};
    case KernelId::kFreezeVariance: return {Spread::kNorms, 7, 0};
    case KernelId::kCountValid: return {Spread::kCounters, 2, 0};
    case KernelId::kOnebitLambScaling: return {Spread::kNothing, 3, 0};
    case KernelId::kOnebitLambFactor: return {Spread::kNorms, 15, bit(8)};
    case KernelId::kOnebitLambScalars: return {Spread::kRanges, 6, 0};
    case KernelId::kMomentumUpdate: return {Spread::kQuads, 9, bit(4)};
    case KernelId::kMomentumFromBits: return {Spread::kQuads, 5, 0};
    case KernelId::kStepSizes: return {Spread::kRanges, 2, 0};
    case KernelId::kSgd: return {Spread::kQuads, 6, bit(0) | bit(2)};
    case KernelId::kSgdNarrow: return {Spread::kNorms, 8, bit(0) | bit(2)};
    case KernelId::kFrozenAdam: return {Spread::kQuads, 9, bit(0) | bit(5)};
    case KernelId::kZeroOneLocal: return {Spread::kQuads, 9, bit(0) | bit(5)};
    case KernelId::kZeroOneEncode: return {Spread::kNorms, 11, bit(0)};
    case KernelId::kZeroOneEncodeUndo: return {Spread::kQuads, 11, bit(0)};
    case KernelId::kZeroOneSync: return {Spread::kQuads, 10, bit(7)};
    case KernelId::kZeroOneInPlaceLocal: return {Spread::kQuads, 7, bit(0) | bit(4)};
    case KernelId::kZeroOneInPlaceSum: return {Spread::kQuads, 9, bit(0) | bit(4) | bit(7)};
    case KernelId::kZeroOneInPlaceSync: return {Spread::kQuads, 11, bit(0) | bit(4) | bit(7)};
    case KernelId::kCount: break;
  }
  return {Spread::kNothing, 0, 0};
}

class WorkTable {
 public:
  explicit WorkTable(const Shape& shape) : shape_(shape) {}

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
    return shape_.spread == Spread::kNorms || shape_.spread == Spread::kFlat;
  }

  // Elements that the next run takes.
  uint64_t add_run(std::span<const Piece> pieces, const Piece& piece, uint64_t first) {
    uint64_t position = 0;
    uint64_t block = 0;
    bool opens = work.empty();
    switch (shape_.spread) {
      case Spread::kNorms:
        position = (piece.lane + first) % kNormBlock;
        block = piece.block + (piece.lane + first) / kNormBlock;
        opens = opens || work.back().block != block;
        break;
      case Spread::kFlat:
        position = (piece.flat + first) % kNormBlock;
        block = (piece.flat + first) / kNormBlock;
        opens = opens || work.back().block != block || position < end_;
        break;
      case Spread::kCounters:
        block = piece.block;
        opens = true;
        break;
      default: {
        // The first position from `end_` on that is aligned as the element is.
        const uint64_t wanted = (piece.*shape_.alignment + first) % 8;
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

  const Shape shape_;
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

void keep_arguments(const KernelCall& call, PreparedKernel* out) {
  switch (call.id) {
    case KernelId::kFill: return keep(call.arguments<FillArgs>(), out);
    case KernelId::kPack:
    case KernelId::kUnpack: return keep(call.arguments<PackArgs>(), out);
    case KernelId::kConvert: return keep(call.arguments<ConvertArgs>(), out);
    case KernelId::kAccumulate: return keep(call.arguments<AccumulateArgs>(), out);
    case KernelId::kReduce: return keep(call.arguments<ReduceArgs>(), out);
    case KernelId::kOnebitEncode:
    case KernelId::kOnebitEncodeUndo:
    case KernelId::kOnebitLambEncode:
    case KernelId::kOnebitLambEncodeUndo:
    case KernelId::kZeroOneEncode:
    case KernelId::kZeroOneEncodeUndo: return keep(call.arguments<EncodeArgs>(), out);
    case KernelId::kNormFinish: return keep_ranges<NormArgs>(call, out);
    case KernelId::kOnebitServer: return keep(call.arguments<ServerArgs>(), out);
    case KernelId::kQuantEncode:
    case KernelId::kQuantEncodeUndo:
    case KernelId::kQuantServer:
    case KernelId::kQuantDecode: return keep(call.arguments<QuantArgs>(), out);
    case KernelId::kGate: {
      GateArgs args = call.arguments<GateArgs>();
      out->offsets.sections = append(std::span(args.sections, args.n_sections), &out->tables);
      args.sections = nullptr;
      return keep(args, out);
    }
    case KernelId::kNormMessage: return keep(call.arguments<BlocksArgs>(), out);
    case KernelId::kClipCoefficient: return keep(call.arguments<ClipArgs>(), out);
    case KernelId::kLambScalars:
    case KernelId::kOnebitLambScalars:
    case KernelId::kStepSizes: return keep_ranges<TensorArgs>(call, out);
    case KernelId::kOnebitLambScaling: return keep_ranges<ScalingArgs>(call, out);
    case KernelId::kFreezeVariance: return keep(call.arguments<FreezeArgs>(), out);
    case KernelId::kSgd: return keep(call.arguments<SgdArgs>(), out);
    case KernelId::kAdamNarrow:
    case KernelId::kSgdNarrow: return keep(call.arguments<NarrowArgs>(), out);
    case KernelId::kSumSquares:
    case KernelId::kAdam:
    case KernelId::kLambMoments:
    case KernelId::kFrozenAdam:
    case KernelId::kZeroOneLocal:
    case KernelId::kZeroOneInPlaceLocal:
    case KernelId::kZeroOneInPlaceSum:
    case KernelId::kZeroOneInPlaceSync: return keep(call.arguments<SourceArgs>(), out);
    default: return;  // NoArgs
  }
}

}  // namespace

Result<PreparedKernel> prepare(const KernelCall& call) {
  const Shape shape = shape_of(call);
  if (shape.operands == 0)
    return error(Code::kInternal, "there is no kernel {}", static_cast<uint32_t>(call.id));
  PreparedKernel out;
  out.id = call.id;
  out.operands = shape.operands;
  out.lists = shape.lists;
  out.bytes = call.bytes;
  keep_arguments(call, &out);
  if (shape.spread == Spread::kBytes) {
    out.blocks = byte_blocks(call.bytes);
    return out;
  }
  if (shape.spread == Spread::kRanges) {
    const uint64_t blocks = range_blocks(call.arguments<TensorArgs>().n);
    if (blocks > INT32_MAX)
      return error(Code::kUnsupported, "a kernel call over {} tensors is too large",
                   call.arguments<TensorArgs>().n);
    out.blocks = static_cast<uint32_t>(blocks);
    return out;
  }
  if (shape.spread == Spread::kNothing) {
    out.blocks = 1;
    return out;
  }
  WorkTable table(shape);
  if (Status status = table.add(call.pieces); !status.ok()) return status;
  out.blocks = static_cast<uint32_t>(table.work.size());
  out.list_tensors = table.tensors();
  out.offsets.pieces = append(call.pieces, &out.tables);
  out.offsets.runs = append(std::span<const Run>(table.runs), &out.tables);
  out.offsets.work = append(std::span<const Work>(table.work), &out.tables);
  return out;
}

}  // namespace sotto::cuda
