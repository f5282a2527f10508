// Calls about every FramedTransport::kTickMs, for pollers that look at the time in each pass.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/base/clock.h"

namespace sotto::framed {

class Ticks {
 public:
  // The clock outlives them.
  explicit Ticks(const Clock& clock) : clock_(clock) {}

  // A call per tick, until the handle is destroyed.
  [[nodiscard]] std::shared_ptr<void> add(std::function<void()> call);
  // Calls what is due.
  void run();
  // Microseconds that they may be left alone: INT64_MAX where there are none.
  int64_t interval_us() const;

 private:
  using Tick = std::function<void()>;

  const Clock& clock_;
  std::vector<std::weak_ptr<Tick>> ticks_;
  int64_t last_ns_ = 0;
};

}  // namespace sotto::framed
