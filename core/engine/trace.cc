#include "core/engine/trace.h"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>

#include "core/base/text.h"

namespace sotto {
namespace {

// Rows of a rank's part of the picture.
constexpr int32_t kTrainer = -1, kOperations = 0, kLanes = 1, kPeers = 100;

double microseconds(int64_t ns) { return static_cast<double>(ns) / 1000; }
// Also where it is longer than an int64_t is.
double microseconds_between(int64_t begin, int64_t end) {
  return static_cast<double>(static_cast<uint64_t>(end) - static_cast<uint64_t>(begin)) / 1000;
}

// As the inside of a JSON string.
std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : printable(text, 200)) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

}  // namespace

void Trace::step(int32_t rank, uint64_t op, const Step& step, int32_t peer, uint32_t lane,
                 int64_t begin, int64_t end) {
  if (events_.size() >= most_) {
    ++dropped_;
    return;
  }
  Event event;
  event.begin = begin;
  event.end = end;
  event.op = op;
  event.rank = rank;
  event.peer = peer;
  event.lane = static_cast<uint16_t>(lane);
  if (const KernelStep* kernel = step.kernel()) {
    event.kernel = kernel->id;
    if (!kernel->pieces.empty()) event.first = kernel->pieces.front().flat;
    for (const Piece& piece : kernel->pieces) event.size += piece.count;
  } else if (const CopyStep* copy = step.copy()) {
    event.kind = EventKind::kCopy;
    event.size = copy->source.bytes;
  } else if (const MessageStep* message = step.message()) {
    event.kind = message->is_send ? EventKind::kSend : EventKind::kReceive;
    event.size = message->data.bytes;
    event.round = message->round;
    event.segment = message->segment;
    event.stage = message->stage;
  }
  events_.push_back(event);
}

void Trace::operation(int32_t rank, uint64_t op, std::string text, int64_t begin, int64_t end) {
  if (operations_.size() >= most_) {
    ++dropped_;
    return;
  }
  operations_.push_back({begin, end, op, rank, std::move(text)});
}

void Trace::span(std::string_view name, int64_t begin, int64_t end) {
  const std::lock_guard lock(spans_mutex_);
  if (spans_.size() >= most_) {
    ++dropped_;
    return;
  }
  spans_.push_back({escaped(name), begin, end});
}

void Trace::add_spans(int32_t rank, std::map<int32_t, std::string>* rows, std::string* out) const {
  const std::lock_guard lock(spans_mutex_);
  if (!spans_.empty()) rows->emplace(kTrainer, "trainer");
  for (const Span& s : spans_) {
    *out += fmt::format(
        R"({{"ph": "X", "cat": "trainer", "name": "{}", "pid": {}, "tid": {}, "ts": {:.3f}, "dur": {:.3f}}},)"
        "\n",
        s.name, rank, kTrainer, microseconds(s.begin), microseconds_between(s.begin, s.end));
  }
}

std::string Trace::arguments(const Event& e) {
  std::string out = fmt::format(R"("operation": {})", e.op);
  if (e.kind == EventKind::kKernel) {
    if (e.size != 0) out += fmt::format(R"(, "first": {}, "elements": {})", e.first, e.size);
    return out;
  }
  if (e.size != 0) out += fmt::format(R"(, "bytes": {})", e.size);
  if (e.kind == EventKind::kCopy) return out;
  out += fmt::format(R"(, "peer": {}, "round": {}, "segment": {})", e.peer, e.round, e.segment);
  if (e.stage != Stage::kOther)
    out += fmt::format(R"(, "phase": {})", e.stage == Stage::kScatter ? 1 : 2);
  return out;
}

std::string Trace::json(int32_t rank) const {
  std::string out = "[\n";
  std::map<int32_t, std::string> rows = {{kOperations, "operations"}};
  add_spans(rank, &rows, &out);
  std::map<int32_t, int64_t> busy_until;  // of messages
  for (const Operation& o : operations_) {
    if (o.rank != rank) continue;
    for (const char* phase : {"b", "e"}) {
      out += fmt::format(
          R"({{"ph": "{}", "cat": "operation", "id2": {{"local": "{:#x}"}}, "name": "{}", "pid": {}, "tid": {}, "ts": {:.3f}}},)"
          "\n",
          phase, o.op, o.text, rank, kOperations, microseconds(*phase == 'b' ? o.begin : o.end));
    }
  }
  for (const Event& e : events_) {
    if (e.rank != rank) continue;
    const bool sends = e.kind == EventKind::kSend;
    const bool message = sends || e.kind == EventKind::kReceive;
    const int32_t row = message ? kPeers + 2 * e.peer + (sends ? 0 : 1) : kLanes + e.lane;
    const char* name = message                      ? (sends ? "send" : "recv")
                       : e.kind == EventKind::kCopy ? "copy"
                                                    : kernel_name(e.kernel);
    if (rows.find(row) == rows.end()) {
      rows[row] = message ? fmt::format("{} rank {}", sends ? "to" : "from", e.peer)
                          : fmt::format("kernels, lane {}", e.lane);
    }
    const int64_t begin = message ? std::max(e.begin, busy_until[row]) : e.begin;
    if (message) busy_until[row] = e.end;
    out += fmt::format(
        R"({{"ph": "X", "name": "{}", "pid": {}, "tid": {}, "ts": {:.3f}, "dur": {:.3f}, "args": {{{})",
        name, rank, row, microseconds(begin), microseconds(e.end - begin), arguments(e));
    if (message) out += fmt::format(R"(, "waited_us": {:.3f})", microseconds(begin - e.begin));
    out += "}},\n";
  }
  for (const auto& [row, name] : rows) {
    out += fmt::format(
        R"({{"ph": "M", "name": "thread_name", "pid": {0}, "tid": {1}, "args": {{"name": "{2}"}}}},)"
        "\n"
        R"({{"ph": "M", "name": "thread_sort_index", "pid": {0}, "tid": {1}, "args": {{"sort_index": {1}}}}},)"
        "\n",
        rank, row, name);
  }
  out += fmt::format(
      R"({{"ph": "M", "name": "process_name", "pid": {}, "args": {{"name": "rank {}{}"}}}})"
      "\n]\n",
      rank, rank, dropped_ == 0 ? "" : fmt::format(" ({} later events left out)", dropped_.load()));
  return out;
}

Status Trace::write() const {
  std::set<int32_t> ranks;
  for (const Event& e : events_) ranks.insert(e.rank);
  for (const Operation& o : operations_) ranks.insert(o.rank);
  for (const int32_t rank : ranks) {
    const std::string path = fmt::format("{}.rank{}.json", prefix_, rank);
    const std::string text = json(rank);
    std::FILE* file = std::fopen(path.c_str(), "w");
    bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
    if (file != nullptr) written = std::fclose(file) == 0 && written;
    if (!written)
      return error(Code::kTransport, "SOTTO_TRACE: cannot write {}: {}", path,
                   std::strerror(errno));
  }
  return ok_status();
}

}  // namespace sotto
