#include "tests/emulation/cuda/contexts.h"

#include <chrono>
#include <thread>

#include "tests/emulation/cuda/state.h"
#include "tests/emulation/cuda/sync_model.h"

namespace sotto::fake_cuda {
namespace {

using std::chrono::steady_clock;

std::string busy_streams(const std::vector<Ref<Stream>>& streams) {
  std::string text;
  for (const auto& stream : streams) {
    if (!stream->busy()) continue;
    text += (text.empty() ? "stream " : ", ") + std::to_string(stream->number()) +
            (stream->waits() ? " (in a wait)" : "");
  }
  return text;
}

}  // namespace

Contexts& contexts_of_devices() {
  static Contexts* const instance = new Contexts;  // never destroyed, as State
  return *instance;
}

std::mutex& Contexts::lock_of(int device) {
  std::lock_guard lock(mutex_);
  return locks_[device];
}

void Contexts::pass(int device) {
  Quiet quiet;
  std::lock_guard lock(lock_of(device));
}

void Contexts::wait_locked(int device, const std::vector<Ref<Stream>>& streams,
                           const std::string& call) {
  Quiet quiet;
  std::lock_guard lock(lock_of(device));
  const auto end = steady_clock::now() + std::chrono::milliseconds(state().options.deadlock_ms);
  for (const auto& stream : streams) {
    while (stream->busy()) {
      if (steady_clock::now() > end) {
        misuse(call + " waits with the context's lock for device " + std::to_string(device) +
               ", where after " + std::to_string(state().options.deadlock_ms) +
               " ms there is work left: a deadlock with " + busy_streams(streams));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

}  // namespace sotto::fake_cuda
