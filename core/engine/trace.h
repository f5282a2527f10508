// A time line of operations, kernels and messages, written as a Chrome trace (JSON, one file per
// rank), which Perfetto and chrome://tracing open. Times are those of the engine's clock, so the
// files of ranks on one machine fit together.
//
// Kernels of synchronous devices are shown as they execute, those of others from their issue to
// their end. Messages of one peer and direction follow each other on the wire; a message is shown
// from the end of the one before it, or from when the engine handed it over if that was later. They
// have the phase of a reduction that they belong to (1: to the rank that adds up, 2: results to
// all) and the number of their segment, kernels the elements of the flat space that they work on:
// what tests/perf/net/timeline.py adds up.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/plan/plan.h"

namespace sotto {

class Trace {
 public:
  // Files are <prefix>.rank<R>.json. Beyond so many events of a kind they are counted and not kept;
  // steps then have 64 MiB.
  explicit Trace(std::string prefix, size_t most = 1 << 20)
      : prefix_(std::move(prefix)), most_(most) {}

  // A step of operation number `op` on `rank`, from begin to end in nanoseconds: a message from or
  // to `peer` of the root comm, or a call of `lane`.
  void step(int32_t rank, uint64_t op, const Step& step, int32_t peer, uint32_t lane, int64_t begin,
            int64_t end);
  // A whole operation; text: what it is.
  void operation(int32_t rank, uint64_t op, std::string text, int64_t begin, int64_t end);

  // Something of the trainer's own, in the files of all ranks. Threads: any.
  void span(std::string_view name, int64_t begin, int64_t end);

  // One file per rank with events.
  Status write() const;

 private:
  enum class EventKind : uint8_t { kKernel, kCopy, kSend, kReceive };
  struct Event {
    int64_t begin = 0, end = 0;
    uint64_t op = 0;
    uint64_t size = 0;   // bytes; of a kernel: elements
    uint64_t first = 0;  // of a kernel: its first element in the flat space
    int32_t rank = 0, peer = -1;
    uint32_t round = 0, segment = 0;  // of messages
    KernelId kernel = KernelId::kFill;
    EventKind kind = EventKind::kKernel;
    Stage stage = Stage::kOther;
    uint16_t lane = 0;
  };
  static_assert(sizeof(Event) <= 64);
  struct Operation {
    int64_t begin, end;
    uint64_t op;
    int32_t rank;
    std::string text;
  };
  struct Span {
    std::string name;
    int64_t begin, end;
  };
  std::string json(int32_t rank) const;
  // Of the trainer: a row, and events in it.
  void add_spans(int32_t rank, std::map<int32_t, std::string>* rows, std::string* out) const;
  static std::string arguments(const Event& event);

  std::string prefix_;
  size_t most_;
  std::vector<Event> events_;
  std::vector<Operation> operations_;
  std::atomic<uint64_t> dropped_ = 0;
  mutable std::mutex spans_mutex_;
  std::vector<Span> spans_;
};

}  // namespace sotto
