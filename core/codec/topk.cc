// The largest elements of every block of a tensor (kernels/sparse.h; specification sparse-loco,
// section 6). Exchange gather: every rank sends its payload to all others, and each adds up all of
// them; there are no servers and no second encoding. Exchange two_phase: every block has a server,
// the one whose chunk of the flat space it lies in (CodecSettings::tensor_align), which adds up,
// encodes the mean with error feedback of its own, and sends that to all.
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
  uint32_t server = 0;
  uint64_t rows = 0;    // byte of all rows where its first one begins
  uint64_t result = 0;  // byte of the payload of all servers
  uint64_t result_bytes = 0;
  std::vector<Piece> pieces{};
};

// What a rank serves of a tensor.
struct ServedPart {
  uint64_t first = 0;  // element of the tensor
  uint64_t count = 0;
  uint64_t byte = 0;    // of a rank's payload where it begins
  uint64_t result = 0;  // of the payload of all servers
};

// The payload of a rank, in runs, and that of all servers.
class SparseCut {
 public:
  // servers: 1: a rank adds up all blocks, or is alone. me: the server that this rank is.
  SparseCut(const CompressedLayout& layout, const SparseSettings& settings, uint32_t servers,
            uint32_t me, uint64_t segment_bytes)
      : layout_(layout),
        settings_(settings),
        server_(server_settings(settings, servers)),
        servers_(servers),
        me_(me),
        most_(segment_bytes == 0 ? UINT64_MAX : std::min(segment_bytes, kMessageBytes)) {
    for (uint32_t t = 0; t < layout.tensors().size(); ++t) cut(t);
  }

  std::vector<SparseRun>& runs() { return runs_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t result_bytes() const { return result_; }
  uint64_t blocks() const { return blocks_; }
  // Tensors that are not sent whole, and their blocks.
  std::span<const NormRange> selections() const { return selections_; }
  std::span<const ServedPart> served() const { return served_; }
  const SparseSettings& server() const { return server_; }

  // Pieces of a run in the payload of all servers.
  std::vector<Piece> result_pieces(const SparseRun& run) const {
    std::vector<Piece> out = run.pieces;
    for (Piece& p : out) p.target = result_of_[p.tensor] + p.offset;
    return out;
  }
  // The same of a run that this rank serves, where tensors are its served parts; result: in the
  // payload of all servers, else in its own.
  std::vector<Piece> served_pieces(const SparseRun& run, bool result) const {
    std::vector<Piece> out = run.pieces;
    for (Piece& p : out) {
      const uint32_t part = part_of_[p.tensor];
      p.offset -= served_[part].first;
      p.target = (result ? served_[part].result : served_[part].byte) + p.offset;
      p.flat -= layout_.chunk_begin(layout_.sections().front(), me_);
      p.tensor = part;
    }
    return out;
  }

 private:
  // A norm block has whole blocks of every size, and calls are cut between norm blocks.
  void cut(uint32_t t) {
    const uint64_t count = layout_.tensors()[t].count;
    const bool dense = is_dense(settings_, count);
    result_of_.push_back(result_);
    part_of_.push_back(static_cast<uint32_t>(served_.size()));
    if (count == 0) return;
    const auto message = static_cast<uint32_t>(blocks_);
    if (!dense) {
      const uint64_t blocks = sparse_blocks(settings_, count);
      selections_.push_back({.first_block = blocks_, .blocks = blocks, .tensor = t});
      blocks_ += blocks;
    }
    const uint64_t first_byte = bytes_;
    const std::vector<Piece> chunks = layout_.tensor_pieces(t);
    auto chunk = chunks.begin();
    for (uint64_t at = 0, n = 0; at < count; at += n) {
      n = std::min(kNormBlock, count - at);
      uint32_t server = 0;
      if (servers_ > 1) {
        while (at >= chunk->offset + chunk->count) ++chunk;
        server = chunk->chunk;
        n = std::min(n, chunk->offset + chunk->count - at);
        if (server == me_) serve(t, at, n);
      }
      add({.flat = chunks.front().flat + at,
           .offset = at,
           .target = first_byte + at,
           .count = n,
           .block = norm_block_++,
           .tensor = t,
           .scale = dense ? 1u : 0u,
           .message = message},
          server);
    }
  }
  void serve(uint32_t tensor, uint64_t at, uint64_t n) {
    if (part_of_[tensor] == served_.size()) served_.push_back({at, 0, bytes_, result_});
    served_.back().count += n;
  }
  void add(const Piece& piece, uint32_t server) {
    const auto payload = [&](const SparseSettings& s) {
      return piece.scale != 0 ? 4 * piece.count : coded_bytes(s, piece.count);
    };
    const uint64_t bytes = payload(settings_), result = payload(server_);
    const auto full = [&](const SparseRun& run) {
      return run.bytes != 0 && bytes > most_ - std::min(most_, run.bytes);
    };
    if (runs_.empty() || runs_.back().server != server || full(runs_.back()))
      runs_.push_back({.begin = bytes_, .server = server, .result = result_});
    SparseRun& run = runs_.back();
    run.bytes += bytes;
    run.result_bytes += result;
    bytes_ += bytes;
    result_ += result;
    Piece* const last = run.pieces.empty() ? nullptr : &run.pieces.back();
    if (last != nullptr && last->tensor == piece.tensor) {
      last->count += piece.count;
    } else {
      run.pieces.push_back(piece);
    }
  }

  const CompressedLayout& layout_;
  const SparseSettings settings_, server_;
  const uint32_t servers_, me_;
  const uint64_t most_;
  uint64_t bytes_ = 0, result_ = 0, blocks_ = 0, norm_block_ = 0;
  std::vector<SparseRun> runs_;
  std::vector<NormRange> selections_;
  std::vector<ServedPart> served_;
  std::vector<uint64_t> result_of_;  // by tensor
  std::vector<uint32_t> part_of_;    // by tensor
};

class SparsePlan {
 public:
  // ranks: 1: this one alone.
  SparsePlan(PlanBuilder& b, const CompressedMeanRequest& r, uint32_t ranks)
      : b_(b),
        r_(r),
        layout_(*r.layout),
        served_(r.codec.sparse.has_servers() && ranks > 1),
        ranks_(ranks),
        me_(ranks == 1 ? 0 : static_cast<uint32_t>(r.rank)),
        round_(b.next_round()),
        cut_(layout_, r.codec.sparse, served_ ? ranks : 1, me_, r.segment_bytes),
        runs_(cut_.runs()) {
    options_.lane = kMeanLane;
    uint64_t bytes = 0;
    for (SparseRun& run : runs_) {
      run.rows = bytes;
      bytes += adds_up(run) ? run.bytes * ranks_ : run.bytes;
    }
    rows_ = b_.scratch(std::max<uint64_t>(1, bytes));
    flags_ = zeroed_word();
  }

