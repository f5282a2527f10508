// What one execution of a plan needs besides the plan: memory, counters, transfers. Made once and
// reused, so that starting an operation allocates nothing in steady state.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/iface/device.h"
#include "core/plan/plan.h"

namespace sotto {

// How far a step of a run has come.
enum class StepProgress : uint8_t { kWaiting = 0, kReady, kIssued, kDone };

struct Run {
  std::shared_ptr<const Plan> plan;
  void* scratch = nullptr;      // device arena
  std::vector<std::byte> host;  // host arena, 128-byte aligned start inside
  std::byte* host_base = nullptr;
  std::vector<void*> bases;            // per slot
  std::vector<uint32_t> pending;       // per step: predecessors not yet satisfied
  std::vector<StepProgress> progress;  // per step
  std::vector<EventId> events;         // per step; empty with a synchronous device
  std::vector<Transfer> transfers;
  std::vector<OpPosting> postings;
  std::vector<uint32_t> group_pending;  // by_order: steps of a group that are not ready
  // Per posting and peer: receives posted in the round that is next to be announced, and that
  // round's index.
  struct Announce {
    uint32_t round_index = 0;
    std::vector<uint32_t> posted;
  };
  std::vector<Announce> announce;
  bool receives_posted = false;    // since receives were last announced
  std::vector<int64_t> issued_ns;  // when a step was handed over; only with a trace
  uint32_t done_steps = 0;
  uint32_t device_steps_in_flight = 0;

  void* at(const Region& region) const {
    return static_cast<std::byte*>(bases[region.slot]) + region.offset;
  }
};

// A plan with its pool of runs, for one device.
class PreparedPlan {
 public:
  PreparedPlan(std::shared_ptr<const Plan> plan, std::shared_ptr<Device> device);
  ~PreparedPlan();
  PreparedPlan(const PreparedPlan&) = delete;
  PreparedPlan& operator=(const PreparedPlan&) = delete;

  const Plan& plan() const { return *plan_; }

  // A run with its scratch and host slots bound; the caller binds the kBound slots. Threads: any.
  Result<std::unique_ptr<Run>> acquire();
  void give_back(std::unique_ptr<Run> run);
  // Bytes held by runs that exist now.
  uint64_t held_bytes() const;

 private:
  Result<std::unique_ptr<Run>> make();

  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<Device> device_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Run>> free_;
  uint64_t made_ = 0;
};

// Binds the aliases of bound slots to the slots they alias; call after binding.
void bind_aliases(Run& run);

}  // namespace sotto
