#include "tests/support/ranks.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

namespace sotto::test {
namespace {

using Time = std::chrono::system_clock;  // condition variables on it are known to the thread
                                         // sanitizer of GCC 12

struct Run {
  std::mutex mutex;
  std::condition_variable ended;
  std::vector<bool> running;
  int left = 0;
  std::string first_failure;

  void end(int rank, const std::string& failure) {
    std::lock_guard lock(mutex);
    running[static_cast<size_t>(rank)] = false;
    --left;
    if (!failure.empty() && first_failure.empty())
      first_failure = fmt::format("rank {}: {}", rank, failure);
    ended.notify_all();
  }
};

std::string failure_of(const std::function<void(int)>& body, int rank) noexcept {
  try {
    body(rank);
    return "";
  } catch (const std::exception& e) {
    return *e.what() != 0 ? e.what() : "failed without a text";
  } catch (...) {
    return "threw something that is no std::exception";
  }
}

[[noreturn]] void give_up(const Run& run, int64_t timeout_ms) {
  std::string list;
  for (size_t i = 0; i < run.running.size(); ++i) {
    if (run.running[i]) list += fmt::format(" {}", i);
  }
  std::fprintf(stderr, "run_ranks: still running after %lld ms: ranks%s\nfirst failure: %s\n",
               static_cast<long long>(timeout_ms), list.c_str(),
               run.first_failure.empty() ? "none" : run.first_failure.c_str());
  std::fflush(nullptr);
  std::_Exit(3);
}

}  // namespace

void check(const Status& status, std::string_view what) {
  if (status.ok()) return;
  throw RankError(fmt::format("{}{}{}: {}", what, what.empty() ? "" : ": ",
                              code_name(status.code()), status.text()));
}

void require(bool condition, std::string_view text) {
  if (!condition) throw RankError(std::string(text));
}

std::string run_ranks(int size, const std::function<void(int rank)>& body, int64_t timeout_ms) {
  Run run;
  run.running.assign(static_cast<size_t>(size), true);
  run.left = size;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&run, &body, rank] { run.end(rank, failure_of(body, rank)); });
  }
  {
    std::unique_lock lock(run.mutex);
    const auto end = Time::now() + std::chrono::milliseconds(timeout_ms);
    while (run.left != 0) {
      if (run.ended.wait_until(lock, end) == std::cv_status::timeout && run.left != 0)
        give_up(run, timeout_ms);
    }
  }
  for (std::thread& t : threads) t.join();
  return run.first_failure;
}

struct RankBarrier::State {
  std::mutex mutex;
  std::condition_variable changed;
  int size = 0;
  int64_t timeout_ms = 0;
  int here = 0;
  uint64_t round = 0;
  bool broken = false;
};

RankBarrier::RankBarrier(int size, int64_t timeout_ms) : state_(std::make_unique<State>()) {
  state_->size = size;
  state_->timeout_ms = timeout_ms;
}

RankBarrier::~RankBarrier() = default;

void RankBarrier::wait() {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  const uint64_t round = s.round;
  if (++s.here == s.size) {
    s.here = 0;
    ++s.round;
    s.changed.notify_all();
    return;
  }
  const auto end = Time::now() + std::chrono::milliseconds(s.timeout_ms);
  while (s.round == round && !s.broken) {
    if (s.changed.wait_until(lock, end) == std::cv_status::timeout) s.broken = true;
  }
  if (s.round == round) {
    s.changed.notify_all();
    throw RankError(fmt::format("barrier {}: only {} of {} ranks came", round, s.here, s.size));
  }
}

void RankBarrier::break_off() {
  std::lock_guard lock(state_->mutex);
  state_->broken = true;
  state_->changed.notify_all();
}

}  // namespace sotto::test
