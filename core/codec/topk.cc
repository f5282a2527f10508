// The largest elements of every block of a tensor (kernels/sparse.h; specification sparse-loco):
// every rank sends its payload to all others, and each adds up all of them. So there are no servers
// and no second encoding.
#include <algorithm>

#include "core/codec/coding.h"
#include "core/codec/compressed.h"
#include "core/kernels/sparse.h"
#include "core/plan/collectives.h"

namespace sotto {
namespace {

// Kernels that add up have a lane of their own, as in compressed.cc.
constexpr uint16_t kMeanLane = 1;
// Payload of a message; a block is a few hundred times as many elements.
constexpr uint64_t kMessageBytes = 64 * 1024;

// Blocks that are encoded together and sent as one message.
struct SparseRun {
  uint64_t begin = 0;  // byte of a rank's payload
  uint64_t bytes = 0;
  std::vector<Piece> pieces;
};

class Gather {
 public:
  // ranks: 1: this one alone.
  Gather(PlanBuilder& b, const CompressedMeanRequest& r, uint32_t ranks)
      : b_(b),
        r_(r),
        layout_(*r.layout),
        ranks_(ranks),
        me_(ranks == 1 ? 0 : static_cast<uint32_t>(r.rank)),
        round_(b.next_round()) {
    cut();
  }

  // In place of what it sends.
  CompressedSlots own_payload() {
    const uint64_t bytes = layout_.shard_elements() * 4;
    CompressedSlots read, own;
    read.worker = b_.bound(bytes);
    own.worker = b_.scratch(bytes);
    b_.copy({own.worker, 0, bytes}, {read.worker, 0, bytes});
    rows_ = b_.scratch(std::max<uint64_t>(1, bytes_));
    flags_ = b_.scratch(4);
    b_.fill({flags_, 0, 4}, 0);
    for (const SparseRun& run : runs_) {
      encode(own, run, false);
      add_up(run, {});
    }
    return read;
  }
  CompressedMean emit() {
    CompressedMean mean;
    mean.slots = add_codec_slots(b_, layout_, r_.codec, true, r_.state_copied);
    rows_ = b_.scratch(std::max<uint64_t>(1, bytes_ * ranks_));
    flags_ = b_.scratch(4);
    b_.fill({flags_, 0, 4}, 0);
    b_.stage(Stage::kGather);
    if (r_.late != nullptr) order_runs();
    for (const SparseRun& run : runs_) encode_and_send(mean.slots, run);
    receive();
    b_.stage(Stage::kOther);
    const uint32_t messages = exchange_flags();
    mean.slots.messages = mean.exchange.worker_messages = messages;
    mean.exchange.gate_workers = mean.exchange.gate = gate(messages);
    KernelOptions options;
    options.lane = kMeanLane;
    if (r_.commits) {
      options.predicate = {mean.exchange.gate, 0, kCommit};
      options.phase = Phase::kCommitting;
    }
    for (const SparseRun& run : runs_) add_up(run, options);
    b_.reserve_rounds(round_ + 1);
    return mean;
  }

 private:
  // A norm block has whole blocks of every size, and calls are cut between norm blocks.
  void cut() {
    const uint64_t most =
        r_.segment_bytes == 0 ? UINT64_MAX : std::min(r_.segment_bytes, kMessageBytes);
    const SparseSettings& s = r_.codec.sparse;
    uint64_t norm_block = 0;
    for (uint32_t t = 0; t < layout_.tensors().size(); ++t) {
      const uint64_t count = layout_.tensors()[t].count;
      if (count == 0) continue;
      const bool dense = is_dense(s, count);
      const uint64_t first_byte = bytes_, flat = layout_.tensor_pieces(t).front().flat;
      for (uint64_t at = 0; at < count; at += kNormBlock) {
        const uint64_t n = std::min(kNormBlock, count - at);
        add({.flat = flat + at,
             .offset = at,
             .target = first_byte + at,
             .count = n,
             .block = norm_block++,
             .tensor = t,
             .scale = dense ? 1u : 0u},
            dense ? 4 * n : coded_bytes(s, n), most);
      }
    }
  }
  void add(const Piece& piece, uint64_t bytes, uint64_t most) {
    if (runs_.empty() ||
        (runs_.back().bytes != 0 && bytes > most - std::min(most, runs_.back().bytes)))
      runs_.push_back({bytes_, 0, {}});
    SparseRun& run = runs_.back();
    run.bytes += bytes;
    bytes_ += bytes;
    Piece* const last = run.pieces.empty() ? nullptr : &run.pieces.back();
    if (last != nullptr && last->tensor == piece.tensor) {
      last->count += piece.count;
    } else {
      run.pieces.push_back(piece);
    }
  }

