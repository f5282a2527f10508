#include "core/group/process_manager.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <mutex>
#include <optional>

#include "core/base/text.h"

namespace sotto {
namespace {

constexpr std::string_view kId = "id-", kFailed = "no-";
// Managers take short values alone; an id has 256 digits.
constexpr size_t kMostFailureText = 160;

// What this process has opened.
struct Session {
  std::unique_ptr<ProcessManager> manager;
  pid_t owner = getpid();
  uint64_t published = 0;
  Status failure;
};

template <class Bytes>
std::string hex(const Bytes& bytes) {
  std::string text;
  for (const auto byte : bytes) text += fmt::format("{:02x}", static_cast<uint8_t>(byte));
  return text;
}

std::optional<std::string> bytes_of(std::string_view digits) {
  std::string bytes;
  for (size_t i = 0; i + 2 <= digits.size(); i += 2) {
    uint8_t byte = 0;
    const char* const end = digits.data() + i + 2;
    const auto [stop, failed] = std::from_chars(digits.data() + i, end, byte, 16);
    if (failed != std::errc() || stop != end) return std::nullopt;
    bytes += static_cast<char>(byte);
  }
  return 2 * bytes.size() == digits.size() ? std::optional(bytes) : std::nullopt;
}

std::string text_of(const Result<UniqueId>& made) {
  if (made.ok()) return std::string(kId) + hex(*made);
  return std::string(kFailed) + hex(made.status().text().substr(0, kMostFailureText));
}

Result<UniqueId> id_of(const std::string& text, const std::string& place, const std::string& key) {
  const std::string_view all = text;
  const auto bytes = bytes_of(all.substr(std::min(kId.size(), all.size())));
  if (bytes && all.starts_with(kFailed))
    return error(Code::kTransport, "rank 0 has no place to meet: {}", printable(*bytes, 200));
  UniqueId id{};
  if (!bytes || !all.starts_with(kId) || bytes->size() != id.size()) {
    return error(Code::kProtocol, "{}: \"{}\" under the key {}; expected: the unique id of rank 0",
                 place, printable(text), key);
  }
  std::ranges::copy(*bytes, id.begin());
  return id;
}

// The connection may stand in the middle of a dialogue after a failure, so it stays closed to
// further ones.
Result<std::string> publish(const ManagerPlace& place, Session& session, const std::string& key,
                            const std::string& mine, Deadline deadline) {
  if (session.manager == nullptr) {
    SOTTO_ASSIGN(session.manager, place.open(deadline));
  }
  return session.manager->publish(key, mine, deadline);
}

}  // namespace

Result<UniqueId> meet(const ManagerPlace& place, int32_t rank,
                      const std::function<Result<UniqueId>()>& make, Deadline deadline) {
  static std::mutex one_at_a_time;
  static std::map<std::string, Session> sessions;
  const std::unique_lock lock(one_at_a_time, std::try_to_lock);
  if (!lock.owns_lock()) {
    return invalid_state(
        "rank {}: another thread of this process is making a comm through {}; comms that meet so "
        "are made one after the other, in one order on all ranks",
        rank, place.name);
  }
  Session& session = sessions[place.name];
  if (session.owner != getpid()) {
    return invalid_state("rank {}: {} belongs to process {}, from which this one was forked", rank,
                         place.name, session.owner);
  }
  if (!session.failure.ok()) {
    return invalid_state("rank {}: {} is not used again after its first failure: {}", rank,
                         place.name, session.failure.text());
  }
  const std::string key = fmt::format("sotto-{}", session.published++);
  Result<UniqueId> made = UniqueId{};
  if (rank == 0) made = make();
  const Result<std::string> text =
      publish(place, session, key, rank == 0 ? text_of(made) : "", deadline);
  session.failure = text.status();
  SOTTO_TRY(made.status());
  if (!text.ok()) return text.status().with_prefix(fmt::format("rank {}", rank));
  if (rank == 0) return made;
  return id_of(*text, place.name, key);
}

}  // namespace sotto
