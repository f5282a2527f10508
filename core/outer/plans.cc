#include "core/outer/plans.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "core/optim/step_operands.h"
#include "core/outer/average.h"
#include "core/outer/step_norms.h"
#include "core/plan/collectives.h"

namespace sotto {
namespace {

bool clips_by_gamma(const OuterConfig& c) {
  return c.clip.units == OuterClipUnits::kGrad && !c.rule.lr_normalised &&
         (c.clip.kind == OuterClip::kCoordinate || c.clip.kind == OuterClip::kNorm);
}

// OuterFactorsArgs, of an average.
uint32_t divided(const OuterShape& shape, bool compressed) {
  if (!compressed) return 1;
  return shape.config->codec->row().sparse ? 0 : static_cast<uint32_t>(shape.size);
}

class OuterBuilder {
 public:
  // next: what is launched goes to a codec.
  explicit OuterBuilder(const OuterShape& shape, bool next = false)
      : x_(shape),
        next_(next),
        s_(*shape.config),
        layout_(*shape.layout),
        pieces_(all_tensor_pieces(layout_)) {
    out_.arrays.fill(kNoSlot);
  }

  OuterPlan launch();
  OuterPlan reduction(bool compressed);
  OuterPlan update(bool compressed);
  OuterPlan hold();
  OuterPlan agreement();
  OuterPlan swap(bool back);
  OuterPlan start();
  OuterPlan inner_sum();

 private:
  uint32_t array(OuterArray which) {
    uint32_t& slot = out_.arrays[static_cast<size_t>(which)];
    if (slot == kNoSlot) slot = b_.bound(x_.bytes_of(which));
    return slot;
  }
  OperandRef flat_of(OuterArray which, Access access) { return flat(array(which), access, 32); }
  OperandRef all_of(OuterArray which, Access access) {
    return whole(array(which), access, 0, x_.bytes_of(which));
  }
  OperandRef params(Access access) {
    if (out_.params == kNoSlot) {
      std::vector<uint64_t> bytes;
      for (const LayoutTensor& t : layout_.tensors()) bytes.push_back(t.count * 4);
      out_.params = b_.bound_list(bytes);
    }
    return list(out_.params, access, 32);
  }
  template <class T>
  OperandRef from_host(uint32_t& slot) {
    slot = b_.host(sizeof(T));
    const uint32_t here = b_.scratch(sizeof(T));
    b_.copy({here, 0, sizeof(T)}, {slot, 0, sizeof(T)});
    return whole(here, Access::kRead, 0, sizeof(T));
  }
  // What Unpack writes, at the places that pieces have there.
  OperandRef live() {
    params(Access::kWrite);
    return target(out_.params, Access::kWrite, 32);
  }
  std::vector<Piece> to_tensors() const {
    std::vector<Piece> pieces = pieces_;
    for (Piece& piece : pieces) piece.target = piece.offset;
    return pieces;
  }
  uint32_t measure(bool keeps);  // block sums; the flags are then in flags_
  // Overwrites what the average under way was made of.
  void emit_launch();
  void keep_sent();
  // Tensors as parts of a flat array, for a codec.
  uint32_t parts_of(OuterArray which) { return add_parts(b_, layout_, array(which)); }
  uint32_t summand();
  CompressedMeanRequest mean_of_payload(OuterArray to, OuterArray weights);
  void compress(uint64_t segment_bytes);

