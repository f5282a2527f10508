#include "core/overlap/codecs.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "core/base/text.h"
#include "core/codec/coding.h"
#include "core/codec/sent_whole.h"
#include "core/optim/agreement.h"

namespace sotto {
namespace {

std::vector<LayoutTensor> tensors_of(const OverlapBucket& bucket,
                                     std::span<const OverlapTensor> tensors) {
  std::vector<LayoutTensor> out;
  for (const uint32_t t : bucket.tensors) out.push_back({tensors[t].count, 0});
  return out;
}

}  // namespace

OverlapCodecs::OverlapCodecs(const Levels& levels, std::span<const OverlapTensor> tensors,
                             std::span<const OverlapBucket> buckets, const CodecSettings& settings)
    : levels_(levels), tensors_(tensors), buckets_(buckets), settings_(settings) {
  for (const OverlapBucket& bucket : buckets) {
    codecs_.push_back(
        std::make_unique<Bucket>(Bucket{CompressedLayout::of(settings, tensors_of(bucket, tensors),
                                                             levels.servers(), levels.shards()),
                                        {}}));
    elements_ += codecs_.back()->layout.elements();
  }
}

Status OverlapCodecs::allocate(const Comm& comm, const DeviceAccess& access) {
  for (const std::unique_ptr<Bucket>& b : codecs_) {
    SOTTO_ASSIGN(b->state,
                 CompressedState::make(comm, access, b->layout, settings_, levels_.two()));
  }
  return ok_status();
}

std::vector<const CompressedLayout*> OverlapCodecs::layouts() const {
  std::vector<const CompressedLayout*> out;
  for (const std::unique_ptr<Bucket>& b : codecs_) out.push_back(&b->layout);
  return out;
}

void OverlapCodecs::bind(Run& run, std::span<const CompressedSlots> slots) const {
  for (size_t b = 0; b < slots.size(); ++b) {
    if (codecs_[b]->layout.elements() != 0) codecs_[b]->state.bind(run, slots[b]);
  }
}

void OverlapCodecs::flip() {
  for (const std::unique_ptr<Bucket>& b : codecs_) b->state.flip();
}

std::string OverlapCodecs::explain(std::span<const std::byte> verdict,
                                   std::span<const BucketVerdict> places) const {
  const std::string_view refused = coding_of(settings_.kind).refused();
  std::set<uint32_t> inputs, sums;  // servers
  for (size_t b = 0; b < codecs_.size(); ++b) {
    const CompressedLayout& layout = codecs_[b]->layout;
    const uint64_t area = layout.message_bytes();
    const auto add = [&](std::set<uint32_t>* servers, uint64_t at) {
      for (const uint32_t s : layout.flagged(verdict.subspan(at, area))) servers->insert(s);
    };
    if (layout.elements() == 0) continue;
    add(&inputs, places[b].workers);
    if (inputs.empty()) add(&sums, places[b].servers);
  }
  if (!inputs.empty()) {
    return fmt::format("{} in the gradients of {}", refused,
                       servers_text(levels_.two(), std::vector(inputs.begin(), inputs.end())));
  }
  std::vector<size_t> ranks;
  for (const uint32_t s : sums) ranks.push_back(static_cast<size_t>(levels_.rank_of(s)));
  return fmt::format(
      "{} in the sums at rank {}{}", refused, list_of_ranks(ranks),
      settings_.residual ? ", the error feedback of these sums starts at 0 again" : "");
}

// ---- State ----

std::vector<uint64_t> OverlapCodecs::counts() const {
  std::vector<uint64_t> out;
  for (const OverlapTensor& t : tensors_) out.push_back(t.count);
  return out;
}

OverlapSnapshot OverlapCodecs::without_values() const {
  OverlapSnapshot s;
  s.counts = counts();
  s.errors = codecs_.front()->state.no_errors();
  return s;
}

Result<OverlapSnapshot> OverlapCodecs::snapshot() const {
  OverlapSnapshot s = without_values();
  for (size_t b = 0; b < codecs_.size(); ++b) {
    s.buckets.push_back(buckets_[b].tensors);
    SOTTO_ASSIGN(const ErrorFeedback errors, codecs_[b]->state.residual({}));
    s.errors.worker.insert(s.errors.worker.end(), errors.worker.begin(), errors.worker.end());
    s.errors.server.insert(s.errors.server.end(), errors.server.begin(), errors.server.end());
  }
  return s;
}

Status OverlapCodecs::check_counts(const OverlapSnapshot& s) const {
  if (s.counts == counts()) return ok_status();
  return invalid_argument("the state is of {} with other sizes than the {} of this overlap",
                          counted(s.counts.size(), "gradient"), tensors_.size());
}

Status OverlapCodecs::restore(const OverlapSnapshot& s) {
  SOTTO_TRY(check_counts(s));
  const auto alike = [](const OverlapBucket& mine, const std::vector<uint32_t>& other) {
    return mine.tensors == other;
  };
  if (!std::ranges::equal(buckets_, s.buckets, alike)) {
    return invalid_argument(
        "the state is of other buckets: {} instead of {}, or of other gradients; import it in mode "
        "reset, or have all ranks export it in mode mean, which belongs to no buckets",
        s.buckets.size(), buckets_.size());
  }
  // Another number of ranks and another hierarchy have their own words, before their other values.
  const CompressedState& first = codecs_.front()->state;
  SOTTO_TRY(first.check_settings(s.errors, first.worker_values(), first.server_values()));
  uint64_t workers = 0, servers = 0;
  for (const std::unique_ptr<Bucket>& b : codecs_) {
    workers += b->state.worker_values();
    servers += b->state.server_values();
  }
  if (s.errors.worker.size() != workers || s.errors.server.size() != servers) {
    return invalid_argument(
        "the error feedback has {} worker and {} server values, here are {} and {}",
        s.errors.worker.size(), s.errors.server.size(), workers, servers);
  }
  std::vector<ErrorFeedback> parts;
  auto worker = s.errors.worker.begin(), server = s.errors.server.begin();
  const auto take = [](auto& at, uint64_t n) {
    const auto begin = at;
    at += static_cast<std::ptrdiff_t>(n);
    return std::vector<float>(begin, at);
  };
  for (const std::unique_ptr<Bucket>& b : codecs_) {
    ErrorFeedback& part = parts.emplace_back(s.errors);
    part.worker = take(worker, b->state.worker_values());
    part.server = take(server, b->state.server_values());
    SOTTO_TRY(b->state.check(part));
  }
  for (size_t b = 0; b < codecs_.size(); ++b) SOTTO_TRY(codecs_[b]->state.restore(&parts[b]));
  return ok_status();
}

Status OverlapCodecs::clear() {
  for (const std::unique_ptr<Bucket>& b : codecs_) SOTTO_TRY(b->state.restore(nullptr));
  return ok_status();
}

template <class ErrorsOf>
Result<OverlapSnapshot> OverlapCodecs::in_order(ErrorsOf&& errors_of) const {
  OverlapSnapshot s = without_values();
  s.errors.rank = s.errors.size = 0;
  std::vector<std::vector<float>> worker(tensors_.size()), server(tensors_.size());
  for (size_t b = 0; b < codecs_.size(); ++b) {
    SOTTO_ASSIGN(const MeanErrorFeedback errors, errors_of(codecs_[b]->state));
    uint64_t at = 0;
    for (const uint32_t t : buckets_[b].tensors) {
      const auto part = [&](const std::vector<float>& all) {
        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(at);
        return std::vector<float>(begin, begin + static_cast<std::ptrdiff_t>(tensors_[t].count));
      };
      worker[t] = part(errors.worker);
      server[t] = part(errors.server);
      at += tensors_[t].count;
    }
  }
  for (size_t t = 0; t < tensors_.size(); ++t) {
    s.errors.worker.insert(s.errors.worker.end(), worker[t].begin(), worker[t].end());
    s.errors.server.insert(s.errors.server.end(), server[t].begin(), server[t].end());
  }
  return s;
}

Result<OverlapSnapshot> OverlapCodecs::mean(Comm& comm) const {
  return in_order([&](const CompressedState& state) { return state.mean(comm, {}); });
}

Result<OverlapSnapshot> OverlapCodecs::by_gradient(Comm& comm) const {
  if (!levels_.flat()) return mean(comm);
  return in_order([&](const CompressedState& state) -> Result<MeanErrorFeedback> {
    MeanErrorFeedback errors;
    const auto into = [](std::vector<float>* to) {
      return [to](std::span<const float> more) {
        to->insert(to->end(), more.begin(), more.end());
        return ok_status();
      };
    };
    SOTTO_TRY(state.worker_errors({}, into(&errors.worker)));
    SOTTO_TRY(state.mean_server_errors(comm, {}, into(&errors.server)));
    return errors;
  });
}

OverlapSnapshot OverlapCodecs::empty_mean() const {
  OverlapSnapshot s = without_values();
  s.errors.rank = s.errors.size = 0;
  s.errors.worker.resize(elements_);
  s.errors.server.resize(elements_);
  return s;
}

Status OverlapCodecs::restore_mean(const OverlapSnapshot& s) {
  SOTTO_TRY(check_counts(s));
  if (s.errors.worker.size() != elements_ || s.errors.server.size() != elements_) {
    return invalid_argument(
        "the error feedback has {} worker and {} server values, here are {} and {}",
        s.errors.worker.size(), s.errors.server.size(), elements_, elements_);
  }
  for (const std::vector<float>* values : {&s.errors.worker, &s.errors.server}) {
    for (const float e : *values) {
      if (!std::isfinite(e)) return invalid_argument("the error feedback has a value {}", e);
    }
  }
  std::vector<uint64_t> begins;
  uint64_t at = 0;
  for (const OverlapTensor& t : tensors_) begins.push_back(std::exchange(at, at + t.count));
  for (size_t t = 0; t < tensors_.size(); ++t) {
    for (const std::vector<float>* values : {&s.errors.worker, &s.errors.server}) {
      const std::span<const float> errors(values->data() + begins[t], tensors_[t].count);
      SOTTO_TRY(check_sent_whole(settings_, t, tensors_[t].count, errors));
    }
  }
  for (size_t b = 0; b < codecs_.size(); ++b) {
    MeanErrorFeedback mean;
    for (const uint32_t t : buckets_[b].tensors) {
      const auto add = [&](std::vector<float>* to, const std::vector<float>& from) {
        const auto begin = from.begin() + static_cast<std::ptrdiff_t>(begins[t]);
        to->insert(to->end(), begin, begin + static_cast<std::ptrdiff_t>(tensors_[t].count));
      };
      add(&mean.worker, s.errors.worker);
      add(&mean.server, s.errors.server);
    }
    SOTTO_TRY(codecs_[b]->state.restore_mean(mean));
  }
  return ok_status();
}

uint64_t OverlapCodecs::bytes() const {
  uint64_t bytes = 0;
  for (const std::unique_ptr<Bucket>& b : codecs_) bytes += b->state.bytes();
  return bytes;
}

}  // namespace sotto
