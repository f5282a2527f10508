// Device and pinned memory of the fake runtime: end-aligned in front of a guard page, filled with
// NaN, with canaries in what is left of the pages; out of reach after it was freed.
//
// Threads: any. Checks end the process with a text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>

namespace sotto::fake_cuda {

enum class MemoryKind : uint8_t { kDevice, kPinned, kRegistered };

struct Block {
  char* base = nullptr;
  size_t bytes = 0;
  MemoryKind kind = MemoryKind::kDevice;
  int device = 0;
  bool freeing = false;  // a cudaFreeAsync is queued
  char* map = nullptr;   // with guard pages; null: the caller's own memory
  size_t map_bytes = 0;
};

class Memory {
 public:
  // Bytes of a block are counted against the device's limit; null: no room.
  void* alloc(size_t bytes, MemoryKind kind, int device, size_t limit);
  void register_host(void* at, size_t bytes, int device);
  // `call` names the call for the text of a misuse.
  void check_free(void* at, MemoryKind kind, const char* call);
  void mark_freeing(void* at, const char* call);
  void free(void* at, MemoryKind kind, const char* call);

  // The block that holds the address.
  bool find(const void* at, Block* found) const;
  // Ends the process unless [at, at + bytes) lies in one block of device memory, or not at all in
  // device memory and, if it begins in a pinned block, in that alone.
  void check(const void* at, size_t bytes, bool device, const char* call) const;
  // Ends the process unless the range lies in one block of device or pinned memory, or, with
  // reach_host, elsewhere in the host's.
  void check_reachable(const void* at, size_t bytes, const char* call) const;
  size_t used(int device) const;
  void count(MemoryKind kind, uint64_t* blocks, uint64_t* bytes) const;

  // The host's own memory counts as pinned.
  void reach_host(bool on) { reach_host_ = on; }
  bool reaches_host() const { return reach_host_; }

  // Host guard: device memory can be reached while a job runs, and not otherwise.
  void guard_host(bool on);
  void enter_job();
  void leave_job();

  // What an address is, for the report of a fault; takes no lock.
  std::string describe_unlocked(const void* at) const;

 private:
  const Block* find_locked(const void* at) const;
  void protect(const Block& block, bool reachable) const;

  mutable std::mutex mutex_;
  std::map<const char*, Block> blocks_;
  std::deque<Block> gone_;   // freed, their addresses not yet given back
  bool reach_host_ = false;  // changes while nothing runs
  bool guard_ = false;
  int jobs_ = 0;
};

// Says what is wrong and ends the process.
[[noreturn]] void misuse(const std::string& text);

}  // namespace sotto::fake_cuda
