#include "transports/shm/handover.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>

#include "core/base/text.h"
#include "core/wire/bytes.h"
#include "transports/shm/unix_socket.h"

namespace sotto::shm {
namespace {

constexpr size_t kKeyBytes = 16;
constexpr size_t kMostMessageBytes = 256;
constexpr size_t kMostReasonBytes = 300;
// Connections that are no offers, at most.
constexpr size_t kMostStrangers = 1024;
constexpr std::string_view kTaken = "taken";

using Reasons = std::map<int32_t, std::string>;  // by rank; empty: none, it went well

wire::ByteReader reader_of(const std::string& text) {
  return wire::ByteReader({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
}

Result<std::string> random_bytes() {
  std::string bytes(kKeyBytes, '\0');
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    return error(Code::kTransport, "getrandom: {}", std::strerror(errno));
  return bytes;
}

// What all ranks know of one before the first offer.
struct Listening {
  std::string name;  // of its socket
  std::string key;   // what offers to it have to know
  framed::FlowLimits flow;
  std::string why_not;  // it does not listen

  std::string encode() const {
    wire::ByteWriter out;
    out.text(name);
    out.text(key);
    out.number(flow.eager_bytes);
    out.number(flow.credit_bytes);
    out.text(why_not);
    return out.take();
  }
  static std::optional<Listening> decode(const std::string& text) {
    wire::ByteReader in = reader_of(text);
    Listening record;
    record.name = in.text();
    record.key = in.text();
    record.flow.eager_bytes = in.number<uint64_t>();
    record.flow.credit_bytes = in.number<uint64_t>();
    record.why_not = printable(in.text(), kMostReasonBytes);
    if (!in.finished()) return {};
    return record;
  }
};

struct Offer {
  std::string key;
  int32_t rank = -1;
  uint64_t ring_bytes = 0;

  std::string encode() const {
    wire::ByteWriter out;
    out.text(key);
    out.number(rank);
    out.number(ring_bytes);
    return out.take();
  }
  static std::optional<Offer> decode(const std::string& text) {
    wire::ByteReader in = reader_of(text);
    Offer offer;
    offer.key = in.text();
    offer.rank = in.number<int32_t>();
    offer.ring_bytes = in.number<uint64_t>();
    const bool sound = std::has_single_bit(offer.ring_bytes) &&
                       offer.ring_bytes >= kLeastRingBytes && offer.ring_bytes <= kMostRingBytes;
    if (!in.finished() || !sound) return {};
    return offer;
  }
};

// A segment of two rings: first the one that the lower rank writes.
uint64_t segment_bytes(uint64_t ring_bytes) { return 2 * RingMemory::footprint(ring_bytes); }

PeerRings rings_of(Segment segment, uint64_t ring_bytes, bool lower, Descriptor bell, int32_t pid) {
  const RingMemory first = RingMemory::at(segment.data(), ring_bytes);
  const RingMemory second =
      RingMemory::at(segment.data() + RingMemory::footprint(ring_bytes), ring_bytes);
  return {std::move(segment), lower ? first : second, lower ? second : first, Bell(std::move(bell)),
          pid};
}

class Exchange {
 public:
  Exchange(ControlPlane& control, std::span<const int32_t> peers, const HandoverOptions& options,
           const Bell& bell, Driver& driver, Deadline deadline)
      : control_(control), options_(options), bell_(bell), driver_(driver), deadline_(deadline) {
    for (const int32_t peer : peers) {
      if (peer != control.rank()) peers_.push_back(peer);
    }
  }

  Result<Handover> run() {
    result_.flow = options_.flow;
    SOTTO_TRY(listen());
    Reasons offered;
    for (const int32_t peer : peers_) {
      if (peer > control_.rank()) offered[peer] = reason_of(offer(peer));
    }
    SOTTO_ASSIGN(const std::vector<Reasons> offers,
                 tell("shared memory: offers", std::move(offered)));
    take_offers();
    Reasons answered;
    for (const int32_t peer : peers_) {
      if (peer < control_.rank()) answered[peer] = answer(peer, said(offers, peer));
    }
    SOTTO_ASSIGN(const std::vector<Reasons> answers,
                 tell("shared memory: answers", std::move(answered)));
    for (const int32_t peer : peers_) {
      if (peer < control_.rank()) continue;
      const std::string why = said(answers, peer);
      if (why.empty()) {
        SOTTO_TRY(finish(peer));
      } else {
        result_.unlinked[peer] = why;
      }
    }
    return std::move(result_);
  }

 private:
  struct Offered {
    UnixSocket socket;
    Segment segment;
  };
  struct Arrived {
    UnixSocket socket;
    Offer offer;
    std::vector<Descriptor> descriptors;  // memory, bell
  };

  static std::string reason_of(const Status& status) {
    return status.ok() ? "" : printable(status.text(), kMostReasonBytes);
  }

  // Where offers to this rank arrive, and the same of all others.
  Status listen() {
    Listening own;
    own.flow = options_.flow;
    if (const Status opened = open(own); !opened.ok()) own.why_not = reason_of(opened);
    SOTTO_ASSIGN(const auto all,
                 control_.all_gather("shared memory: sockets", own.encode(), driver_, deadline_));
    for (size_t r = 0; r < all.size(); ++r) {
      const auto record = Listening::decode(all[r]);
      if (!record)
        return error(Code::kProtocol, "rank {} sent malformed set-up data of shared memory", r);
      result_.flow.eager_bytes = std::min(result_.flow.eager_bytes, record->flow.eager_bytes);
      result_.flow.credit_bytes = std::min(result_.flow.credit_bytes, record->flow.credit_bytes);
      listening_.push_back(*record);
    }
    return ok_status();
  }
  Status open(Listening& own) {
    const bool any_lower =
        std::ranges::any_of(peers_, [&](int32_t peer) { return peer < control_.rank(); });
    if (!any_lower) return ok_status();
    SOTTO_ASSIGN(const std::string name, random_bytes());
    SOTTO_ASSIGN(own.key, random_bytes());
    const auto* const bytes = reinterpret_cast<const uint8_t*>(name.data());
    own.name = fmt::format("sotto-{:016x}{:016x}", wire::get_at<uint64_t>(bytes),
                           wire::get_at<uint64_t>(bytes + 8));
    SOTTO_ASSIGN(UnixSocket socket, UnixSocket::listen(own.name, control_.size()));
    socket_ = std::move(socket);
    key_ = own.key;
    return ok_status();
  }

  Status offer(int32_t peer) {
    const Listening& there = listening_[static_cast<size_t>(peer)];
    if (!there.why_not.empty())
      return error(Code::kTransport, "rank {} cannot listen: {}", peer, there.why_not);
    const uint64_t bytes = segment_bytes(options_.ring_bytes);
    SOTTO_ASSIGN(UnixSocket socket, UnixSocket::connect(there.name));
    SOTTO_ASSIGN(const Descriptor memory, Segment::make(bytes));
    SOTTO_ASSIGN(Segment segment, Segment::map(memory, bytes));
    const Offer offer{there.key, control_.rank(), options_.ring_bytes};
    SOTTO_TRY(socket.send(offer.encode(), {memory.get(), bell_.descriptor()}));
    offered_.emplace(peer, Offered{std::move(socket), std::move(segment)});
    return ok_status();
  }

  // All that were made are there now. What does not know the key is closed. Others may go on to
  // connect, so the number is bounded.
  void take_offers() {
    for (size_t i = 0; socket_ && i < kMostStrangers + peers_.size(); ++i) {
      Result<std::optional<UnixSocket>> taken = socket_->accept();
      if (!taken.ok()) not_taken_ = taken.status();
      if (!taken.ok() || !taken->has_value()) return;
      std::optional<UnixSocket> came = taken.take();
      Result<UnixMessage> message = came->receive(kMostMessageBytes);
      if (!message.ok()) {
        not_taken_ = message.status();
        continue;
      }
      const auto offer = Offer::decode(message->bytes);
      if (!offer || offer->key != key_ || message->descriptors.size() != 2) continue;
      arrived_.insert_or_assign(offer->rank,
                                Arrived{std::move(*came), *offer, std::move(message->descriptors)});
    }
  }

  // The reason why the pair has no shared memory; empty: it has.
  std::string answer(int32_t peer, const std::string& why_not) {
    const Status taken = why_not.empty() ? take(peer) : Status(Code::kTransport, why_not);
    if (!taken.ok()) result_.unlinked[peer] = reason_of(taken);
    return reason_of(taken);
  }
  Status take(int32_t peer) {
    const auto found = arrived_.find(peer);
    if (found == arrived_.end()) {
      return error(Code::kTransport, "the offer of rank {} did not reach rank {}{}", peer,
                   control_.rank(), not_taken_.ok() ? "" : ": " + not_taken_.text());
    }
    Arrived& arrived = found->second;
    const uint64_t ring_bytes = arrived.offer.ring_bytes;
    SOTTO_ASSIGN(Segment segment, options_.map(arrived.descriptors[0], segment_bytes(ring_bytes)));
    SOTTO_TRY(arrived.socket.send(std::string(kTaken), {bell_.descriptor()}));
    result_.linked.emplace(
        peer, rings_of(std::move(segment), ring_bytes, false, std::move(arrived.descriptors[1]),
                       arrived.socket.peer_pid()));
    return ok_status();
  }

  // The higher rank has taken the offer, and relies on it.
  Status finish(int32_t peer) {
    const auto found = offered_.find(peer);
    if (found == offered_.end()) {
      return error(Code::kProtocol, "rank {} has taken shared memory that rank {} did not offer",
                   peer, control_.rank());
    }
    Offered offered = std::move(found->second);  // its socket is closed behind it
    offered_.erase(found);
    Result<UnixMessage> message = offered.socket.receive(kMostMessageBytes);
    SOTTO_TRY(message.status().with_prefix(
        fmt::format("rank {}: the answer of rank {}", control_.rank(), peer)));
    if (message->bytes != kTaken || message->descriptors.size() != 1) {
      return error(Code::kProtocol, "rank {} sent a malformed answer to an offer of shared memory",
                   peer);
    }
    result_.linked.emplace(peer,
                           rings_of(std::move(offered.segment), options_.ring_bytes, true,
                                    std::move(message->descriptors[0]), offered.socket.peer_pid()));
    return ok_status();
  }

  // Tells all ranks what came of this one's peers, and hears the same of them.
  Result<std::vector<Reasons>> tell(std::string_view what, const Reasons& own) {
    wire::ByteWriter out;
    out.number(static_cast<uint32_t>(own.size()));
    for (const auto& [peer, why] : own) {
      out.number(peer);
      out.text(why);
    }
    SOTTO_ASSIGN(const auto all, control_.all_gather(what, out.take(), driver_, deadline_));
    std::vector<Reasons> reasons(all.size());
    for (size_t r = 0; r < all.size(); ++r) {
      wire::ByteReader in = reader_of(all[r]);
      const uint32_t count = in.number<uint32_t>();
      for (uint32_t i = 0; i < count && in.ok(); ++i) {
        const int32_t peer = in.number<int32_t>();
        reasons[r][peer] = printable(in.text(), kMostReasonBytes);
      }
      if (!in.finished())
        return error(Code::kProtocol, "rank {} sent malformed set-up data of shared memory", r);
    }
    return reasons;
  }
  // What the peer has said of this rank.
  std::string said(const std::vector<Reasons>& all, int32_t peer) const {
    const Reasons& theirs = all[static_cast<size_t>(peer)];
    const auto found = theirs.find(control_.rank());
    return found != theirs.end()
               ? found->second
               : fmt::format("rank {} does not count rank {} to its host", peer, control_.rank());
  }

  ControlPlane& control_;
  const HandoverOptions& options_;
  const Bell& bell_;
  Driver& driver_;
  const Deadline deadline_;
  std::vector<int32_t> peers_;        // without this rank
  std::vector<Listening> listening_;  // by rank
  std::optional<UnixSocket> socket_;
  std::string key_;
  std::map<int32_t, Offered> offered_;  // to higher ranks
  std::map<int32_t, Arrived> arrived_;  // of lower ranks
  Status not_taken_;                    // why the last connection that brought no offer did not
  Handover result_;
};

}  // namespace

Result<Handover> hand_over(ControlPlane& control, std::span<const int32_t> peers,
                           const HandoverOptions& options, const Bell& bell, Driver& driver,
                           Deadline deadline) {
  return Exchange(control, peers, options, bell, driver, deadline).run();
}

}  // namespace sotto::shm