  // Where live parameters are as they were at the launch.
  OuterArray launch_live() const {
    return x_.bytes_of(OuterArray::kLaunchLive) != 0 ? OuterArray::kLaunchLive
                                                     : OuterArray::kPayload;
  }
  // Progress counts from the payload, which so stays what it was also where the rank is left out.
  bool counts_from_payload() const {
    return s_.merge.kind == OuterMerge::kAddProgress && launch_live() == OuterArray::kPayload;
  }
  OuterMerge merge() const { return x_.last ? OuterMerge::kReset : s_.merge.kind; }
  OuterPenaltyArgs penalty() const;
  OuterStepArgs step_args(OuterPass pass) const;
  kernels::OuterStepOperands<OperandRef> step_operands(const OuterUpdateMemory& m, bool average);
  // Scratch copies that the update works on and keeps if it commits.
  OuterUpdateMemory update_memory();
  OperandRef norm_of_average(bool compressed);
  // With an average; else with this rank's message alone, and no penalty.
  void emit_factors(const OuterUpdateMemory& m, bool average, bool compressed);
  // What is emitted from here to `finish` comes after a step that commits: all of it is made, or
  // the operation has overwritten nothing.
  void commit_from_here(const OuterUpdateMemory& m);
  void emit_step(const OuterUpdateMemory& m, bool average);
  // Where no rank takes part the anchor stays, and live parameters still merge with it.
  // from: what progress is counted from.
  void emit_merge(const OuterUpdateMemory& m, OuterArray from, const KernelOptions& options);
  void write_copies(const KernelOptions& options);
  OuterPlan finish(const OuterUpdateMemory& m, bool average);

