// Gradients that are averaged, or used for a step of an optimizer, while others are still being
// computed. A round is one operation of all ranks; a gradient is sent when the bucket that it is in
// is complete.
//
// Rounds run on a comm of their own, so they need no order beside the caller's collectives, but for
// transports that match by order.
//
// Threads: `ready` and `unused` any, at the same time; the rest one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/overlap.h"
#include "core/engine/device_array.h"
#include "core/group/comm.h"
#include "core/optim/optimizer.h"
#include "core/overlap/average.h"
#include "core/overlap/places.h"
#include "core/overlap/round.h"

namespace sotto {

struct OverlapInfo {
  uint32_t buckets = 0;
  uint64_t rounds = 0;  // that ended well
  uint64_t layout = 0;  // how often buckets have changed
  // Of the last round that ended well; -1: there was none.
  int64_t begin_to_last_ready_ns = -1;
  int64_t network_ns = -1;  // from the first complete bucket to the end
  int64_t exposed_ns = -1;  // from its finish to the end
  uint64_t payload_bytes_per_round = 0;
  uint64_t header_bytes_per_round = 0;
  uint64_t early_payload_bytes_per_round = 0;  // that needs no gradient of the last bucket
  uint64_t state_bytes = 0;
  uint64_t missing = 0;  // gradients of the open round
};

class Overlap final : public RoundOwner, public std::enable_shared_from_this<Overlap> {
 public:
  // Collective: counts, dtypes and settings are compared. json: as parse_overlap. tensors: at least
  // one. device: where they are; null: the context's. refused: this rank's own error, of which the
  // others hear.
  static Result<std::shared_ptr<Overlap>> create(std::shared_ptr<Comm> comm, std::string_view json,
                                                 std::vector<OverlapTensor> tensors,
                                                 std::shared_ptr<Device> device = nullptr,
                                                 const Status& refused = {});
  // Rounds are steps of the optimizer. json: as parse_step_overlap; empty: "sotto.overlap" of its
  // file. Collective. INVALID_ARGUMENT, UNSUPPORTED: StepRounds::check.
  static Result<std::shared_ptr<Overlap>> create_step(const std::shared_ptr<Optimizer>& optimizer,
                                                      std::string_view json,
                                                      const Status& refused = {});
  ~Overlap() override;
  Overlap(const Overlap&) = delete;
  Overlap& operator=(const Overlap&) = delete;

  // Opens a round, which ends when its operation does. With order "observed" the call behind the
  // first round that has ended well waits for all ranks, to move error feedback to new buckets.
  // reduce: mean or sum; with a codec mean. BUSY: one is open.
  Result<OpRef> begin(const CallOptions& options, ReduceOp reduce);
  // Gradients are final behind what is queued on the stream. places: one for each; empty: where
  // they lie in every round; of steps, where they are registered. On error nothing has changed.
  Status ready(std::span<const uint64_t> indices, std::span<const ParameterPlace> places,
               const std::optional<void*>& stream);
  // Gradients count as zero on this rank. Where they are averaged: of one that lies somewhere in
  // every round zeros are written there, and it becomes the average; of another one this rank does
  // not get the average.
  Status unused(std::span<const uint64_t> indices);
  Status finish();
  // Gradients of this rank that are missing stay as they are.
  Status withdraw(std::string_view reason);

  // Error feedback, between rounds: BUSY while one is open or in flight. INVALID_STATE: there is no
  // codec, or it is an optimizer's.
  Result<OverlapSnapshot> snapshot() const;
  // A collective.
  Result<OverlapSnapshot> mean() const;
  // As large as that, with zeros.
  Result<OverlapSnapshot> empty_mean() const;
  // with_errors = false: error feedback becomes 0. Nothing changes on error.
  Status restore(const OverlapSnapshot& snapshot, bool with_errors);
  Status restore_mean(const OverlapSnapshot& snapshot);

