// What tests steer the fake runtime with.
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/cuda/state.h"
#include "tests/emulation/cuda/sync_model.h"

namespace sotto::fake_cuda {

void configure(const Options& options) {
  State& s = state();
  const Live now = live();
  if (now.streams + now.events + now.device_blocks + now.pinned_blocks != 0)
    misuse("configure while there are " + now.text());
  s.memory.guard_host(options.guard_host);
  s.memory.reach_host(options.pageable_access);
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  s.options = options;
  s.next_seed_ = 0;
  s.default_streams_.clear();
  s.queues_.clear();
  s.loaded_.clear();
  s.contexts_.clear();
}

const Options& options() { return state().options; }

void fail_call(uint64_t k, cudaError_t error) {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  s.failed_call_.clear();
  s.call_fault_ = {s.calls_ + k, error};
}

void fail_query(uint64_t k, cudaError_t error) {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  s.failed_call_.clear();
  s.query_fault_ = {s.queries_ + k, error};
}

void fail_execution(uint64_t k, cudaError_t error) {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  s.failed_call_.clear();
  s.execution_fault_ = {s.executions_ + k, error};
}

void drop_wait(const Wait& wait) {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  s.wait_to_drop_ = wait;
}

void make_late(uint32_t stream, int64_t us) {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  s.late_stream_ = stream;
  s.late_us_ = us;
}

std::string Wait::text() const {
  return "stream " + std::to_string(stream) + " for record " + std::to_string(record) +
         " of stream " + std::to_string(awaited);
}

std::string failed_call() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  return s.failed_call_;
}

void clear_faults() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  s.call_fault_ = s.query_fault_ = s.execution_fault_ = {};
  s.wait_to_drop_.reset();
  s.late_us_ = 0;
  s.waits_made_.clear();
  s.next_stream_ = 0;
  s.failed_call_.clear();
  s.waits_behind_blocks_.clear();
  s.sticky_ = cudaSuccess;
  s.calls_ = s.queries_ = s.waits_dropped_ = s.executions_ = 0;
}

uint64_t calls() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  return s.calls_;
}

uint64_t calls(const std::string& name) {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  const auto it = s.calls_by_name_.find(name);
  return it == s.calls_by_name_.end() ? 0 : it->second;
}

uint64_t queries() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  return s.queries_;
}

uint64_t waits() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  return s.waits_made_.size();
}

std::vector<Wait> waits_made() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  return s.waits_made_;
}

uint64_t records(uint32_t stream) {
  for (int device = 0; device < options().devices; ++device) {
    for (const auto& s : state().streams_of(device)) {
      if (s->number() == stream) return s->records();
    }
  }
  return 0;
}

uint64_t waits_dropped() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  return s.waits_dropped_;
}

uint64_t executions() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  return s.executions_;
}

uint64_t host_waits() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  return s.host_waits_;
}

uint64_t launches() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  return s.launches_;
}

uint64_t copies_to_host() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  return s.copies_to_host_;
}

std::set<int> contexts() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  return s.contexts_;
}

std::vector<std::string> waits_behind_blocks() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  return s.waits_behind_blocks_;
}

Live live() {
  State& s = state();
  Live now;
  uint64_t bytes = 0;
  s.memory.count(MemoryKind::kDevice, &now.device_blocks, &now.device_bytes);
  s.memory.count(MemoryKind::kPinned, &now.pinned_blocks, &now.pinned_bytes);
  s.memory.count(MemoryKind::kRegistered, &now.registered_blocks, &bytes);
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  now.streams = s.streams_.size();
  now.events = s.events_.size();
  now.pools = s.pools_.size() - s.default_pool_.size();
  return now;
}

std::string Live::text() const {
  return std::to_string(streams) + " streams, " + std::to_string(events) + " events, " +
         std::to_string(pools) + " pools, " + std::to_string(device_bytes) + " bytes in " +
         std::to_string(device_blocks) + " device blocks, " + std::to_string(pinned_bytes) +
         " bytes in " + std::to_string(pinned_blocks) + " pinned blocks, " +
         std::to_string(registered_blocks) + " registered blocks";
}

void drain() {
  for (const auto& stream : state().streams_of(-1)) stream->drain();
}

void hold() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  s.held_ = true;
}

void resume() {
  State& s = state();
  Quiet quiet;
  std::lock_guard lock(s.mutex_);
  s.held_ = false;
  s.released_.notify_all();
}

}  // namespace sotto::fake_cuda

extern "C" bool fake_cuda_in_runtime() { return sotto::fake_cuda::t_quiet != 0; }
