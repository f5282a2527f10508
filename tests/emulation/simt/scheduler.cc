#include "tests/emulation/simt/scheduler.h"

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

constinit thread_local uint3 threadIdx{}, blockIdx{};
constinit thread_local dim3 blockDim{}, gridDim{};

namespace simt {
namespace {

constexpr unsigned char kPoison = 0xff;
constexpr uint64_t kUnreadable = 0xdeadbeefdeadbeefull;
// Lanes of one warp that run on end in random order before another warp may.
constexpr int kBurst = 64;

thread_local Scheduler* current = nullptr;
std::atomic<uint64_t> came_to_collectives{0};

struct TlsBlock {
  uintptr_t code;
  void* data = nullptr;
  size_t bytes = 0;
};

// The calling thread's copy of the thread-local storage of the shared object that holds `code`; of
// the program itself nothing, since it has other variables there.
TlsBlock shared_variables_of(const void* code) {
  TlsBlock found{reinterpret_cast<uintptr_t>(code)};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* opaque) {
        auto* block = static_cast<TlsBlock*>(opaque);
        bool holds_code = false;
        size_t bytes = 0;
        for (int k = 0; k < info->dlpi_phnum; ++k) {
          const auto& segment = info->dlpi_phdr[k];
          const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
          if (segment.p_type == PT_LOAD && block->code >= begin &&
              block->code < begin + segment.p_memsz)
            holds_code = true;
          if (segment.p_type == PT_TLS) bytes = segment.p_memsz;
        }
        if (!holds_code) return 0;
        if (info->dlpi_name[0] != 0 && info->dlpi_tls_data != nullptr) {
          block->data = info->dlpi_tls_data;
          block->bytes = bytes;
        }
        return 1;
      },
      &found);
  return found;
}

}  // namespace

GuardedMemory::~GuardedMemory() { unmap(); }

void GuardedMemory::unmap() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
}

void* GuardedMemory::fresh(size_t bytes) {
  bytes = (bytes + 15) / 16 * 16;
  if (bytes != bytes_ || map_ == nullptr) {
    unmap();
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t inside = (bytes + page - 1) / page * page;
    map_bytes_ = inside + page;
    map_ = mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(static_cast<char*>(map_) + inside, page, PROT_NONE);
    data_ = static_cast<char*>(map_) + inside - bytes;
    bytes_ = bytes;
  }
  std::memset(data_, kPoison, bytes);
  return data_;
}

Scheduler::Scheduler() { main_.adopt_thread(); }

void Scheduler::seed(uint32_t seed) {
  shuffled_ = seed != 0;
  random_.seed(seed);
}

uint32_t Scheduler::lane() const { return running_->index % kWarp; }

std::string Scheduler::where(const Thread& thread) const {
  char text[512];
  std::snprintf(text, sizeof text, "block (%u,%u,%u) thread (%u,%u,%u) at %s %s:%d", blockIdx.x,
                blockIdx.y, blockIdx.z, thread.position.x, thread.position.y, thread.position.z,
                thread.state == State::kBarrier ? "the barrier" : "the collective", thread.at.file,
                thread.at.line);
  return text;
}

void Scheduler::misuse(const std::string& what) const {
  std::fprintf(stderr, "simt: %s\n", what.c_str());
  std::abort();
}

void Scheduler::stuck() const {
  std::string text = "no thread of the block can go on (divergent barrier?)";
  int shown = 0;
  const Thread* last = nullptr;
  for (uint32_t i = 0; i < count_ && shown < 4; ++i) {
    const Thread& t = *threads_[i];
    if (t.state == State::kDone) continue;
    if (last != nullptr && last->at.line == t.at.line && last->state == t.state) continue;
    text += "\n  " + where(t);
    last = &t;
    ++shown;
  }
  misuse(text);
}

// In natural order straight to the next lane of the warp.
void Scheduler::leave(bool dies) {
  Thread& left = *running_;
  const uint32_t warp = left.index / kWarp, ready = warps_[warp].ready;
  if (shuffled_ || ready == 0) {
    left.context.switch_to(main_, dies);
  } else {
    left.context.switch_to(begin(*threads_[warp * kWarp + pick_lane(ready)]), dies);
  }
}

void Scheduler::thread_main() {
  do {
    acquire_edge(&current->started_);
    (*current->body_)();
    release_edge(&current->joined_);
    current->ended(*current->running_);
  } while (current->begin_next_here());
  current->leave(true);
  std::abort();
}

