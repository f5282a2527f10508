#include "tests/emulation/async_device/async_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/cpu/cpu_device.h"
#include "core/kernels/registry.h"
#include "tests/support/access_check.h"

namespace sotto::test {
namespace {

constexpr int kPoison = 0xff;

[[noreturn]] void misuse(const char* what) {
  std::fprintf(stderr, "async_device: %s\n", what);
  std::abort();
}

Status no_streams() { return unsupported("the async device has no streams"); }

size_t listed_tensors(std::span<const Piece> pieces) {
  size_t n = 0;
  for (const Piece& p : pieces) {
    if (p.tensor != kNoTensor) n = std::max<size_t>(n, p.tensor + 1);
  }
  return n;
}

}  // namespace

// Copies of the pieces of calls, and how often they are queued.
class AsyncDevice::Tables final : public CallTables {
 public:
  Tables(std::span<const KernelCall> calls, std::shared_ptr<std::atomic<uint64_t>> live)
      : live_(std::move(live)) {
    for (const KernelCall& call : calls)
      calls_.push_back({call, std::vector<Piece>(call.pieces.begin(), call.pieces.end())});
    ++*live_;
  }
  ~Tables() override {
    if (queued_ != 0) misuse("tables are destroyed while calls are queued that read them");
    --*live_;
  }

  // The pieces of a call that is launched now; done() when it has executed.
  std::span<const Piece> queue(const KernelCall& launched) const {
    if (launched.call >= calls_.size()) misuse("launch of a call that its tables do not have");
    const Entry& entry = calls_[launched.call];
    if (entry.call.id != launched.id || entry.call.args != launched.args ||
        entry.call.bytes != launched.bytes || entry.pieces.size() != launched.pieces.size())
      misuse("launch of another call than the one that was prepared");
    for (size_t i = 0; i < launched.operands.size(); ++i) {
      if ((launched.operands[i].data == nullptr) != (entry.absent >> i & 1))
        misuse("launch with other operands left out than when the call was prepared");
    }
    ++queued_;
    return entry.pieces;
  }
  void done() const { --queued_; }

 private:
  struct Entry {
    Entry(const KernelCall& c, std::vector<Piece> p) : call(c), pieces(std::move(p)) {
      for (size_t i = 0; i < c.operands.size(); ++i) {
        if (c.operands[i].data == nullptr) absent |= 1u << i;
      }
    }
    KernelCall call;
    std::vector<Piece> pieces;
    uint32_t absent = 0;  // bit i: operand i
  };
  std::shared_ptr<std::atomic<uint64_t>> live_;
  std::vector<Entry> calls_;
  mutable std::atomic<uint64_t> queued_ = 0;
};

struct AsyncDevice::Item {
  enum class Kind : uint8_t { kKernel, kCopy, kWait } kind = Kind::kWait;
  KernelCall call;
  const Tables* tables = nullptr;
  std::vector<Operand> operands;
  std::vector<DiscardedRange> discarded;
  void* dst = nullptr;
  const void* src = nullptr;
  uint64_t bytes = 0;
  const uint32_t* predicate = nullptr;
  uint32_t expect = 0;
  Event awaited{};
};

AsyncDevice::AsyncDevice(const AsyncDeviceOptions& options) : max_delay_us_(options.max_delay_us) {
  caps_.synchronous = false;
  caps_.host_memory = options.host_memory;
  caps_.lanes = options.lanes;
  caps_.background_lanes = options.background_lanes;
  caps_.message_lanes = options.message_lanes;
  const uint32_t lanes = caps_.all_lanes();
  caps_.split_elements = options.split_elements;
  caps_.wants_discarded = options.wants_discarded;
  for (uint32_t i = 0; i < lanes; ++i) {
    auto lane = std::make_unique<Lane>();
    lane->cpu = make_cpu_device(1, SimdLevel::kAuto).take();
    lane->random.seed(options.seed * 1009 + i);
    lanes_.push_back(std::move(lane));
  }
  for (uint32_t i = 0; i < lanes; ++i) {
    lanes_[i]->thread = std::thread([this, i] { lane_main(i); });
  }
}

AsyncDevice::~AsyncDevice() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    for (auto& lane : lanes_) {
      lane->held = false;
      lane->changed.notify_all();
    }
  }
  for (auto& lane : lanes_) lane->thread.join();
  for (auto& [at, block] : blocks_) {
    if (block.alias == nullptr) {
      std::free(const_cast<std::byte*>(at));
    } else {
      munmap(const_cast<std::byte*>(at), block.bytes);
      munmap(block.alias, block.bytes);
    }
  }
}

