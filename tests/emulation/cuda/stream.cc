#include "tests/emulation/cuda/stream.h"

#include "tests/emulation/cuda/state.h"
#include "tests/emulation/cuda/sync_model.h"

namespace sotto::fake_cuda {
namespace {

thread_local bool t_on_stream = false;

}  // namespace

// ---- Marker ----

bool Marker::done() const {
  bool is = false;
  {
    Quiet quiet;
    is = done_.load(std::memory_order_acquire) != 0;
  }
  if (is) acquire_edge(const_cast<Marker*>(this));
  return is;
}

void Marker::wait() {
  {
    Quiet quiet;
    done_.wait(0, std::memory_order_acquire);
  }
  acquire_edge(this);
}

void Marker::complete() {
  release_edge(this);
  Quiet quiet;
  at_ = std::chrono::steady_clock::now();
  done_.store(1, std::memory_order_release);
  done_.notify_all();
}

// ---- Stream ----

Stream::Stream(uint32_t number, int device, unsigned flags, int priority, uint64_t seed,
               std::shared_ptr<HardwareQueue> queue)
    : number_(number),
      device_(device),
      flags_(flags),
      priority_(priority),
      hardware_(std::move(queue)),
      random_(seed),
      thread_([this] { run(); }) {}

Stream::~Stream() {
  {
    Quiet quiet;
    std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

bool Stream::on_stream_thread() { return t_on_stream; }

void Stream::push(Job job) { enqueue(std::move(job), Kind::kWork); }
void Stream::push_always(Job job) { enqueue(std::move(job), Kind::kMarker); }
void Stream::push_wait(Job job) { enqueue(std::move(job), Kind::kWait); }

Ref<Marker> Stream::mark() {
  auto marker = make_ref<Marker>();
  push_always([marker] { marker->complete(); });
  return marker;
}

Ref<Marker> Stream::record() {
  auto marker = make_ref<Marker>();
  marker->stream_ = number_;
  {
    Quiet quiet;
    std::lock_guard lock(mutex_);
    marker->record_ = records_++;
  }
  push_always([marker] { marker->complete(); });
  return marker;
}

uint64_t Stream::records() {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  return records_;
}

void Stream::wait_for(Ref<Marker> marker) {
  push_wait([marker = std::move(marker)] { marker->wait(); });
}

void Stream::enqueue(Job job, Kind kind) {
  Entry entry{std::move(job), kind, std::make_unique<char>()};
  release_edge(entry.edge.get());
  Quiet quiet;
  std::lock_guard lock(mutex_);
  if (hardware_ != nullptr) entry.place = hardware_->enter();
  queue_.push_back(std::move(entry));
  changed_.notify_all();
}

void Stream::drain() {
  {
    Quiet quiet;
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return queue_.empty() && !busy_; });
  }
  acquire_edge(this);
}

bool Stream::busy() {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  return !queue_.empty() || busy_;
}

bool Stream::waits() {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  return waits_;
}

bool Stream::idle() {
  if (busy()) return false;
  acquire_edge(this);
  return true;
}

void Stream::execute(Entry& entry) {
  if (hardware_ != nullptr) hardware_->await_head(entry.place);
  if (hardware_ != nullptr && entry.kind != Kind::kWait) hardware_->leave();
  if (entry.kind != Kind::kWork) {
    entry.job();
  } else if (state().begin_job(number_, random_)) {
    entry.job();
    state().end_job();
  }
  if (hardware_ != nullptr && entry.kind == Kind::kWait) hardware_->leave();
}

void Stream::run() {
  t_on_stream = true;
  for (;;) {
    Entry entry;
    {
      Quiet quiet;
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      entry = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      waits_ = entry.kind == Kind::kWait;
    }
    acquire_edge(entry.edge.get());
    execute(entry);
    release_edge(this);
    entry.job = nullptr;  // not under Quiet: what the job holds is given back in order
    Quiet quiet;
    entry.edge.reset();
    std::lock_guard lock(mutex_);
    busy_ = waits_ = false;
    if (queue_.empty()) idle_.notify_all();
  }
}

}  // namespace sotto::fake_cuda