// In natural order a lane that has not begun yet needs no stack of its own before it waits.
bool Scheduler::begin_next_here() {
#ifdef SIMT_TSAN
  return false;
#else
  Thread& done = *running_;
  const uint32_t warp = done.index / kWarp, ready = warps_[warp].ready;
  if (shuffled_ || ready == 0) return false;
  Thread& next = *threads_[warp * kWarp + pick_lane(ready)];
  if (next.state != State::kFresh) return false;
  next.context.take_stack_of(done.context);
  run(next);
  return true;
#endif
}

int Scheduler::barrier(BarrierResult kind, bool predicate, const Location& at) {
  Thread& t = *running_;
  t.at = at;
  t.barrier_kind = kind;
  t.state = State::kBarrier;
  release_edge(&at_block_);
  true_at_barrier_ += predicate;
  ++at_barrier_;
  warps_[t.index / kWarp].ready &= ~(1u << (t.index % kWarp));
  if (at_barrier_ == live_) {
    release_barrier();
  } else {
    leave(false);
  }
  acquire_edge(&at_block_);
  return static_cast<int>(t.result);
}

void Scheduler::release_barrier() {
  const Thread* first = nullptr;
  for (uint32_t i = 0; i < count_; ++i) {
    Thread& t = *threads_[i];
    if (t.state != State::kBarrier) continue;
    if (first == nullptr) first = &t;
    if (t.at.line != first->at.line || std::strcmp(t.at.file, first->at.file) != 0) {
      misuse("threads of one block wait at different barriers: " + where(*first) + " / " +
             where(t));
    }
    switch (t.barrier_kind) {
      case BarrierResult::kNone: t.result = 0; break;
      case BarrierResult::kCount: t.result = true_at_barrier_; break;
      case BarrierResult::kAnd: t.result = true_at_barrier_ == at_barrier_; break;
      case BarrierResult::kOr: t.result = true_at_barrier_ != 0; break;
    }
    t.state = State::kReady;
    warps_[i / kWarp].ready |= 1u << (i % kWarp);
  }
  at_barrier_ = true_at_barrier_ = 0;
}

uint64_t Scheduler::collective(Collective kind, uint32_t mask, uint64_t value, uint32_t source,
                               const Location& at) {
  ++collectives_;
  Thread& t = *running_;
  const uint32_t me = 1u << (t.index % kWarp);
  t.at = at;
  t.kind = kind;
  t.mask = mask;
  t.value = value;
  t.source = source;
  t.state = State::kCollective;
  if ((mask & me) == 0) misuse("a lane is not in its own mask: " + where(t));
  Warp& warp = warps_[t.index / kWarp];
  // Of the collectives only __syncwarp orders memory.
  if (kind == Collective::kSync) release_edge(&warp);
  warp.ready &= ~me;
  warp.waiting |= me;
  if (!complete(t)) leave(false);
  if (kind == Collective::kSync) acquire_edge(&warp);
  return t.result;
}

// Ends the collective that `asking` waits in if all living lanes of its mask have come.
bool Scheduler::complete(const Thread& asking) {
  const uint32_t base = asking.index / kWarp * kWarp;
  Warp& warp = warps_[asking.index / kWarp];
  const uint32_t lanes = asking.mask & warp.alive;
  // A lane that waits elsewhere may still come, after a collective of its own branch.
  if ((lanes & ~warp.waiting) != 0) return false;
  uint64_t ballot = 0;
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    const Thread& t = *threads_[base + static_cast<uint32_t>(std::countr_zero(left))];
    if (t.kind != asking.kind || t.mask != asking.mask) {
      misuse("lanes of one warp meet at different collectives or with different masks: " +
             where(asking) + " / " + where(t));
    }
    if (t.value != 0) ballot |= left & (~left + 1);
  }
  warp.waiting &= ~lanes;
  warp.ready |= lanes;
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    Thread& t = *threads_[base + static_cast<uint32_t>(std::countr_zero(left))];
    const uint32_t source = t.source % kWarp;
    if (t.kind == Collective::kBallot) t.result = ballot;
    if (t.kind == Collective::kShuffle) {
      t.result = (lanes >> source & 1) != 0 ? threads_[base + source]->value : kUnreadable;
    }
    t.state = State::kReady;
  }
  return true;
}

