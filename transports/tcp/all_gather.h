// The all-gathers of a group over its control connections, one at a time: members send their parts
// to the coordinator, which answers with all of them.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/iface/rendezvous.h"
#include "core/wire/control.h"
#include "transports/tcp/control_peers.h"

namespace sotto::tcp {

class AllGather {
 public:
  explicit AllGather(ControlPeers& peers);

  // Where a cause is returned the group has to fail with it.

  // Begins the next one. what: names the call.
  std::optional<FailureCause> begin(std::string_view what, std::string_view mine);
  // The part of a rank, on the coordinator.
  std::optional<FailureCause> contribute(int32_t from, wire::Gather part);
  // A rank has left, on the coordinator.
  std::optional<FailureCause> on_left(int32_t rank) const;
  // The coordinator's answer, on a member.
  Status on_answer(wire::Bytes payload);
  // The coordinator's word of the ranks that it waits for, on a member.
  void on_waiting(std::string ranks) { told_waiting_ = std::move(ranks); }

  // "ranks 1, 3": those that the one in progress waits for, as far as this rank knows.
  std::string waiting() const;
  // Sends the ranks that have come the ones that are waited for, when these are others than in the
  // last report. Of the coordinator.
  void report_missing();

  bool complete() const { return gathered_.has_value(); }
  // The parts of all ranks, once it is complete.
  std::vector<std::string> take() { return std::exchange(gathered_, std::nullopt).value(); }

 private:
  void finish();
  std::string missing() const;

  ControlPeers& peers_;
  uint64_t sequence_ = 0;  // of the next one
  std::optional<std::vector<std::string>> gathered_;
  std::string told_waiting_;
  // Coordinator: the one in progress.
  std::string what_;
  int32_t what_rank_ = -1;  // the first rank that came, whose name for it what_ is
  std::vector<std::optional<std::string>> parts_;
  int32_t present_ = 0;
  std::string reported_missing_;
};

}  // namespace sotto::tcp