// ---- Memory ----

Result<void*> AsyncDevice::alloc(uint64_t bytes) {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  Block block;
  void* at = nullptr;
  if (caps_.host_memory) {
    block.bytes = std::max<uint64_t>(128, (bytes + 127) / 128 * 128);
    at = std::aligned_alloc(128, block.bytes);
    if (at == nullptr) return error(Code::kOutOfMemory, "async device: {} bytes", bytes);
    std::memset(at, 0, block.bytes);
  } else {
    block.bytes = std::max(page, (bytes + page - 1) / page * page);
    const int fd = memfd_create("device-memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(block.bytes)) != 0) {
      if (fd >= 0) close(fd);
      return error(Code::kOutOfMemory, "async device: {} bytes", bytes);
    }
    at = mmap(nullptr, block.bytes, PROT_NONE, MAP_SHARED, fd, 0);
    void* alias = mmap(nullptr, block.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED || alias == MAP_FAILED)
      return error(Code::kOutOfMemory, "async device: {} bytes", bytes);
    block.alias = static_cast<std::byte*>(alias);
  }
  std::lock_guard lock(memory_mutex_);
  blocks_[static_cast<const std::byte*>(at)] = block;
  return at;
}

void AsyncDevice::free(void* memory, uint64_t) {
  if (memory == nullptr) return;
  Block block;
  {
    std::lock_guard lock(memory_mutex_);
    const auto it = blocks_.find(static_cast<const std::byte*>(memory));
    if (it == blocks_.end()) misuse("free of memory that is not allocated");
    block = it->second;
    blocks_.erase(it);
  }
  if (block.alias == nullptr) {
    std::free(memory);
  } else {
    munmap(memory, block.bytes);
    munmap(block.alias, block.bytes);
  }
}

// The block that has the address, or null.
auto AsyncDevice::find_block(const void* memory) const -> Blocks::const_iterator {
  auto it = blocks_.upper_bound(static_cast<const std::byte*>(memory));
  if (it == blocks_.begin()) return blocks_.end();
  --it;
  return static_cast<const std::byte*>(memory) < it->first + it->second.bytes ? it : blocks_.end();
}

void* AsyncDevice::reach(const void* memory) const {
  const auto it = find_block(memory);
  if (it == blocks_.end() || it->second.alias == nullptr) return const_cast<void*>(memory);
  return it->second.alias + (static_cast<const std::byte*>(memory) - it->first);
}

void* AsyncDevice::host_view(const void* memory) const {
  std::lock_guard lock(memory_mutex_);
  return reach(memory);
}

uint64_t AsyncDevice::live_bytes() const {
  std::lock_guard lock(memory_mutex_);
  uint64_t bytes = 0;
  for (const auto& [at, block] : blocks_) bytes += block.bytes;
  return bytes;
}

// ---- Queueing ----

bool AsyncDevice::count_fault(Fault fault) {
  const auto kind = static_cast<size_t>(fault);
  const uint64_t number = calls_[kind]++;
  return std::find(faults_[kind].begin(), faults_[kind].end(), number) != faults_[kind].end();
}

void AsyncDevice::inject(Fault fault, uint64_t which) {
  std::lock_guard lock(mutex_);
  faults_[static_cast<size_t>(fault)].push_back(which);
}

uint64_t AsyncDevice::calls(Fault fault) const {
  std::lock_guard lock(mutex_);
  return calls_[static_cast<size_t>(fault)];
}

bool AsyncDevice::idle() const {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](const auto& lane) { return lane->executed == lane->queued; });
}

Status AsyncDevice::enqueue(uint32_t lane, std::unique_ptr<Item> item) {
  if (lane >= lanes_.size())
    return error(Code::kDevice, "async device: lane {} of {}", lane, lanes_.size());
  std::lock_guard lock(mutex_);
  const auto kind = item->kind;
  if (kind == Item::Kind::kKernel && count_fault(Fault::kLaunch)) {
    return error(Code::kDevice, "injected: launch of {} failed", kernel_name(item->call.id));
  }
  if (kind == Item::Kind::kCopy && count_fault(Fault::kCopy))
    return error(Code::kDevice, "injected: copy failed");
  if (kind == Item::Kind::kWait && count_fault(Fault::kWait)) return ok_status();
  if (item->tables != nullptr) item->call.pieces = item->tables->queue(item->call);
  if (idle() && item->predicate == nullptr) poison(*item);
  lanes_[lane]->queue.push_back(std::move(item));
  ++lanes_[lane]->queued;
  lanes_[lane]->changed.notify_all();
  return ok_status();
}

