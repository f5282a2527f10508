#include "cuda/calls/blocked_streams.h"

#include <map>

namespace sotto {

BlockedStreams& BlockedStreams::of(int32_t device) {
  static std::mutex mutex;
  static auto* const all =
      new std::map<int32_t, BlockedStreams>;  // threads may outlive the library
  const std::lock_guard lock(mutex);
  return (*all)[device];
}

void BlockedStreams::add() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return kept_free_ == 0; });
  ++blocked_;
}

void BlockedStreams::remove() {
  const std::lock_guard lock(mutex_);
  if (--blocked_ == 0) changed_.notify_all();
}

bool BlockedStreams::any() {
  const std::lock_guard lock(mutex_);
  return blocked_ != 0;
}

NoneBlocked::NoneBlocked(int32_t device) : streams_(BlockedStreams::of(device)), holds_(true) {
  std::unique_lock lock(streams_.mutex_);
  streams_.changed_.wait(lock, [this] { return streams_.blocked_ == 0; });
  ++streams_.kept_free_;
}

NoneBlocked::NoneBlocked(int32_t device, std::chrono::milliseconds patience)
    : streams_(BlockedStreams::of(device)) {
  std::unique_lock lock(streams_.mutex_);
  holds_ = streams_.changed_.wait_for(lock, patience, [this] { return streams_.blocked_ == 0; });
  if (holds_) ++streams_.kept_free_;
}

NoneBlocked::~NoneBlocked() {
  if (!holds_) return;
  const std::lock_guard lock(streams_.mutex_);
  if (--streams_.kept_free_ == 0) streams_.changed_.notify_all();
}

}  // namespace sotto
