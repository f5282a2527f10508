#include "transports/framed/ticks.h"

#include "transports/framed/framed_transport.h"

namespace sotto::framed {
namespace {

constexpr int64_t kTickUs = FramedTransport::kTickMs * 1000;

}  // namespace

std::shared_ptr<void> Ticks::add(std::function<void()> call) {
  auto tick = std::make_shared<Tick>(std::move(call));
  ticks_.emplace_back(tick);
  return tick;
}

int64_t Ticks::interval_us() const { return ticks_.empty() ? INT64_MAX : kTickUs; }

void Ticks::run() {
  if (ticks_.empty()) return;
  const int64_t now = clock_.now_ns();
  if (now - last_ns_ < kTickUs * 1000) return;
  last_ns_ = now;
  std::erase_if(ticks_, [](const auto& tick) { return tick.expired(); });
  for (size_t i = 0; i < ticks_.size(); ++i) {
    if (const auto tick = ticks_[i].lock()) (*tick)();
  }
}

}  // namespace sotto::framed