  const OuterShape& x_;
  const bool next_;
  const OuterConfig& s_;
  const CompressedLayout& layout_;
  const std::vector<Piece> pieces_;
  PlanBuilder b_;
  OuterPlan out_;
  OuterStepAhead ahead_;  // of norms over shards
  uint32_t flags_ = kNoSlot;
  uint32_t commits_ = kNoStep;  // of commit_from_here
};

uint32_t OuterBuilder::measure(bool keeps) {
  flags_ = b_.scratch(4);
  b_.fill({flags_, 0, 4}, 0);
  const uint32_t sums = outer_block_sums(b_, x_);
  const bool params_payload = keeps && s_.payload == OuterPayload::kParams;
  b_.kernel<kernels::OuterDelta>(
      {.x = params(Access::kRead),
       .anchor = flat_of(OuterArray::kAnchor, Access::kRead),
       .y = keeps ? flat_of(OuterArray::kPayload, Access::kWrite) : absent(),
       .sums = blocks(sums, Access::kWrite),
       .flags = whole(flags_, Access::kReadWrite, 0, 4)},
      pieces_, OuterDeltaArgs{params_payload});
  return sums;
}

void OuterBuilder::emit_launch() {
  const uint32_t sums = measure(true);
  // A rank whose payload passes takes part as all others.
  if (s_.nonfinite == OuterNonfinite::kPass) b_.fill({flags_, 0, 4}, 0);
  const uint32_t word = b_.scratch(4);
  const uint64_t n = layout_.tensor_blocks();
  b_.kernel<kernels::OuterTell>(
      {.sums = whole(sums, Access::kRead, 0, n * 4),
       .flags = whole(flags_, Access::kRead, 0, 4),
       .segments = whole(array(OuterArray::kSegments), Access::kRead, 0, sizeof(OuterSegment)),
       .inner_sum = x_.bytes_of(OuterArray::kInnerSum) != 0
                        ? all_of(OuterArray::kInnerSum, Access::kRead)
                        : absent(),
       .host = from_host<OuterMessage>(out_.told),
       .message = all_of(OuterArray::kMessage, Access::kWrite),
       .word = whole(word, Access::kWrite, 0, 4)},
      {}, OuterMessageArgs{n});
  if (!counts_from_payload()) {
    KernelOptions if_left_out;
    if_left_out.predicate = {word, 0, kSkipNonfinite};
    b_.fill({array(OuterArray::kPayload), 0, x_.bytes_of(OuterArray::kPayload)}, 0, if_left_out);
  }
  if (x_.bytes_of(OuterArray::kLaunchLive) != 0) {
    b_.kernel<kernels::Pack>({.tensors = params(Access::kRead),
                              .flat = flat_of(OuterArray::kLaunchLive, Access::kWrite)},
                             pieces_, PackArgs{0, 4});
  }
  if (layout_.elements() == 0) return;
  if (x_.keeps_sent()) keep_sent();
  if (x_.keeps_launch_errors()) keep_launch_errors(b_, x_, &out_.codec);
}

void OuterBuilder::keep_sent() {
  const uint64_t bytes = x_.bytes_of(OuterArray::kSent);
  if (!next_) {
    b_.copy({array(OuterArray::kSent), 0, bytes}, {array(OuterArray::kPayload), 0, bytes});
    return;
  }
  CompressedMeanRequest r = mean_of_payload(OuterArray::kSent, OuterArray::kMessage);
  r.segment_bytes = 0;
  out_.codec = emit_own_payload(b_, r);
}

OuterPlan OuterBuilder::launch() {
  emit_launch();
  out_.plan = b_.take();
  return std::move(out_);
}

CompressedMeanRequest OuterBuilder::mean_of_payload(OuterArray to, OuterArray weights) {
  CompressedMeanRequest r{x_.rank,      &layout_, *s_.codec, parts_of(OuterArray::kPayload),
                          parts_of(to), x_.levels};
  r.weights = {array(weights), offsetof(OuterMessage, weight), sizeof(OuterMessage)};
  return r;
}

void OuterBuilder::compress(uint64_t segment_bytes) {
  CompressedMeanRequest r = mean_of_payload(OuterArray::kResult, OuterArray::kMessages);
  r.segment_bytes = segment_bytes;
  const CompressedMean mean = emit_compressed_mean(b_, r);
  out_.codec = mean.slots;
  b_.set_verdict(b_.host(8), mean.exchange.gate);
  emit_without_average(b_, x_, mean.slots, array(OuterArray::kMessages),
                       array(OuterArray::kResult));
}

// What of the payload goes into the sum.
uint32_t OuterBuilder::summand() {
  const uint32_t payload = array(OuterArray::kPayload);
  if (!counts_from_payload()) return payload;
  const uint64_t bytes = x_.bytes_of(OuterArray::kPayload);
  const uint32_t summed = b_.scratch(bytes);
  b_.copy({summed, 0, bytes}, {payload, 0, bytes});
  KernelOptions if_left_out;
  if_left_out.predicate = {array(OuterArray::kMessage), offsetof(OuterMessage, weight), 0};  // 0.0f
  b_.fill({summed, 0, bytes}, 0, if_left_out);
  return summed;
}

OuterPlan OuterBuilder::reduction(bool compressed) {
  constexpr uint64_t kBytes = sizeof(OuterMessage);
  const uint32_t messages = array(OuterArray::kMessages);
  b_.copy({messages, static_cast<uint64_t>(x_.rank) * kBytes, kBytes},
          {array(OuterArray::kMessage), 0, kBytes});
  if (!x_.alone())
    emit_message_exchange(b_, x_.rank, x_.size, x_.levels, messages, kBytes, b_.next_round());
  const uint32_t first = b_.next_round();
  Slicing slicing;
  if (layout_.elements() != 0) {
    const AverageCut cut = cut_of_average(x_, compressed);
    if (compressed) {
      compress(cut.segment_bytes);
    } else {
      emit_sum(b_, x_, summand(), array(OuterArray::kResult), cut.segment_bytes);
    }
    slicing = {first, b_.next_round() - first, cut.slices};
  }
  out_.plan = b_.take();
  out_.plan.slicing = slicing;
  return std::move(out_);
}

OuterPenaltyArgs OuterBuilder::penalty() const {
  return {.kind = s_.penalty.kind,
          .stale = s_.late(),
          .consensus = s_.penalty.consensus_scalars,
          .element = x_.by_element(),
          .constant = s_.penalty.lambda_const,
          .lambda_max = s_.penalty.lambda_max,
          .floor = s_.floor(),
          .eps = s_.penalty.eps};
}

OuterStepArgs OuterBuilder::step_args(OuterPass pass) const {
  return {.pass = pass,
          .rule = s_.rule.kind,
          .merge = merge(),
          .clip = s_.clip.kind,
          .anchor_diff = x_.takes_out_last_step(),
          .params = s_.payload == OuterPayload::kParams,
          .factors = static_cast<uint32_t>(x_.segments()),
          .penalty = penalty(),
          .a = static_cast<float>(s_.merge.a),
          .one_minus_a = static_cast<float>(1 - s_.merge.a)};
}

// average: there is one.
kernels::OuterStepOperands<OperandRef> OuterBuilder::step_operands(const OuterUpdateMemory& m,
                                                                   bool average) {
  const auto has = [&](OuterArray which) { return x_.bytes_of(which) != 0; };
  kernels::OuterStepOperands<OperandRef> o;
  o.numbers = whole(m.numbers, Access::kRead, 0, sizeof(OuterNumbers));
  o.factors = whole(m.factors, Access::kRead, 0, x_.segments() * sizeof(OuterFactor));
  o.sum = average ? flat_of(OuterArray::kResult, Access::kRead) : absent();
  o.launch_anchor = average && has(OuterArray::kLaunchAnchor)
                        ? flat_of(OuterArray::kLaunchAnchor, Access::kRead)
                        : absent();
  o.last_step =
      has(OuterArray::kLastStep) ? flat_of(OuterArray::kLastStep, Access::kReadWrite) : absent();
  o.fresh = x_.two_payloads() ? flat_of(x_.sent(), Access::kRead) : absent();
  o.previous =
      x_.two_payloads() && average ? flat_of(OuterArray::kPrevious, Access::kRead) : absent();
  o.x_launch = absent();
  if (merge() == OuterMerge::kAddProgress) {
    o.x_launch = flat_of(launch_live(), Access::kRead);
  }
  o.m = s_.rule.kind == OuterRule::kNone ? absent()
                                         : flat_of(OuterArray::kMomentum, Access::kReadWrite);
  o.anchor = flat_of(OuterArray::kAnchor, Access::kReadWrite);
  o.x = params(Access::kReadWrite);
  o.step_sums = o.m_sums = o.clipped = absent();
  return o;
}

OuterUpdateMemory OuterBuilder::update_memory() {
  const uint64_t segments = x_.segments();
  OuterUpdateMemory m{b_.scratch(4), b_.scratch(sizeof(OuterNumbers)),
                      b_.scratch(segments * sizeof(OuterFactor)),
                      b_.scratch(segments * sizeof(OuterSegment))};
  const uint64_t bytes = segments * sizeof(OuterSegment);
  b_.copy({m.segments, 0, bytes}, {array(OuterArray::kSegments), 0, bytes});
  return m;
}

OperandRef OuterBuilder::norm_of_average(bool compressed) {
  if (s_.penalty.kind != OuterPenalty::kGapRel || x_.by_element()) return absent();
  OperandRef anchor = absent();
  if (s_.payload == OuterPayload::kParams) {
    const bool moved = x_.bytes_of(OuterArray::kLaunchAnchor) != 0;
    anchor = flat_of(moved ? OuterArray::kLaunchAnchor : OuterArray::kAnchor, Access::kRead);
  }
  const uint32_t sums = outer_block_sums(b_, x_);
  b_.kernel<kernels::OuterNorm>(
      {.sum = flat_of(OuterArray::kResult, Access::kRead),
       .anchor = anchor,
       .messages = all_of(OuterArray::kMessages, Access::kRead),
       .sums = blocks(sums, Access::kWrite)},
      pieces_, OuterNormArgs{static_cast<uint32_t>(x_.size), divided(x_, compressed)});
  return sums_of_whole(b_, x_, sums);
}

void OuterBuilder::emit_factors(const OuterUpdateMemory& m, bool average, bool compressed) {
  const std::span<const NormRange> ranges = outer_segment_ranges(b_, x_);
  OuterFactorsArgs args;
  args.ranges = ranges.data();
  args.n = ranges.size();
  args.normalised = s_.rule.lr_normalised && average;
  args.clip_by_gamma = clips_by_gamma(s_);
  args.alpha = s_.rule.alpha;
  args.beta = s_.rule.beta;
  args.freshness = s_.rule.freshness;
  args.divided = average ? divided(x_, compressed) : 0;
  if (average) {
    args.world = static_cast<uint32_t>(x_.size);
    args.penalty = penalty();
    args.fails = s_.nonfinite == OuterNonfinite::kError;
  }
  const uint64_t segments = ranges.size();
  b_.kernel<kernels::OuterFactors>(
      {.messages = all_of(average ? OuterArray::kMessages : OuterArray::kMessage, Access::kRead),
       .inputs = from_host<OuterInputs>(out_.inputs),
       .sums = average ? norm_of_average(compressed) : absent(),
       .segments = whole(m.segments, Access::kReadWrite, 0, segments * sizeof(OuterSegment)),
       .factors = whole(m.factors, Access::kWrite, 0, segments * sizeof(OuterFactor)),
       .numbers = whole(m.numbers, Access::kWrite, 0, sizeof(OuterNumbers)),
       .word = whole(m.word, Access::kWrite, 0, 4)},
      {}, args);
}

void OuterBuilder::commit_from_here(const OuterUpdateMemory& m) {
  commits_ = b_.copy({b_.scratch(4), 0, 4}, {m.word, 0, 4}, StepOperands::committing(m.word));
}

void OuterBuilder::emit_step(const OuterUpdateMemory& m, bool average) {
  const KernelOptions commits = StepOperands::committing(m.word);
  if (!x_.norms_over_shards()) {
    emit_outer_step(b_, x_, pieces_, step_args(OuterPass::kWhole), step_operands(m, average), m,
                    commits);
    return;
  }
  ahead_.publish(b_, commits);
  emit_merge(m, launch_live(), commits);
}

void OuterBuilder::emit_merge(const OuterUpdateMemory& m, OuterArray from,
                              const KernelOptions& options) {
  kernels::OuterStepOperands<OperandRef> o = step_operands(m, false);
  if (merge() == OuterMerge::kAddProgress) o.x_launch = flat_of(from, Access::kRead);
  o.last_step = o.fresh = o.previous = o.m = o.numbers = o.factors = absent();
  b_.kernel<kernels::OuterStep>(o, pieces_, step_args(OuterPass::kMerge), options);
}

void OuterBuilder::write_copies(const KernelOptions& options) {
  const ModelCopies& copies = x_.copies;
  if (copies.tensors.empty()) return;
  const auto bits = static_cast<uint32_t>(dtype_bytes(copies.type) * 8);
  if (out_.copies == kNoSlot) {
    std::vector<uint64_t> bytes;
    for (const LayoutTensor& t : layout_.tensors()) bytes.push_back(t.count * bits / 8);
    out_.copies = b_.bound_list(bytes);
  }
  b_.kernel<kernels::Convert>(
      {.x = params(Access::kRead), .y = list(out_.copies, Access::kWrite, bits)},
      pieces_of(layout_, copies.tensors), ConvertArgs{Dtype::kF32, copies.type, 1}, options);
}

OuterPlan OuterBuilder::finish(const OuterUpdateMemory& m, bool average) {
  if (x_.launches() && !x_.launches_first()) emit_launch();
  const uint64_t segments = x_.segments();
  if (!s_.averages_parameters()) {  // else there is no gap
    b_.copy({array(OuterArray::kSegments), 0, segments * sizeof(OuterSegment)},
            {m.segments, 0, segments * sizeof(OuterSegment)}, StepOperands::committing(m.word));
  }
  for (uint32_t step = commits_ + 1; step < b_.steps(); ++step) b_.order(step, commits_);
  const uint64_t messages = average ? static_cast<uint64_t>(x_.size) * sizeof(OuterMessage) : 0;
  OuterOutcome& at = out_.outcome;
  at.numbers = 8;
  at.factors = at.numbers + sizeof(OuterNumbers);
  at.messages = at.factors + segments * sizeof(OuterFactor);
  const uint32_t outcome = b_.scratch(at.messages + messages);
  b_.alias(m.word, outcome, 0);
  b_.alias(m.numbers, outcome, at.numbers);
  b_.alias(m.factors, outcome, at.factors);
  if (messages != 0) {
    b_.copy({outcome, at.messages, messages}, {array(OuterArray::kMessages), 0, messages});
  }
  b_.set_verdict(b_.host(at.messages + messages), m.word, {outcome, 0, at.messages + messages});
  out_.plan = b_.take();
  return std::move(out_);
}

OuterPlan OuterBuilder::update(bool compressed) {
  OuterUpdateMemory m = update_memory();
  emit_factors(m, true, compressed);
  if (x_.norms_over_shards()) {
    ahead_.emit(b_, x_, pieces_, step_args(OuterPass::kWhole), step_operands(m, true), m);
    // The decision comes behind all messages.
    const uint32_t last = b_.steps() - 1, word = b_.scratch(4);
    b_.order(b_.copy({word, 0, 4}, {m.word, 0, 4}), last);
    m.word = word;
    out_.over_shards = true;
  }
  commit_from_here(m);
  if (x_.launches_first()) emit_launch();
  if (x_.last && x_.two_payloads()) b_.fill({array(x_.sent()), 0, x_.bytes_of(x_.sent())}, 0);
  const KernelOptions commits = StepOperands::committing(m.word);
  KernelOptions skips;
  skips.predicate = {m.word, 0, kSkipNonfinite};
  if (!s_.averages_parameters()) {
    const uint64_t bytes = x_.segments() * sizeof(OuterSegment);
    b_.copy({array(OuterArray::kSegments), 0, bytes}, {m.segments, 0, bytes}, skips);
  }
  const bool moves = x_.bytes_of(OuterArray::kLaunchAnchor) != 0;
  const Region anchor{array(OuterArray::kAnchor), 0, x_.bytes_of(OuterArray::kAnchor)};
  const Region before{moves ? b_.scratch(anchor.bytes) : kNoSlot, 0, anchor.bytes};
  if (moves) b_.copy(before, anchor);
  emit_step(m, true);
  if (moves) b_.copy({array(OuterArray::kLaunchAnchor), 0, anchor.bytes}, before);
  write_copies(commits);
  if (s_.nonfinite != OuterNonfinite::kError) {
    emit_merge(m, launch_live(), skips);
    write_copies(skips);
  }
  return finish(m, true);
}

OuterPlan OuterBuilder::hold() {
  // Factors are of the message, and no average is under way whose memory this is.
  if (x_.launches_first()) emit_launch();
  const OuterUpdateMemory m = update_memory();
  emit_factors(m, false, false);
  commit_from_here(m);
  const KernelOptions commits = StepOperands::committing(m.word);
  // The next average is launched against this anchor, and progress counts from it.
  if (x_.bytes_of(OuterArray::kLaunchAnchor) != 0) {
    const uint64_t bytes = x_.bytes_of(OuterArray::kAnchor);
    b_.copy({array(OuterArray::kLaunchAnchor), 0, bytes}, {array(OuterArray::kAnchor), 0, bytes});
  }
  x_.two_payloads() ? emit_step(m, false) : emit_merge(m, OuterArray::kAnchor, commits);
  write_copies(commits);
  KernelOptions skips;
  skips.predicate = {m.word, 0, kSkipNonfinite};
  emit_merge(m, OuterArray::kAnchor, skips);
  write_copies(skips);
  return finish(m, false);
}

OuterPlan OuterBuilder::inner_sum() {
  const uint32_t sums = measure(false);
  b_.kernel<kernels::OuterSum>(
      {.sums = sums_of_whole(b_, x_, sums), .sum = all_of(OuterArray::kInnerSum, Access::kWrite)},
      {}, OuterMessageArgs{x_.norm_blocks()});
  out_.over_shards = x_.norms_over_shards();
  out_.plan = b_.take();
  return std::move(out_);
}

// Nothing is written before both averages are there: one that fails can be made again.
OuterPlan OuterBuilder::agreement() {
  const std::pair<OuterArray, uint32_t> averages[] = {
      {OuterArray::kAnchor, array(OuterArray::kResult)},
      {OuterArray::kMomentum, b_.scratch(x_.bytes_of(OuterArray::kMomentum))}};
  for (const auto& [which, sum] : averages)
    emit_sum(b_, x_, array(which), sum, x_.sizes.segment_bytes);
  const uint32_t yes = kCommit, word = b_.scratch(4);
  b_.copy({word, 0, 4}, {b_.constant(std::as_bytes(std::span(&yes, 1))), 0, 4});
  b_.set_verdict(b_.host(4), word);
  const KernelOptions commits = StepOperands::committing(word);
  for (const auto& [which, sum] : averages) {
    b_.kernel<kernels::Convert>(
        {.x = list(add_parts(b_, layout_, sum), Access::kRead, 32),
         .y = list(parts_of(which), Access::kWrite, 32)},
        pieces_, ConvertArgs{Dtype::kF32, Dtype::kF32, static_cast<float>(1.0 / x_.size)}, commits);
  }
  b_.kernel<kernels::Unpack>(
      {.flat = flat_of(OuterArray::kAnchor, Access::kRead), .tensors = live()}, to_tensors(),
      PackArgs{0, 4}, commits);
  write_copies(commits);
  out_.plan = b_.take();
  return std::move(out_);
}

OuterPlan OuterBuilder::swap(bool back) {
  const KernelOptions always;
  if (!back) {
    b_.kernel<kernels::Pack>(
        {.tensors = params(Access::kRead), .flat = flat_of(OuterArray::kSwapped, Access::kWrite)},
        pieces_, PackArgs{0, 4});
  }
  const OuterArray from = back ? OuterArray::kSwapped : OuterArray::kAnchor;
  b_.kernel<kernels::Unpack>({.flat = flat_of(from, Access::kRead), .tensors = live()},
                             to_tensors(), PackArgs{0, 4});
  write_copies(always);
  out_.plan = b_.take();
  return std::move(out_);
}

OuterPlan OuterBuilder::start() {
  b_.kernel<kernels::Pack>(
      {.tensors = params(Access::kRead), .flat = flat_of(OuterArray::kAnchor, Access::kWrite)},
      pieces_, PackArgs{0, 4});
  out_.plan = b_.take();
  return std::move(out_);
}

}  // namespace

OuterPlan build_outer_launch(const OuterShape& shape) { return OuterBuilder(shape).launch(); }
OuterPlan build_outer_reduction(const OuterShape& shape, bool compressed) {
  return OuterBuilder(shape).reduction(compressed);
}
OuterPlan build_outer_update(const OuterShape& shape, bool compressed, bool next) {
  return OuterBuilder(shape, next).update(compressed);
}
OuterPlan build_outer_hold(const OuterShape& shape, bool next) {
  return OuterBuilder(shape, next).hold();
}
OuterPlan build_outer_inner_sum(const OuterShape& shape) { return OuterBuilder(shape).inner_sum(); }

OuterPlan build_outer_agreement(const OuterShape& shape) { return OuterBuilder(shape).agreement(); }
OuterPlan build_outer_swap(const OuterShape& shape, bool back) {
  return OuterBuilder(shape).swap(back);
}
OuterPlan build_outer_start(const OuterShape& shape) { return OuterBuilder(shape).start(); }

}  // namespace sotto