Result<std::shared_ptr<const CallTables>> AsyncDevice::prepare(std::span<const KernelCall> calls) {
  return std::shared_ptr<const CallTables>(std::make_shared<Tables>(calls, live_tables_));
}

Status AsyncDevice::launch(uint32_t lane, const KernelCall& call,
                           std::span<const DiscardedRange> discarded) {
  auto item = std::make_unique<Item>();
  item->kind = Item::Kind::kKernel;
  item->call = call;
  item->operands.assign(call.operands.begin(), call.operands.end());
  item->call.operands = item->operands;
  item->discarded.assign(discarded.begin(), discarded.end());
  item->predicate = call.predicate;
  item->expect = call.expect;
  item->tables = static_cast<const Tables*>(call.tables);
  return enqueue(lane, std::move(item));
}

Status AsyncDevice::copy(uint32_t lane, void* dst, const void* src, uint64_t bytes,
                         const uint32_t* predicate, uint32_t expect) {
  auto item = std::make_unique<Item>();
  item->kind = Item::Kind::kCopy;
  item->dst = dst;
  item->src = src;
  item->bytes = bytes;
  item->predicate = predicate;
  item->expect = expect;
  if (caps_.wants_discarded && bytes != 0) item->discarded.push_back({dst, bytes});
  return enqueue(lane, std::move(item));
}

// ---- Events ----

Result<EventId> AsyncDevice::record(uint32_t lane) {
  if (lane >= lanes_.size())
    return error(Code::kDevice, "async device: lane {} of {}", lane, lanes_.size());
  std::lock_guard lock(mutex_);
  if (count_fault(Fault::kRecord)) return error(Code::kDevice, "injected: event record failed");
  const EventId id = next_event_++;
  events_[id] = {lane, lanes_[lane]->queued};
  return id;
}

Status AsyncDevice::wait(uint32_t lane, EventId event) {
  auto item = std::make_unique<Item>();
  {
    std::lock_guard lock(mutex_);
    const auto it = events_.find(event);
    if (it == events_.end())
      return error(Code::kDevice, "async device: wait for event {}, which does not exist", event);
    item->awaited = it->second;
  }
  return enqueue(lane, std::move(item));
}

Result<bool> AsyncDevice::query(EventId event) {
  std::lock_guard lock(mutex_);
  const auto it = events_.find(event);
  if (it == events_.end())
    return error(Code::kDevice, "async device: query of event {}, which does not exist", event);
  Lane& lane = *lanes_[it->second.lane];
  if (lane.executed < it->second.position) return false;
  if (!lane.error.ok() && lane.error_at <= it->second.position)
    return std::exchange(lane.error, ok_status());
  return true;
}

void AsyncDevice::release(EventId event) {
  std::lock_guard lock(mutex_);
  if (events_.erase(event) != 1) misuse("release of an event that does not exist");
}

uint64_t AsyncDevice::live_events() const {
  std::lock_guard lock(mutex_);
  return events_.size();
}

Result<EventId> AsyncDevice::record_stream(void*) { return no_streams(); }
Status AsyncDevice::stream_after_event(void*, EventId) { return no_streams(); }
Result<BlockId> AsyncDevice::block_stream(void*) { return no_streams(); }
void AsyncDevice::unblock(BlockId) {}

uint64_t AsyncDevice::busy_ns() const {
  uint64_t ns = 0;
  for (const auto& lane : lanes_) ns += lane->cpu->busy_ns();
  return ns;
}

// ---- Executing ----

void AsyncDevice::hold(uint32_t lane) {
  std::lock_guard lock(mutex_);
  lanes_.at(lane)->held = true;
}

void AsyncDevice::resume(uint32_t lane) {
  std::lock_guard lock(mutex_);
  lanes_.at(lane)->held = false;
  lanes_.at(lane)->changed.notify_all();
}

uint64_t AsyncDevice::executed(uint32_t lane) const {
  std::lock_guard lock(mutex_);
  return lanes_.at(lane)->executed;
}

