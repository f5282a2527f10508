// Runs the blocks of a grid, one at a time per OS thread, thread by thread until all have ended.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/emulation/simt/fiber.h"
#include "tests/emulation/simt/simt.h"

namespace simt {

inline constexpr uint32_t kWarp = 32;

// Memory that ends at a protected page.
class GuardedMemory {
 public:
  GuardedMemory() = default;
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;
  // `bytes` rounded up to 16, full of 0xff.
  void* fresh(size_t bytes);

 private:
  void unmap();
  void* map_ = nullptr;
  size_t map_bytes_ = 0;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

class Scheduler {
 public:
  Scheduler();
  void run_block(const Grid& grid, uint3 index, const void* code,
                 const std::function<void()>& body);
  void seed(uint32_t seed);

  // Called by the running thread of a kernel.
  int barrier(BarrierResult kind, bool predicate, const Location& at);
  uint64_t collective(Collective kind, uint32_t mask, uint64_t value, uint32_t source,
                      const Location& at);
  uint32_t lane() const;
  void* dynamic_shared() const { return dynamic_; }
  [[noreturn]] void misuse(const std::string& what) const;

 private:
  enum class State : uint8_t { kFresh, kReady, kCollective, kBarrier, kDone };
  struct Thread {
    Context context;
    uint32_t index = 0;  // linear
    uint3 position{};
    State state = State::kFresh;
    Location at{};
    // What it waits for.
    Collective kind = Collective::kSync;
    BarrierResult barrier_kind = BarrierResult::kNone;
    uint32_t mask = 0;
    uint64_t value = 0;
    uint32_t source = 0;
    uint64_t result = 0;
  };
  // Masks of lanes.
  struct Warp {
    uint32_t ready = 0, waiting = 0, alive = 0;
  };

  static void thread_main();
  void leave(bool dies);
  void start_block(uint32_t threads);
  bool run_warp(uint32_t index);
  uint32_t pick_lane(uint32_t ready);
  Context& begin(Thread& thread);
  bool begin_next_here();
  void run(Thread& thread);
  void ended(Thread& thread);
  void release_barrier();
  bool complete(const Thread& asking);
  std::string where(const Thread& thread) const;
  [[noreturn]] void stuck() const;

  Context main_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Warp> warps_;
  std::vector<uint32_t> order_;
  Grid grid_;
  uint32_t count_ = 0, live_ = 0, at_barrier_ = 0, true_at_barrier_ = 0;
  Thread* running_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  GuardedMemory dynamic_memory_;
  void* dynamic_ = nullptr;
  bool shuffled_ = false;
  uint64_t collectives_ = 0;  // of the running block
  std::mt19937 random_;
  char started_ = 0, joined_ = 0, at_block_ = 0;  // addresses for edges
};

}  // namespace simt
