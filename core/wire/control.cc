#include "core/wire/control.h"

#include "core/base/text.h"
#include "core/wire/bytes.h"

namespace sotto::wire {
namespace {

Status malformed(const char* kind, uint64_t bytes) {
  return error(Code::kProtocol, "malformed {} frame of {}", kind, counted(bytes, "byte"));
}

// Reads a list whose entries take at least `entry_bytes` each: a count that cannot fit is refused
// before anything is allocated for it.
template <class Entry, class Read>
bool read_list(ByteReader& in, uint64_t entry_bytes, std::vector<Entry>& out, Read read) {
  const uint32_t count = in.number<uint32_t>();
  if (!in.ok() || count > in.left() / entry_bytes) return false;
  out.reserve(count);
  for (uint32_t i = 0; i < count && in.ok(); ++i) out.push_back(read(in));
  return in.ok();
}

}  // namespace

std::string Join::encode() const {
  ByteWriter out;
  out.number(token);
  out.number(rank);
  out.number(size);
  out.number(pid);
  out.text(cut_text(host, kMaxHostBytes));
  return out.take();
}

Result<Join> Join::decode(Bytes bytes) {
  ByteReader in(bytes);
  Join m;
  m.token = in.number<uint64_t>();
  m.rank = in.number<int32_t>();
  m.size = in.number<int32_t>();
  m.pid = in.number<uint32_t>();
  m.host = in.text();
  if (!in.finished() || m.host.size() > kMaxHostBytes) return malformed("join", bytes.size());
  return m;
}

std::string Members::encode() const {
  ByteWriter out;
  out.number(coordinator);
  out.number(token);
  out.number(static_cast<uint32_t>(members.size()));
  for (const Member& m : members) {
    out.number(m.pid);
    out.text(m.host);
    out.text(m.address);
  }
  return out.take();
}

Result<Members> Members::decode(Bytes bytes) {
  ByteReader in(bytes);
  Members m;
  m.coordinator = in.number<int32_t>();
  m.token = in.number<uint64_t>();
  bool fits = true;
  const bool read = read_list(in, 12, m.members, [&fits](ByteReader& r) {
    Member member;
    member.pid = r.number<uint32_t>();
    member.host = r.text();
    member.address = r.text();
    fits = fits && member.host.size() <= kMaxHostBytes && member.address.size() <= kMaxHostBytes;
    return member;
  });
  if (!read || !fits || !in.finished()) return malformed("members", bytes.size());
  return m;
}

std::string Gather::encode() const {
  ByteWriter out;
  out.number(sequence);
  out.text(what);
  out.text(data);
  return out.take();
}

Result<Gather> Gather::decode(Bytes bytes) {
  ByteReader in(bytes);
  Gather m;
  m.sequence = in.number<uint64_t>();
  m.what = in.text();
  m.data = in.text();
  if (!in.finished()) return malformed("gather", bytes.size());
  return m;
}

std::string Gathered::encode() const {
  ByteWriter out;
  out.number(sequence);
  out.number(static_cast<uint32_t>(data.size()));
  for (const std::string& blob : data) out.text(blob);
  return out.take();
}

Result<Gathered> Gathered::decode(Bytes bytes) {
  ByteReader in(bytes);
  Gathered m;
  m.sequence = in.number<uint64_t>();
  const bool read = read_list(in, 4, m.data, [](ByteReader& r) { return std::string(r.text()); });
  if (!read || !in.finished()) return malformed("gathered", bytes.size());
  return m;
}

std::string Failure::encode() const {
  ByteWriter out;
  out.number(code);
  out.number(rank);
  out.text(cut_text(text, kMaxTextBytes));
  if (reporter >= 0) {
    out.number(reporter);
    out.text(cut_text(waits, kMaxTextBytes));
  }
  return out.take();
}

Result<Failure> Failure::decode(Bytes bytes) {
  ByteReader in(bytes);
  Failure m;
  m.code = in.number<int32_t>();
  m.rank = in.number<int32_t>();
  m.text = in.text();
  bool sound = true;
  if (in.ok() && in.left() > 0) {
    m.reporter = in.number<int32_t>();
    m.waits = in.text();
    sound = m.reporter >= 0 && m.waits.size() <= kMaxTextBytes;
  }
  // Only codes of this library that are failures.
  const bool known = m.code < 0 && code_name(static_cast<Code>(m.code)) != "UNKNOWN";
  if (!in.finished() || !known || !sound || m.text.size() > kMaxTextBytes)
    return malformed("failure", bytes.size());
  return m;
}

std::string Heartbeat::encode() const {
  ByteWriter out;
  out.text(cut_text(waiting, kMaxTextBytes));
  out.number(static_cast<uint32_t>(silent_ms.size()));
  for (const uint32_t ms : silent_ms) out.number(ms);
  return out.take();
}

Result<Heartbeat> Heartbeat::decode(Bytes bytes) {
  ByteReader in(bytes);
  Heartbeat m;
  m.waiting = in.text();
  const bool read =
      read_list(in, 4, m.silent_ms, [](ByteReader& r) { return r.number<uint32_t>(); });
  if (!read || !in.finished() || m.waiting.size() > kMaxTextBytes)
    return malformed("heartbeat", bytes.size());
  return m;
}

std::string Service::encode() const {
  ByteWriter out;
  out.number(message.source);
  out.number(message.destination);
  out.number(message.channel);
  out.text(message.bytes);
  return out.take();
}

Result<Service> Service::decode(Bytes bytes) {
  ByteReader in(bytes);
  ServiceMessage m;
  m.source = in.number<int32_t>();
  m.destination = in.number<int32_t>();
  m.channel = in.number<uint32_t>();
  m.bytes = in.text();
  if (!in.finished() || m.bytes.size() > kMaxServiceBytes)
    return malformed("service", bytes.size());
  return Service{std::move(m)};
}

std::string Hello::encode() const {
  ByteWriter out;
  out.number(token);
  out.number(rank);
  out.number(size);
  return out.take();
}

Result<Hello> Hello::decode(Bytes bytes) {
  ByteReader in(bytes);
  Hello m;
  m.token = in.number<uint64_t>();
  m.rank = in.number<int32_t>();
  m.size = in.number<int32_t>();
  if (!in.finished()) return malformed("hello", bytes.size());
  return m;
}

}  // namespace sotto::wire
