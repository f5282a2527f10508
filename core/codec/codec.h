// The stand-alone compressed all-reduce of a fixed set of float32 tensors, with its residuals.
//
// Threads: one at a time per codec.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/codec/compressed_state.h"
#include "core/group/comm.h"

namespace sotto {

class Codec : public std::enable_shared_from_this<Codec> {
 public:
  // json: see parse_codec. device: where the tensors are; null: the context's.
  static Result<std::shared_ptr<Codec>> create(std::shared_ptr<Comm> comm, std::string_view json,
                                               std::vector<uint64_t> counts,
                                               const std::vector<Dtype>& dtypes,
                                               std::shared_ptr<Device> device = nullptr);

  // out = compressed mean of in over ranks; both have one pointer per tensor, equal ones mean in
  // place. BUSY while an all-reduce of this codec is in flight.
  Result<OpRef> all_reduce(const SmallVector<void*>& in, const SmallVector<void*>& out,
                           const CallOptions& options);
  const std::vector<uint64_t>& counts() const { return counts_; }
  const std::shared_ptr<Comm>& comm() const { return comm_; }
  const std::shared_ptr<Device>& device() const { return device_; }
  // What an all-reduce will do; nothing is sent.
  Result<std::shared_ptr<PreparedPlan>> plan(const SmallVector<uint8_t>& in_place);

  struct Snapshot {
    std::vector<uint64_t> counts;
    ErrorFeedback residual;
  };
  Result<Snapshot> snapshot();
  // with_residual = false: residuals become 0. Nothing changes on error.
  Status restore(const Snapshot& snapshot, bool with_residual);

  // A collective: the error feedback of all ranks. Zeros if this codec keeps none.
  Result<MeanErrorFeedback> mean();
  Status restore_mean(const std::vector<uint64_t>& counts, const MeanErrorFeedback& mean);

  uint64_t elements() const { return layout_.elements(); }
  bool busy() const { return in_flight_.load(std::memory_order_acquire); }

 private:
  class Hooks;
  struct Prepared {
    std::vector<uint8_t> in_place;
    std::shared_ptr<PreparedPlan> plan;
    CompressedCollective collective;
  };

  Codec(std::shared_ptr<Comm> comm, std::shared_ptr<Device> device, const CodecSettings& settings,
        Levels levels, std::vector<uint64_t> counts);
  // One rank, or one host in two levels, or no elements.
  bool compresses_nothing() const { return levels_.host_count() == 1 || layout_.elements() == 0; }
  Result<Prepared*> prepared(std::span<const uint8_t> in_place);
  Call mean_in_full(const SmallVector<uint8_t>& in_place) const;
  Status describe_failure(const Status& status, std::span<const std::byte> verdict) const;

  std::shared_ptr<Comm> comm_;
  std::shared_ptr<Device> device_;
  CodecSettings settings_;
  Levels levels_;
  std::vector<uint64_t> counts_;
  CompressedLayout layout_;
  CompressedState state_;
  std::vector<Prepared> prepared_;
  std::atomic<bool> in_flight_{false};
};

}  // namespace sotto