void AsyncDevice::drain() {
  std::unique_lock lock(mutex_);
  executed_.wait(lock, [this] { return idle(); });
}

void AsyncDevice::poison(const Item& item) const {
  std::lock_guard lock(memory_mutex_);
  for (const DiscardedRange& range : item.discarded) {
    if (range.bytes != 0) std::memset(reach(range.data), kPoison, range.bytes);
  }
}

void AsyncDevice::lane_main(uint32_t index) noexcept {
  Lane& lane = *lanes_[index];
  std::unique_lock lock(mutex_);
  for (;;) {
    lane.changed.wait(lock, [&] { return stop_ || (!lane.queue.empty() && !lane.held); });
    if (lane.queue.empty()) {
      if (stop_) return;
      continue;
    }
    const std::unique_ptr<Item> item = std::move(lane.queue.front());
    lane.queue.pop_front();
    bool fails = false;
    if (item->kind == Item::Kind::kWait) {
      const Event& e = item->awaited;
      executed_.wait(lock, [&] { return lanes_[e.lane]->executed >= e.position; });
    } else {
      fails = count_fault(Fault::kExecute);
      const int64_t scale = lane.random() % 8 == 0 ? 4 : 1;
      const auto limit = static_cast<uint64_t>(std::max<int64_t>(max_delay_us_, 0) * scale);
      const auto delay_us = static_cast<int64_t>(lane.random() % (limit + 1));
      lock.unlock();
      const uint32_t* predicate = item->predicate == nullptr
                                      ? nullptr
                                      : static_cast<const uint32_t*>(host_view(item->predicate));
      if (predicate == nullptr || *predicate == item->expect) poison(*item);
      if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      if (!fails) run(lane, *item);
      if (item->tables != nullptr) item->tables->done();
      lock.lock();
    }
    ++lane.executed;
    if (fails && lane.error.ok()) {
      lane.error = error(Code::kDevice, "injected: a call on lane {} did not execute", index);
      lane.error_at = lane.executed;
    }
    executed_.notify_all();
  }
}

void AsyncDevice::run_kernel(Lane& lane, const KernelCall& call) {
  if (call.predicate != nullptr && *call.predicate != call.expect) return;
  const AccessCheck check(call);
  if (!check.missing().empty()) misuse(check.missing().c_str());
  const Status status = lane.cpu->launch(0, call, {});
  if (!status.ok()) misuse(status.text().c_str());
  if (const std::string changed = check.changed(); !changed.empty()) misuse(changed.c_str());
}

// Through addresses that this thread can reach.
void AsyncDevice::run(Lane& lane, Item& item) {
  std::vector<std::vector<void*>> lists;
  KernelCall call = item.call;
  {
    std::lock_guard lock(memory_mutex_);
    const uint32_t* predicate = item.predicate;
    if (predicate != nullptr) predicate = static_cast<const uint32_t*>(reach(predicate));
    if (item.kind == Item::Kind::kCopy) {
      item.dst = reach(item.dst);
      item.src = reach(item.src);
      item.predicate = predicate;
    } else {
      const uint32_t list_mask = list_operands(call.id, call.args);
      const size_t tensors = list_mask == 0 ? 0 : listed_tensors(call.pieces);
      for (size_t i = 0; i < item.operands.size(); ++i) {
        void*& data = item.operands[i].data;
        if (data == nullptr) continue;
        if ((list_mask >> i & 1) != 0) {
          if (!caps_.host_memory && find_block(data) == blocks_.end())
            misuse("a list of tensor pointers that the device cannot read");
          void* const* pointers = static_cast<void* const*>(reach(data));
          auto& list = lists.emplace_back();
          list.resize(tensors + 1);  // also without tensors the list is somewhere
          // Others may be inputs that are arriving.
          for (const Piece& piece : call.pieces) {
            if (piece.tensor != kNoTensor) list[piece.tensor] = reach(pointers[piece.tensor]);
          }
          data = list.data();
        } else {
          data = reach(data);
        }
      }
      call.operands = item.operands;
      call.predicate = predicate;
    }
  }
  if (item.kind == Item::Kind::kKernel) {
    run_kernel(lane, call);
    return;
  }
  const Status status =
      lane.cpu->copy(0, item.dst, item.src, item.bytes, item.predicate, item.expect);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.text().c_str());
    misuse("the CPU device refused a call");
  }
}

}  // namespace sotto::test
