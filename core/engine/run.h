// What one execution of a plan needs besides the plan: memory, counters, transfers. Made once and
// reused, so that starting an operation allocates nothing in steady state.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/engine/device_queues.h"
#include "core/engine/scheduler.h"
#include "core/engine/scratch_pool.h"
#include "core/iface/device.h"
#include "core/plan/plan.h"

namespace sotto {

struct Run {
  std::shared_ptr<const Plan> plan;
  ScratchBlock scratch;      // device arena
  void* host = nullptr;      // host arena
  std::vector<void*> bases;  // per slot
  StepStates steps;
  std::vector<StepEvent> events;  // per step; empty with a synchronous device
  std::vector<Transfer> transfers;
  std::vector<OpDescriptor> descriptors;
  // Per descriptor and peer: receives posted in the round that is next to be announced, and that
  // round's index.
  struct Announce {
    uint32_t round_index = 0;
    std::vector<uint32_t> posted;
  };
  std::vector<Announce> announce;
  // Inputs that arrived before the operation had begun: by number.
  struct Arrival {
    bool here = false;
    EventId event = 0;
  };
  std::vector<Arrival> arrivals;
  bool receives_posted = false;    // since receives were last announced
  std::vector<int64_t> issued_ns;  // when a step was handed over; only with a trace

  void note_issue(uint32_t step, int64_t now_ns) {
    issued_ns.resize(plan->steps.size());
    issued_ns[step] = now_ns;
  }
  void* at(const Region& region) const {
    return static_cast<std::byte*>(bases[region.slot]) + region.offset;
  }
  // Decisions that the device makes from now on do not commit. Called before a stream-ordered
  // transport is aborted, and while no launch of a graph is awaited.
  void abort() const;
};

// A plan with its pool of runs and its kernels' tables, for one device.
class PreparedPlan {
 public:
  // scratch: a pool on the device; null: one of its own.
  static Result<std::shared_ptr<PreparedPlan>> make(std::shared_ptr<const Plan> plan,
                                                    std::shared_ptr<Device> device,
                                                    std::shared_ptr<ScratchPool> scratch = nullptr);
  ~PreparedPlan();
  PreparedPlan(const PreparedPlan&) = delete;
  PreparedPlan& operator=(const PreparedPlan&) = delete;

  const Plan& plan() const { return *plan_; }
  const std::shared_ptr<Device>& device() const { return device_; }
  const CallTables* tables() const { return tables_.get(); }

  // A run with its scratch and host slots bound; the caller binds the kBound slots. Threads: any.
  Result<std::unique_ptr<Run>> acquire();
  void give_back(std::unique_ptr<Run> run);
  // Bytes held by runs that exist now; those of a pool that others share are not counted.
  uint64_t held_bytes() const;

 private:
  PreparedPlan(std::shared_ptr<const Plan> plan, std::shared_ptr<Device> device,
               std::shared_ptr<ScratchPool> scratch);
  Result<std::unique_ptr<Run>> make_run();
  // The run's slots lie in its block from now on.
  void bind_scratch(Run& run, const ScratchBlock& block) const;

  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<ScratchPool> scratch_;
  const bool shares_scratch_;
  std::shared_ptr<const CallTables> tables_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Run>> free_;
  uint64_t made_ = 0;
};

// The constant part of a kernel step, as Device::prepare takes it.
KernelCall constant_call(const KernelStep& kernel);

// An input of the run lies elsewhere than it was bound: `memory` by slot of the await.
void bind_input(Run& run, uint32_t input, std::span<void* const> memory);

// Call after the bound slots have been bound: binds their aliases, and writes the addresses of all
// slots for the device.
void finish_binding(Run& run);

}  // namespace sotto