  // In place of what it sends.
  CompressedSlots own_payload() {
    const uint64_t bytes = layout_.shard_elements() * 4;
    CompressedSlots read, own;
    read.worker = b_.bound(bytes);
    own.worker = b_.scratch(bytes);
    b_.copy({own.worker, 0, bytes}, {read.worker, 0, bytes});
    for (const SparseRun& run : runs_) {
      encode(own, run, false);
      add_up(run, absent(), {});
    }
    return read;
  }
  CompressedMean emit() {
    CompressedMean mean;
    mean.slots = add_codec_slots(b_, layout_, r_.codec, true, r_.state_copied);
    b_.stage(served_ ? Stage::kScatter : Stage::kGather);
    order_runs();
    for (const SparseRun& run : runs_) encode_and_send(mean.slots, run);
    for (uint32_t i = 1; i < ranks_; ++i) {
      for (const SparseRun& run : runs_) {
        if (adds_up(run)) b_.recv(static_cast<int32_t>(peer(i)), row(run, peer(i)), round_);
      }
    }
    b_.stage(Stage::kOther);
    mean.slots.messages = mean.exchange.worker_messages = exchange_flags(flags_, round_);
    mean.exchange.gate_workers = mean.exchange.gate =
        gate(mean.exchange.worker_messages, absent(), kSkipNonfinite);
    served_ ? serve_and_decode(&mean) : decode(&mean);
    b_.reserve_rounds(round_ + (served_ ? 2 : 1));
    return mean;
  }

 private:
  // Every rank sends to the next one first. Runs whose inputs arrive first come first.
  void order_runs() {
    std::ranges::stable_sort(runs_, {}, [this](const SparseRun& run) {
      return (run.server + ranks_ - me_ - 1) % ranks_;
    });
    if (r_.late == nullptr) return;
    std::ranges::stable_sort(runs_, {},
                             [this](const SparseRun& run) { return r_.late->last(run.pieces); });
  }

