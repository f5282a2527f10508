#include "tests/emulation/cuda/memory.h"

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/emulation/cuda/stream.h"
#include "tests/emulation/cuda/sync_model.h"

namespace sotto::fake_cuda {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 256;  // as cudaMalloc promises
constexpr int kFresh = 0xff;        // a NaN in every float type
constexpr unsigned char kCanary = 0xc5;
constexpr size_t kKeptAddresses = 1024;  // freed blocks whose addresses fault for a while

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

const char* kind_name(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kDevice: return "device";
    case MemoryKind::kPinned: return "pinned host";
    case MemoryKind::kRegistered: return "registered host";
  }
  return "?";
}

std::string name(const Block& b) {
  return std::to_string(b.bytes) + " bytes of " + kind_name(b.kind) + " memory" +
         (b.kind == MemoryKind::kDevice ? " (device " + std::to_string(b.device) + ")" : "");
}

char* body(const Block& b) { return b.map + kPage; }
size_t body_bytes(const Block& b) { return b.map_bytes - 2 * kPage; }

bool all_canaries(const char* from, const char* to) {
  return std::all_of(from, to, [](char c) { return static_cast<unsigned char>(c) == kCanary; });
}

}  // namespace

void misuse(const std::string& text) {
  std::fprintf(stderr, "fake CUDA: %s\n", text.c_str());
  std::fflush(stderr);
  std::abort();
}

void* Memory::alloc(size_t bytes, MemoryKind kind, int device, size_t limit) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  if (kind == MemoryKind::kDevice) {
    size_t used = 0;
    for (const auto& [at, b] : blocks_) {
      if (b.kind == kind && b.device == device) used += b.bytes;
    }
    if (used + bytes > limit) return nullptr;
  }
  const size_t room = round_up(bytes, kAlignment);
  Block b;
  b.map_bytes = round_up(room, kPage) + 2 * kPage;
  void* map =
      mmap(nullptr, b.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return nullptr;
  ASAN_UNPOISON_MEMORY_REGION(map,
                              b.map_bytes);  // a thread that is gone may have had its stack here
  b.map = static_cast<char*>(map);
  b.bytes = bytes;
  b.kind = kind;
  b.device = device;
  b.base = body(b) + body_bytes(b) - room;
  mprotect(body(b), body_bytes(b), PROT_READ | PROT_WRITE);
  std::memset(body(b), kCanary, static_cast<size_t>(b.base - body(b)));
  std::memset(b.base, kFresh, bytes);
  std::memset(b.base + bytes, kCanary, room - bytes);
  blocks_[b.base] = b;
  if (guard_ && jobs_ == 0) protect(b, false);
  return b.base;
}

void Memory::register_host(void* at, size_t bytes, int device) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  for (const char* p : {static_cast<const char*>(at), static_cast<const char*>(at) + bytes - 1}) {
    if (const Block* b = find_locked(p)) misuse("cudaHostRegister of memory within " + name(*b));
  }
  Block b;
  b.base = static_cast<char*>(at);
  b.bytes = bytes;
  b.kind = MemoryKind::kRegistered;
  b.device = device;
  blocks_[b.base] = b;
}

const Block* Memory::find_locked(const void* at) const {
  const auto* p = static_cast<const char*>(at);
  auto it = blocks_.upper_bound(p);
  if (it == blocks_.begin()) return nullptr;
  --it;
  return p < it->second.base + it->second.bytes ? &it->second : nullptr;
}

bool Memory::find(const void* at, Block* found) const {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const Block* b = find_locked(at);
  if (b == nullptr) return false;
  *found = *b;
  return true;
}

void Memory::check_free(void* at, MemoryKind kind, const char* call) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const auto it = blocks_.find(static_cast<const char*>(at));
  if (it == blocks_.end()) {
    misuse(std::string(call) +
           " of an address that is not the beginning of live memory: " + describe_unlocked(at));
  }
  const Block& b = it->second;
  if (b.kind != kind) misuse(std::string(call) + " of " + name(b));
  if (b.freeing) misuse(std::string(call) + " of " + name(b) + ", which cudaFreeAsync has freed");
}

void Memory::mark_freeing(void* at, const char* call) {
  check_free(at, MemoryKind::kDevice, call);
  Quiet quiet;
  std::lock_guard lock(mutex_);
  blocks_[static_cast<const char*>(at)].freeing = true;
}