  OverlapInfo info() const;
  // kind: "all", "buckets", "order".
  Result<std::string> report(std::string_view kind) const;
  // Withdraws from an open round and waits for it, at most its deadline. The caller's memory is
  // free then, and there are no more rounds.
  // why: for the other ranks, behind "rank R has withdrawn: ".
  void close(std::string_view why = "it has destroyed the overlap");

  const std::shared_ptr<Comm>& comm() const { return comm_; }
  const OverlapConfig& config() const { return config_; }
  bool makes_steps() const { return average_ == nullptr; }
  const std::vector<OverlapBucket>& buckets() const { return buckets_; }

 private:
  class ZeroHooks;
  // Zeros are written to these, by an operation without messages.
  struct Zeros {
    std::vector<uint64_t> indices;
    std::shared_ptr<PreparedPlan> plan;
  };

  Overlap(std::shared_ptr<Comm> comm, const OverlapConfig& config,
          std::vector<OverlapTensor> tensors, std::shared_ptr<Device> device);
  // Everything about a new one that this rank can do alone; work: null for averages.
  static Result<std::shared_ptr<Overlap>> make(const std::shared_ptr<Comm>& comm,
                                               const OverlapConfig& config,
                                               std::vector<OverlapTensor> tensors,
                                               std::shared_ptr<Device> device,
                                               const std::shared_ptr<Optimizer>& optimizer);
  static Result<std::shared_ptr<Overlap>> agreed(const std::shared_ptr<Comm>& comm,
                                                 const Result<std::shared_ptr<Overlap>>& made);
  // What ranks have alike: names and counts, and settings.
  ParameterSet registration() const;
  std::string settings_text() const;
  // The next rounds have these buckets, which the work uses.
  void adopt(std::vector<OverlapBucket> buckets);
  // The first round has shown in which order gradients become ready. Collective, with a codec.
  Status use_observed_order();
  Status check_places(std::span<const uint64_t> indices,
                      std::span<const ParameterPlace> places) const;
  // memory: empty: they are at home. INVALID_ARGUMENT: another gradient of the round is there.
  Status take_memory(std::span<const uint64_t> indices, std::span<void* const> memory);
  void give_up(std::span<const uint64_t> indices);
  // Where gradients are whose memory this rank does not know.
  Result<std::vector<void*>> own_places(std::span<const uint64_t> indices, bool all_own);
  Result<std::shared_ptr<PreparedPlan>> zeros_plan(const std::vector<uint64_t>& indices);
  Status write_zeros(const std::vector<uint64_t>& indices, std::vector<void*> places);
  void zeroed(uint64_t round, std::span<const uint64_t> indices, std::span<void* const> places);
  void bound(RoundMessage* told, uint32_t* order) override;
  void ended(Status& status, std::span<const std::byte> messages,
             std::span<const std::byte> order) noexcept override;
  void observe(std::span<const std::byte> order);
  // Between rounds.
  Result<AverageRounds*> errors() const;
  int64_t now_ns() const { return comm_->engine().clock().now_ns(); }

  const std::shared_ptr<Comm> comm_;
  const std::shared_ptr<Device> device_;
  const OverlapConfig config_;
  std::vector<OverlapTensor> tensors_;
  std::vector<OverlapBucket> buckets_;
  std::unique_ptr<RoundWork> work_;
  AverageRounds* average_ = nullptr;  // the work, if it is that
  bool closed_ = false;
  bool observes_ = false;           // the next round's order is the first that is looked at
  mutable std::mutex mutex_;        // guards what follows; never held in a wait
  std::vector<uint32_t> observed_;  // the order to be used from the next round on; empty: none
  OverlapRound round_;
  RoundPlaces places_;            // of the open round
  std::vector<DeviceArray> own_;  // by gradient
  std::vector<Zeros> zeros_;
  OverlapInfo info_;
};

}  // namespace sotto