  bool adds_up(const SparseRun& run) const { return !served_ || run.server == me_; }
  // Payload of a rank. The rows of all ranks, of a run that this rank adds up, lie together.
  Region row(const SparseRun& run, uint32_t rank) const {
    return {rows_, run.rows + (adds_up(run) ? rank * run.bytes : 0), run.bytes};
  }
  OperandRef rows(const SparseRun& run) const {
    return whole(rows_, Access::kRead, run.rows, run.bytes * ranks_);
  }
  uint32_t peer(uint32_t i) const { return (me_ + i) % ranks_; }
  SparseArgs args(const SparseRun& run) const {
    return {r_.codec.sparse, run.begin, run.bytes, ranks_, r_.weights.stride};
  }
  SparseArgs result_args(const SparseRun& run) const {
    return {cut_.server(), run.result, run.result_bytes, 1, 0};
  }
  // Of ranks from `first` on.
  OperandRef weights(uint32_t first, uint32_t ranks) const {
    const RankWeights& w = r_.weights;
    if (w.slot == kNoSlot) return absent();
    return whole(w.slot, Access::kRead, w.offset + uint64_t{first} * w.stride,
                 uint64_t{ranks - 1} * w.stride + 4);
  }
  uint32_t zeroed_word() {
    const uint32_t word = b_.scratch(4);
    b_.fill({word, 0, 4}, 0);
    return word;
  }