  // Runs whose inputs arrive first come first.
  void order_runs() {
    std::ranges::stable_sort(runs_, {},
                             [this](const SparseRun& run) { return r_.late->last(run.pieces); });
  }

  // Payload of a rank. Of every run the rows of all ranks lie together.
  Region row(const SparseRun& run, uint32_t rank) const {
    return {rows_, run.begin * ranks_ + rank * run.bytes, run.bytes};
  }
  uint32_t peer(uint32_t i) const { return (me_ + i) % ranks_; }
  SparseArgs args(const SparseRun& run) const {
    return {r_.codec.sparse, run.begin, run.bytes, ranks_, r_.weights.stride};
  }
  // Of ranks from `first` on.
  OperandRef weights(uint32_t first, uint32_t ranks) const {
    const RankWeights& w = r_.weights;
    if (w.slot == kNoSlot) return absent();
    return whole(w.slot, Access::kRead, w.offset + uint64_t{first} * w.stride,
                 uint64_t{ranks - 1} * w.stride + 4);
  }

  void encode_and_send(const CompressedSlots& slots, const SparseRun& run) {
    if (r_.late != nullptr) r_.late->need(run.pieces);
    encode(slots, run, !r_.state_copied);
    for (uint32_t i = 1; i < ranks_; ++i)
      b_.send(static_cast<int32_t>(peer(i)), row(run, me_), round_);
  }
  void encode(const CompressedSlots& slots, const SparseRun& run, bool undone) {
    const Region own = row(run, me_);
    b_.kernel_with_undo<kernels::SparseEncode>(
        {.x = list(r_.in, Access::kRead, 32),
         .e = flat(slots.worker, Access::kReadWrite, 32),
         .payload = whole(own.slot, Access::kReadWrite, own.offset, own.bytes),
         .flags = whole(flags_, Access::kReadWrite, 0, 4),
         .weight = weights(me_, 1)},
        run.pieces, args(run), undone);
  }
  void receive() {
    for (uint32_t i = 1; i < ranks_; ++i) {
      for (const SparseRun& run : runs_)
        b_.recv(static_cast<int32_t>(peer(i)), row(run, peer(i)), round_);
    }
  }
  // Who met what is not finite: the message area.
  uint32_t exchange_flags() {
    const uint32_t messages = b_.scratch(uint64_t{4} * ranks_);
    b_.kernel<kernels::NormFinish>(
        {.sums = absent(),
         .counts = absent(),
         .scales = absent(),
         .message = whole(messages, Access::kWrite, uint64_t{4} * me_, 4),
         .flags = whole(flags_, Access::kReadWrite, 0, 4)},
        {}, NormArgs{nullptr, 0, ScaleKind::kL2});
    emit_message_exchange(b_, r_.rank, static_cast<int32_t>(ranks_), messages, 4, round_);
    return messages;
  }
  uint32_t gate(uint32_t messages) {
    const uint32_t word = b_.scratch(4);
    KernelOptions options;
    options.lane = kMeanLane;
    b_.kernel<kernels::Gate>({.messages = whole(messages, Access::kRead, 0, uint64_t{4} * ranks_),
                              .prior = absent(),
                              .word = whole(word, Access::kWrite, 0, 4)},
                             {}, GateArgs{4, ranks_, kSkipNonfinite}, options);
    return word;
  }
  void add_up(const SparseRun& run, const KernelOptions& options) {
    b_.kernel<kernels::SparseMean>(
        {.rows = whole(rows_, Access::kRead, run.begin * ranks_, run.bytes * ranks_),
         .weights = weights(0, ranks_),
         .y = list(r_.out, Access::kWrite, 32)},
        run.pieces, args(run), options);
  }

  PlanBuilder& b_;
  const CompressedMeanRequest& r_;
  const CompressedLayout& layout_;
  const uint32_t ranks_, me_, round_;
  uint32_t rows_ = kNoSlot, flags_ = kNoSlot;
  uint64_t bytes_ = 0;  // payload of a rank
  std::vector<SparseRun> runs_;
};

class TopkCoding final : public Coding {
 public:
  CompressedMean mean(PlanBuilder& b, const CompressedMeanRequest& r) const override {
    return Gather(b, r, r.layout->servers()).emit();
  }
  CompressedSlots own_payload(PlanBuilder& b, const CompressedMeanRequest& r) const override {
    return Gather(b, r, 1).own_payload();
  }
  // Errors are those of elements, whatever the blocks are. Tensors that are sent whole have none.
  std::string state_name(const CodecSettings& codec) const override {
    const uint64_t dense = codec.sparse.dense_below;
    return dense == 0 ? "topk" : fmt::format("topk/dense_below {}", dense);
  }
  std::string_view refused() const override { return "NaN or Inf"; }
};

}  // namespace

const Coding& topk_coding() {
  static const TopkCoding coding;
  return coding;
}

}  // namespace sotto
