// Signs of life between the ranks of a group: heartbeats, and how long each rank has been silent.
//
// The coordinator hears of all ranks, and its heartbeats tell the others what it has heard. Time in
// which this process itself did not run is no silence of others.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/clock.h"
#include "core/wire/control.h"
#include "transports/tcp/all_gather.h"
#include "transports/tcp/control_peers.h"

namespace sotto::tcp {

inline int64_t ms_between(int64_t from_ns, int64_t to_ns) { return (to_ns - from_ns) / 1'000'000; }

class SignsOfLife {
 public:
  // gather: whose missing ranks the coordinator's heartbeats tell.
  SignsOfLife(ControlPeers& peers, const AllGather& gather, const Clock& clock,
              int64_t heartbeat_ms);

  // Longest silence; 0: no limit. Four heartbeats fit into it.
  void set_limit(int64_t limit_ms);
  int64_t limit_ms() const { return limit_ms_; }
  // Earlier silence does not count.
  void restart() { awake_since_ns_ = clock_.now_ns(); }
  // Time between calls of tick. Tells this object that the process runs.
  int64_t tick_ms() const;
  void tick();

  // Sends heartbeats if these are due. True if they were.
  bool beat();
  // Sends heartbeats now, so that the others answer.
  void ask();
  // A heartbeat of the coordinator, on a member, which answers it: it may be an inquiry.
  void on_word(wire::Heartbeat word);

  // Time since the last sign of life of a rank, as far as this rank knows.
  int64_t silent_ms(int32_t rank) const;
  // The ranks that were silent for longer than the limit, once the group is set up. Members look at
  // the coordinator alone, which has half as long again: its decision comes first if only the
  // connection to it is silent.
  std::vector<int32_t> overdue() const;

 private:
  int64_t counted_ms(int32_t rank) const;

  ControlPeers& peers_;
  const AllGather& gather_;
  const Clock& clock_;
  int64_t heartbeat_ms_;
  int64_t limit_ms_ = 0;
  int64_t last_beat_ns_;
  int64_t last_tick_ns_;
  int64_t awake_since_ns_;             // end of the last time in which this process did not run
  std::vector<uint32_t> told_silent_;  // member: the coordinator's last word, by rank
  int64_t told_ns_ = 0;
};

}  // namespace sotto::tcp