  void encode_and_send(const CompressedSlots& slots, const SparseRun& run) {
    if (r_.late != nullptr) r_.late->need(run.pieces);
    encode(slots, run, !r_.state_copied);
    if (!adds_up(run)) return b_.send(static_cast<int32_t>(run.server), row(run, me_), round_);
    for (uint32_t i = 1; i < ranks_ && !served_; ++i)
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
  // Who met what is not finite: the message area.
  uint32_t exchange_flags(uint32_t flags, uint32_t round) {
    const uint32_t messages = b_.scratch(uint64_t{4} * ranks_);
    b_.kernel<kernels::NormFinish>(
        {.sums = absent(),
         .counts = absent(),
         .scales = absent(),
         .message = whole(messages, Access::kWrite, uint64_t{4} * me_, 4),
         .flags = whole(flags, Access::kReadWrite, 0, 4)},
        {}, NormArgs{nullptr, 0, ScaleKind::kL2});
    emit_message_exchange(b_, r_.rank, static_cast<int32_t>(ranks_), nullptr, messages, 4, round);
    return messages;
  }
  uint32_t gate(uint32_t messages, const OperandRef& prior, uint32_t fail_word) {
    const uint32_t word = b_.scratch(4);
    b_.kernel<kernels::Gate>({.messages = whole(messages, Access::kRead, 0, uint64_t{4} * ranks_),
                              .prior = prior,
                              .word = whole(word, Access::kWrite, 0, 4)},
                             {}, GateArgs{4, ranks_, fail_word}, options_);
    return word;
  }
  // Of what writes the tensors `out`.
  KernelOptions written(uint32_t gate) const {
    KernelOptions options = options_;
    if (r_.commits) {
      options.predicate = {gate, 0, kCommit};
      options.phase = Phase::kCommitting;
    }
    return options;
  }

  void decode(CompressedMean* mean) {
    const OperandRef factors = r_.codec.sparse.median_clip ? median_factors() : absent();
    const KernelOptions options = written(mean->exchange.gate);
    for (const SparseRun& run : runs_) add_up(run, factors, options);
  }
  // What the values of ranks are multiplied with, by tensor and rank.
  OperandRef median_factors() {
    if (cut_.selections().empty()) return absent();
    const uint64_t square_bytes = cut_.blocks() * ranks_ * sizeof(double);
    const uint64_t factor_bytes = layout_.tensors().size() * ranks_ * sizeof(float);
    const uint32_t squares = b_.scratch(square_bytes), factors = b_.scratch(factor_bytes);
    for (const SparseRun& run : runs_) {
      b_.kernel<kernels::SparseSquares>(
          {.rows = rows(run), .squares = whole(squares, Access::kReadWrite, 0, square_bytes)},
          run.pieces, args(run), options_);
    }
    b_.kernel<kernels::SparseMedian>(
        {.squares = whole(squares, Access::kRead, 0, square_bytes),
         .weights = weights(0, ranks_),
         .factors = whole(factors, Access::kReadWrite, 0, factor_bytes)},
        {},
        SparseMedianArgs{b_.keep_array(cut_.selections()), cut_.selections().size(), ranks_,
                         r_.weights.stride},
        options_);
    return whole(factors, Access::kRead, 0, factor_bytes);
  }
  void add_up(const SparseRun& run, const OperandRef& factors, const KernelOptions& options) {
    b_.kernel<kernels::SparseMean>({.rows = rows(run),
                                    .weights = weights(0, ranks_),
                                    .factors = factors,
                                    .y = list(r_.out, Access::kWrite, 32)},
                                   run.pieces, args(run), options);
  }

  void serve_and_decode(CompressedMean* mean) {
    const CompressedSlots& slots = mean->slots;
    const uint64_t error_bytes = layout_.chunk_elements() * 4;
    b_.committed(slots.server);
    b_.copy({slots.server_next, 0, error_bytes}, {slots.server, 0, error_bytes}, options_);
    const uint32_t results = b_.scratch(std::max<uint64_t>(1, cut_.result_bytes()));
    const uint32_t flags = zeroed_word(), sums = sums_of_served_parts();
    b_.stage(Stage::kGather);
    const auto result = [&](const SparseRun& run) {
      return Region{results, run.result, run.result_bytes};
    };
    for (const SparseRun& run : runs_) {
      if (!adds_up(run)) continue;
      serve(run, slots, sums, result(run), flags);
      for (uint32_t i = 1; i < ranks_; ++i)
        b_.send(static_cast<int32_t>(peer(i)), result(run), round_ + 1);
    }
    for (const SparseRun& run : runs_) {
      if (!adds_up(run)) b_.recv(static_cast<int32_t>(run.server), result(run), round_ + 1);
    }
    b_.stage(Stage::kOther);
    mean->slots.messages = exchange_flags(flags, round_ + 1);
    mean->exchange.gate = gate(
        mean->slots.messages, whole(mean->exchange.gate_workers, Access::kRead, 0, 4), kSkipServer);
    emit_server_reset(b_, layout_, slots, mean->exchange.gate);
    for (const SparseRun& run : runs_) {
      const Region payload = result(run);
      b_.kernel<kernels::SparseMean>(
          {.rows = whole(results, Access::kRead, payload.offset, payload.bytes),
           .weights = absent(),
           .factors = absent(),
           .y = list(r_.out, Access::kWrite, 32)},
          cut_.result_pieces(run), result_args(run), written(mean->exchange.gate));
    }
  }
  // A list, one slot for each.
  uint32_t sums_of_served_parts() {
    uint32_t first = kNoSlot;
    for (const ServedPart& part : cut_.served()) {
      const uint32_t slot = b_.scratch(part.count * 4);
      if (first == kNoSlot) first = slot;
    }
    return first;
  }
  void serve(const SparseRun& run, const CompressedSlots& slots, uint32_t sums,
             const Region& result, uint32_t flags) {
    b_.kernel<kernels::SparseMean>({.rows = rows(run),
                                    .weights = weights(0, ranks_),
                                    .factors = absent(),
                                    .y = list(sums, Access::kWrite, 32)},
                                   cut_.served_pieces(run, false), args(run), options_);
    b_.kernel<kernels::SparseEncode>(
        {.x = list(sums, Access::kRead, 32),
         .e = flat(slots.server_next, Access::kReadWrite, 32),
         .payload = whole(result.slot, Access::kReadWrite, result.offset, result.bytes),
         .flags = whole(flags, Access::kReadWrite, 0, 4),
         .weight = absent()},
        cut_.served_pieces(run, true), result_args(run), options_);
  }

  PlanBuilder& b_;
  const CompressedMeanRequest& r_;
  const CompressedLayout& layout_;
  const bool served_;
  const uint32_t ranks_, me_, round_;
  SparseCut cut_;
  std::vector<SparseRun>& runs_;
  KernelOptions options_;
  uint32_t rows_ = kNoSlot, flags_ = kNoSlot;
};

class TopkCoding final : public Coding {
 public:
  CompressedMean mean(PlanBuilder& b, const CompressedMeanRequest& r) const override {
    return SparsePlan(b, r, r.layout->servers()).emit();
  }
  CompressedSlots own_payload(PlanBuilder& b, const CompressedMeanRequest& r) const override {
    return SparsePlan(b, r, 1).own_payload();
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
