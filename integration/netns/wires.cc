#include "integration/netns/wires.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "integration/netns/frame.h"

namespace sotto_netns {
namespace {

// On one delay line, and in a queue whose link has no limit: 0.5 s at 1 Gbit/s.
constexpr uint64_t kLineBytes = uint64_t{64} << 20;

std::optional<Address> destination(const uint8_t* packet, size_t bytes) {
  constexpr size_t kIpv4Header = 20, kIpv4Destination = 16;
  constexpr size_t kIpv6Header = 40, kIpv6Destination = 24;
  Address address{};
  const int version = bytes > 0 ? packet[0] >> 4 : 0;
  if (version == 4 && bytes >= kIpv4Header) {
    address[10] = address[11] = 0xff;
    std::memcpy(address.data() + 12, packet + kIpv4Destination, 4);
    return address;
  }
  if (version == 6 && bytes >= kIpv6Header) {
    std::memcpy(address.data(), packet + kIpv6Destination, address.size());
    return address;
  }
  return std::nullopt;
}

void sooner(int64_t* next, int64_t due) {
  if (*next < 0 || due < *next) *next = due;
}

}  // namespace

bool Wires::Queue::push(Sent&& sent, uint64_t limit) {
  if (bytes + sent.wire_bytes > limit) return false;
  bytes += sent.wire_bytes;
  frames.push_back(std::move(sent));
  return true;
}

Wires::Sent Wires::Queue::pop() {
  Sent sent = std::move(frames.front());
  frames.pop_front();
  bytes -= sent.wire_bytes;
  return sent;
}

int64_t Wires::Bucket::take(uint64_t bytes, const WireSettings& settings, int64_t now) {
  if (settings.bits_per_second <= 0) return 0;
  const double bytes_per_ns = settings.bits_per_second / 8e9;
  const double most = static_cast<double>(settings.burst_bytes);
  tokens = std::min(most, tokens + static_cast<double>(now - filled) * bytes_per_ns);
  filled = now;
  // A packet that is larger than the bucket passes when the bucket is full.
  const double missing = std::min(static_cast<double>(bytes), most) - tokens;
  if (missing > 0) return static_cast<int64_t>(std::ceil(missing / bytes_per_ns)) + 1;
  tokens -= static_cast<double>(bytes);
  return 0;
}

void Wires::add_host(const std::vector<Address>& addresses) {
  const size_t index = hosts_.size();
  std::seed_seq seed{static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32),
                     static_cast<uint32_t>(index)};
  hosts_.emplace_back();
  hosts_.back().random.seed(seed);
  for (const Address& address : addresses) host_of_[address] = index;
}

void Wires::set(const WireSettings& settings, int64_t now) {
  for (Host& host : hosts_) {
    for (Bucket* bucket : {&host.up_bucket, &host.down_bucket}) {
      if (settings_.bits_per_second > 0) {
        bucket->take(0, settings_, now);  // what has flowed in at the old rate
      } else {
        *bucket = {static_cast<double>(settings.burst_bytes), now};
      }
    }
  }
  settings_ = settings;
}

void Wires::part(const std::vector<bool>& is_apart) {
  for (size_t i = 0; i < hosts_.size(); ++i) hosts_[i].apart = i < is_apart.size() && is_apart[i];
}

uint64_t Wires::queue_limit() const {
  return settings_.bits_per_second > 0 ? settings_.queue_bytes : kLineBytes;
}

bool Wires::parted(const Sent& sent) const {
  return hosts_[sent.from].apart != hosts_[sent.to].apart;
}

void Wires::send(size_t from, const uint8_t* frame, size_t bytes) {
  const std::optional<Frame> parsed = parse_frame(frame, bytes);
  const auto to = parsed ? destination(parsed->ip(), parsed->ip_size()) : std::nullopt;
  const auto found = to ? host_of_.find(*to) : host_of_.end();
  if (found == host_of_.end()) {
    ++counters_.unknown;
    return;
  }
  Sent sent{{frame, frame + bytes}, parsed->packets, parsed->wire_bytes, from, found->second, 0};
  Host& host = hosts_[from];
  constexpr uint64_t kMillion = 1'000'000;
  if (parted(sent)) {
    counters_.cut += parsed->packets;
  } else if (settings_.loss_ppm > 0 && host.random() % kMillion < settings_.loss_ppm) {
    counters_.lost += parsed->packets;
  } else if (!host.up.push(std::move(sent), queue_limit())) {
    counters_.queue_full += parsed->packets;
  }
}

void Wires::onto_line(Host& host, int64_t now, int64_t* next) {
  while (!host.up.frames.empty()) {
    const uint64_t bytes = host.up.frames.front().wire_bytes;
    if (const int64_t wait = host.up_bucket.take(bytes, settings_, now); wait > 0) {
      sooner(next, now + wait);
      return;
    }
    Sent sent = host.up.pop();
    const uint64_t packets = sent.packets;
    sent.due = now + settings_.delay_ns;
    // A delay that has become shorter lets nothing overtake.
    if (!host.line.frames.empty()) sent.due = std::max(sent.due, host.line.frames.back().due);
    if (!host.line.push(std::move(sent), kLineBytes)) counters_.queue_full += packets;
  }
}

void Wires::off_line(Host& host, int64_t now, int64_t* next) {
  while (!host.line.frames.empty()) {
    if (host.line.frames.front().due > now) {
      sooner(next, host.line.frames.front().due);
      return;
    }
    Sent sent = host.line.pop();
    const uint64_t packets = sent.packets;
    Host& receiver = hosts_[sent.to];
    if (parted(sent)) {
      counters_.cut += packets;
    } else if (!receiver.down.push(std::move(sent), queue_limit())) {
      counters_.queue_full += packets;
    }
  }
}

void Wires::arrive(size_t index, int64_t now, int64_t* next, const Deliver& deliver) {
  Host& host = hosts_[index];
  while (!host.down.frames.empty()) {
    const uint64_t bytes = host.down.frames.front().wire_bytes;
    if (const int64_t wait = host.down_bucket.take(bytes, settings_, now); wait > 0) {
      sooner(next, now + wait);
      return;
    }
    const Sent sent = host.down.pop();
    if (parted(sent)) {
      counters_.cut += sent.packets;
      continue;
    }
    counters_.delivered += sent.packets;
    deliver(index, sent.frame.data(), sent.frame.size());
  }
}

int64_t Wires::advance(int64_t now, const Deliver& deliver) {
  int64_t next = -1;
  for (Host& host : hosts_) {
    onto_line(host, now, &next);
    off_line(host, now, &next);
  }
  for (size_t i = 0; i < hosts_.size(); ++i) arrive(i, now, &next, deliver);
  return next;
}

}  // namespace sotto_netns
