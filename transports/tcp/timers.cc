#include "transports/tcp/timers.h"

#include <algorithm>
#include <utility>

namespace sotto::tcp {
namespace {

constexpr int64_t kNsPerMs = 1'000'000;

}  // namespace

Timers::Timer Timers::after(int64_t ms, std::function<void()> call) {
  return start(ms * kNsPerMs, 0, std::move(call));
}

// A period of 0 would keep run() from ending.
Timers::Timer Timers::every(int64_t ms, std::function<void()> call) {
  const int64_t period_ns = std::max<int64_t>(1, ms) * kNsPerMs;
  return start(period_ns, period_ns, std::move(call));
}

Timers::Timer Timers::start(int64_t in_ns, int64_t period_ns, std::function<void()> call) {
  auto started = std::make_shared<Call>(Call{period_ns, std::move(call)});
  push({clock_.now_ns() + in_ns, started});
  return started;
}

void Timers::push(Due due) {
  due_.push_back(std::move(due));
  std::push_heap(due_.begin(), due_.end(), Due::later);
}

bool Timers::run(int64_t now_ns) {
  bool ran = false;
  while (next_ns() <= now_ns) {
    std::pop_heap(due_.begin(), due_.end(), Due::later);
    const std::weak_ptr<Call> next = std::move(due_.back().call);
    due_.pop_back();
    const std::shared_ptr<Call> one = next.lock();
    if (!one) continue;
    if (one->period_ns > 0) push({now_ns + one->period_ns, one});
    one->call();
    ran = true;
  }
  return ran;
}

}  // namespace sotto::tcp