void Scheduler::start_block(uint32_t threads) {
  count_ = live_ = threads;
  at_barrier_ = true_at_barrier_ = 0;
  while (threads_.size() < threads) {
    threads_.push_back(std::make_unique<Thread>());
    threads_.back()->context.take_stack();
  }
  warps_.assign((threads + kWarp - 1) / kWarp, {});
  order_.resize(warps_.size());
  for (uint32_t w = 0; w < order_.size(); ++w) order_[w] = w;
  const dim3& size = grid_.threads;
  for (uint32_t i = 0; i < threads; ++i) {
    Thread& t = *threads_[i];
    t.index = i;
    t.position = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    t.state = State::kFresh;
    warps_[i / kWarp].ready |= 1u << (i % kWarp);
    warps_[i / kWarp].alive |= 1u << (i % kWarp);
  }
}

void Scheduler::run_block(const Grid& grid, uint3 index, const void* code,
                          const std::function<void()>& body) {
  current = this;
  grid_ = grid;
  body_ = &body;
  const TlsBlock variables = shared_variables_of(code);
  if (variables.data != nullptr) std::memset(variables.data, kPoison, variables.bytes);
  dynamic_ = dynamic_memory_.fresh(grid.dynamic_shared);
  start_block(grid.threads.x * grid.threads.y * grid.threads.z);
  blockIdx = index;
  blockDim = grid.threads;
  gridDim = grid.blocks;
  release_edge(&started_);
  while (live_ != 0) {
    bool progress = false;
    if (shuffled_) std::shuffle(order_.begin(), order_.end(), random_);
    for (const uint32_t warp : order_) progress |= run_warp(warp);
    if (!progress) stuck();
  }
  acquire_edge(&joined_);
  current = nullptr;
  came_to_collectives.fetch_add(collectives_, std::memory_order_relaxed);
  collectives_ = 0;
}

uint32_t Scheduler::pick_lane(uint32_t ready) {
  if (shuffled_) {
    for (uint32_t skip = random_() % static_cast<uint32_t>(std::popcount(ready)); skip != 0; --skip)
      ready &= ready - 1;
  }
  return static_cast<uint32_t>(std::countr_zero(ready));
}

// Until no lane is ready, or (random order) for a while. Whether any ran.
bool Scheduler::run_warp(uint32_t index) {
  bool progress = false;
  for (int n = 0; warps_[index].ready != 0 && !(shuffled_ && n == kBurst); ++n) {
    main_.switch_to(begin(*threads_[index * kWarp + pick_lane(warps_[index].ready)]), false);
    progress = true;
  }
  return progress;
}

// Makes `t` the running thread. Returns what to switch to.
Context& Scheduler::begin(Thread& t) {
  if (t.state == State::kFresh) t.context.arm(&thread_main, t.index * 320 % 4096);
  run(t);
  return t.context;
}

void Scheduler::run(Thread& t) {
  t.state = State::kReady;
  running_ = &t;
  threadIdx = t.position;
}

// Who has ended counts no more at barriers and in masks, so that others may go on.
void Scheduler::ended(Thread& t) {
  t.state = State::kDone;
  Warp& warp = warps_[t.index / kWarp];
  const uint32_t lane = t.index % kWarp;
  warp.ready &= ~(1u << lane);
  warp.alive &= ~(1u << lane);
  --live_;
  if (live_ != 0 && at_barrier_ == live_) release_barrier();
  for (uint32_t left = warp.waiting; left != 0; left &= left - 1) {
    const Thread& other =
        *threads_[t.index / kWarp * kWarp + static_cast<uint32_t>(std::countr_zero(left))];
    if ((other.mask >> lane & 1) != 0 && complete(other)) return;
  }
}

namespace {

Scheduler& running() {
  if (current == nullptr) {
    std::fprintf(stderr, "simt: a word of CUDA was used outside of a kernel\n");
    std::abort();
  }
  return *current;
}

}  // namespace

bool in_kernel() { return current != nullptr; }
int block_barrier(BarrierResult kind, bool predicate, const Location& at) {
  return running().barrier(kind, predicate, at);
}
uint64_t collectives() { return came_to_collectives.load(std::memory_order_relaxed); }
uint64_t warp_collective(Collective kind, uint32_t mask, uint64_t value, uint32_t source,
                         const Location& at) {
  return running().collective(kind, mask, value, source, at);
}
uint32_t lane_index() { return running().lane(); }
void* dynamic_shared() { return running().dynamic_shared(); }
void misuse(const char* what, const Location& at) {
  running().misuse(std::string(what) + ": " + at.file + ":" + std::to_string(at.line));
}

}  // namespace simt
