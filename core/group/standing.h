// How far the operations of other ranks are, for the report of a group that does not go on. Ranks
// ask each other by service messages; nothing waits for an answer.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/base/clock.h"
#include "core/engine/op.h"
#include "core/iface/rendezvous.h"

namespace sotto {

// What a rank last said of a comm.
struct RankStanding {
  uint64_t completed = 0;  // operations
  uint64_t in_flight = 0;
  int64_t at_ns = 0;  // when it came
};

// One for a root comm and its splits.
class Standing final : public ServiceListener {
 public:
  // Answers from now on, by the clock of the driver. Driver, once.
  void attach(ControlPlane& control, const Clock& clock);
  void detach();  // driver
  // What this rank answers about a comm. Threads: any.
  void add(uint64_t epoch, std::shared_ptr<const OpTotals> totals);
  // The comm has ended here. Driver.
  void remove(uint64_t epoch);
  // What the rank of the root comm last said about the comm, if anything. Asks it again, unless it
  // was asked within the last second and has not answered. Driver.
  std::optional<RankStanding> ask(uint64_t epoch, int32_t rank);

 private:
  void on_service(int32_t from, std::string_view bytes) noexcept override;

  struct Peer {
    int64_t asked_ns = 0;  // of the question without an answer; 0: there is none
    std::optional<RankStanding> last;
  };
  ControlPlane* control_ = nullptr;
  const Clock* clock_ = nullptr;
  // By epoch and rank: those that were asked.
  std::map<std::pair<uint64_t, int32_t>, Peer> peers_;
  std::mutex mutex_;                                                      // guards totals_
  std::unordered_map<uint64_t, std::shared_ptr<const OpTotals>> totals_;  // by epoch
};

}  // namespace sotto