void Memory::free(void* at, MemoryKind kind, const char* call) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const auto it = blocks_.find(static_cast<const char*>(at));
  if (it == blocks_.end() || it->second.kind != kind)
    misuse(std::string(call) + ": unknown memory");
  Block b = it->second;
  blocks_.erase(it);
  if (b.map == nullptr) return;
  protect(b, true);
  if (!all_canaries(body(b), b.base))
    misuse("something wrote in front of " + name(b) + ", found when " + call + " freed them");
  if (!all_canaries(b.base + b.bytes, body(b) + body_bytes(b)))
    misuse("something wrote behind the end of " + name(b) + ", found when " + call + " freed them");
  madvise(body(b), body_bytes(b), MADV_DONTNEED);
  protect(b, false);
  gone_.push_back(b);
  if (gone_.size() > kKeptAddresses) {
    munmap(gone_.front().map, gone_.front().map_bytes);
    gone_.pop_front();
  }
}

void Memory::check(const void* at, size_t bytes, bool device, const char* call) const {
  if (bytes == 0) return;
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const Block* b = find_locked(at);
  const std::string what = std::string(call) + " of " + std::to_string(bytes) + " bytes";
  if (b == nullptr) {
    if (device) misuse(what + ": not in live device memory: " + describe_unlocked(at));
    const Block* last = find_locked(static_cast<const char*>(at) + bytes - 1);
    if (last != nullptr) misuse(what + " runs from host memory into " + name(*last));
    return;
  }
  // What executes came before the free that is queued: else the block would be gone.
  if (b->freeing && !Stream::on_stream_thread())
    misuse(what + ": in " + name(*b) + ", which cudaFreeAsync has freed");
  if ((b->kind == MemoryKind::kDevice) != device) {
    misuse(what + ": the kind of the copy says " + (device ? "device" : "host") +
           " memory, but it is in " + name(*b));
  }
  const auto offset = static_cast<size_t>(static_cast<const char*>(at) - b->base);
  if (bytes > b->bytes - offset) {
    misuse(what + " at offset " + std::to_string(offset) + " runs out of " + name(*b));
  }
}

void Memory::check_reachable(const void* at, size_t bytes, const char* call) const {
  if (bytes == 0) return;
  Block block;
  if (!find(at, &block)) {
    if (reach_host_) return check(at, bytes, false, call);
    misuse(std::string(call) + " of " + std::to_string(bytes) +
           " bytes of memory that the device cannot reach: " + describe_unlocked(at));
  }
  check(at, bytes, block.kind == MemoryKind::kDevice, call);
}

size_t Memory::used(int device) const {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  size_t bytes = 0;
  for (const auto& [at, b] : blocks_) {
    if (b.kind == MemoryKind::kDevice && b.device == device) bytes += b.bytes;
  }
  return bytes;
}

void Memory::count(MemoryKind kind, uint64_t* blocks, uint64_t* bytes) const {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  *blocks = *bytes = 0;
  for (const auto& [at, b] : blocks_) {
    if (b.kind != kind) continue;
    ++*blocks;
    *bytes += b.bytes;
  }
}

// ---- Host guard ----

void Memory::protect(const Block& b, bool reachable) const {
  if (b.map != nullptr)
    mprotect(body(b), body_bytes(b), reachable ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void Memory::guard_host(bool on) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  guard_ = on;
  for (const auto& [at, b] : blocks_) {
    if (b.kind == MemoryKind::kDevice) protect(b, !on || jobs_ > 0);
  }
}

void Memory::enter_job() {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  if (jobs_++ > 0 || !guard_) return;
  for (const auto& [at, b] : blocks_) {
    if (b.kind == MemoryKind::kDevice) protect(b, true);
  }
}

void Memory::leave_job() {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  if (--jobs_ > 0 || !guard_) return;
  for (const auto& [at, b] : blocks_) {
    if (b.kind == MemoryKind::kDevice) protect(b, false);
  }
}

// ---- Reports ----

std::string Memory::describe_unlocked(const void* at) const {
  const auto* p = static_cast<const char*>(at);
  for (const auto& [base, b] : blocks_) {
    if (b.map == nullptr || p < b.map || p >= b.map + b.map_bytes) continue;
    if (p < b.base) return std::to_string(b.base - p) + " bytes in front of " + name(b);
    const auto offset = static_cast<size_t>(p - b.base);
    if (offset < b.bytes) return "offset " + std::to_string(offset) + " of " + name(b);
    return std::to_string(offset - b.bytes + 1) + " bytes past the end of " + name(b);
  }
  for (const Block& b : gone_) {
    if (p >= b.map && p < b.map + b.map_bytes) return "within " + name(b) + " that have been freed";
  }
  return "an address of no device or pinned memory";
}

}  // namespace sotto::fake_cuda
