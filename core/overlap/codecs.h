// Codecs of an overlap: every bucket is compressed on its own, with error feedback of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/codec/compressed_state.h"
#include "core/overlap/buckets.h"
#include "core/overlap/plan.h"

namespace sotto {

// Everything that one rank keeps across rounds. Of a rank, or of all of them in mode mean: then
// `buckets` is empty, values are in the order of the gradients, and `errors` has no rank.
struct OverlapSnapshot {
  std::vector<uint64_t> counts;                // by gradient
  std::vector<std::vector<uint32_t>> buckets;  // gradients of each
  ErrorFeedback errors;                        // of all buckets, one after the other
  std::vector<uint32_t> observed;  // the order of the next round's buckets; empty: as it is
  // Whether rounds still look at orders; nothing: orders are not observed, or the state is of 0.1.
  std::optional<bool> observes;
};

class OverlapCodecs {
 public:
  // What is passed lives longer.
  OverlapCodecs(const Levels& levels, std::span<const OverlapTensor> tensors,
                std::span<const OverlapBucket> buckets, const CodecSettings& settings);
  Status allocate(const Comm& comm, const DeviceAccess& access);

  const CodecSettings& settings() const { return settings_; }
  std::vector<const CompressedLayout*> layouts() const;
  // slots: by bucket; none if there is one rank.
  void bind(Run& run, std::span<const CompressedSlots> slots) const;
  // Behind a round that has committed, and only then.
  void flip();

  // "; " and which ranks have met what, from the scale messages of a round.
  std::string explain(std::span<const std::byte> verdict,
                      std::span<const BucketVerdict> places) const;

  Result<OverlapSnapshot> snapshot() const;
  // A collective of `comm`.
  Result<OverlapSnapshot> mean(Comm& comm) const;
  // As large as that, with zeros.
  OverlapSnapshot empty_mean() const;
  // What this rank's workers and the servers of all ranks have, as restore_mean takes it: for other
  // buckets of the same ranks. In two levels, where an element moves to another rank of its host,
  // the mean of all hosts. A collective of `comm`.
  Result<OverlapSnapshot> by_gradient(Comm& comm) const;
  // Nothing changes on error.
  Status restore(const OverlapSnapshot& snapshot);
  Status restore_mean(const OverlapSnapshot& snapshot);
  Status clear();
  uint64_t bytes() const;

 private:
  struct Bucket {
    CompressedLayout layout;
    CompressedState state;
  };
  std::vector<uint64_t> counts() const;
  OverlapSnapshot without_values() const;
  Status check_counts(const OverlapSnapshot& snapshot) const;
  // errors_of(a bucket's state): in the order of its gradients.
  template <class ErrorsOf>
  Result<OverlapSnapshot> in_order(ErrorsOf&& errors_of) const;

  const Levels& levels_;
  const std::span<const OverlapTensor> tensors_;
  const std::span<const OverlapBucket> buckets_;
  const CodecSettings settings_;
  std::vector<std::unique_ptr<Bucket>> codecs_;  // by bucket
  uint64_t elements_ = 0;
};

}  // namespace sotto
