// Rounds that average gradients in place, in full precision or with a codec, whose error feedback
// is theirs.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/config/overlap.h"
#include "core/overlap/codecs.h"
#include "core/overlap/plan.h"
#include "core/overlap/work.h"

namespace sotto {

class AverageRounds final : public RoundWork {
 public:
  // What is passed by reference lives longer.
  AverageRounds(std::shared_ptr<Comm> comm, const OverlapConfig& config,
                const std::vector<OverlapTensor>& tensors, std::shared_ptr<Device> device);
  // Codecs. Before the other ranks are met.
  Status allocate(const std::vector<OverlapBucket>& buckets);

  const std::shared_ptr<Comm>& comm() const override { return rounds_comm_; }
  void set_comm(std::shared_ptr<Comm> comm) override { rounds_comm_ = std::move(comm); }
  void locate(std::vector<OverlapTensor>*) const override {}
  Status use(const std::vector<OverlapBucket>& buckets, bool observes) override;
  Result<OpRef> launch(const CallOptions& options, ReduceOp reduce,
                       std::shared_ptr<RoundOwner> owner) override;
  RoundTraffic traffic() const override;
  uint64_t bytes() const override;
  std::string_view why_not_hidden() const override { return "all gradients are in one bucket"; }
  std::string_view leaves() const override { return "gradients are undefined"; }

  // Error feedback, between rounds. INVALID_STATE: there is no codec.
  Result<OverlapSnapshot> snapshot() const;
  Result<OverlapSnapshot> mean() const;  // a collective
  Result<OverlapSnapshot> empty_mean() const;
  // Of the buckets that are used; error feedback becomes 0.
  Status clear();
  Status restore(const OverlapSnapshot& snapshot);
  // Of other buckets, which are used from now on.
  Status restore_with(std::vector<OverlapBucket> buckets, const OverlapSnapshot& snapshot);
  Status restore_mean(const OverlapSnapshot& snapshot);

 private:
  class Hooks;
  struct Prepared {
    std::shared_ptr<PreparedPlan> plan;
    OverlapPlan slots;
  };

  // Null: there is no codec. They refer to the buckets, which a vector keeps when it is moved.
  Result<std::unique_ptr<OverlapCodecs>> make_codecs(
      const std::vector<OverlapBucket>& buckets) const;
  // codecs: of these buckets.
  Status adopt(std::vector<OverlapBucket> buckets, std::unique_ptr<OverlapCodecs> codecs,
               bool observes);
  OpSignature signature(ReduceOp reduce, uint64_t tag) const;
  Result<const Prepared*> prepared(ReduceOp reduce);
  // One rank, or one host in two levels, compresses nothing.
  bool compresses() const { return codecs_ != nullptr && levels_.host_count() > 1; }
  Status check_codecs() const;
  void ended(const Prepared& prepared, Status& status, std::span<const std::byte> verdict);

  const std::shared_ptr<Comm> comm_;
  std::shared_ptr<Comm> rounds_comm_;
  const OverlapConfig& config_;
  const std::vector<OverlapTensor>& tensors_;
  const std::shared_ptr<Device> device_;
  Levels levels_;  // of codecs
  std::vector<OverlapBucket> buckets_;
  bool observes_ = false;
  std::unique_ptr<OverlapCodecs> codecs_;            // null: nothing is compressed
  std::array<std::optional<Prepared>, 2> prepared_;  // mean, sum
};

}  // namespace sotto
