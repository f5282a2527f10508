#include "transports/tcp/all_gather.h"
#include "core/base/text.h"

namespace sotto::tcp {

AllGather::AllGather(ControlPeers& peers)
    : peers_(peers), parts_(static_cast<size_t>(peers.size())) {}

std::optional<FailureCause> AllGather::begin(std::string_view what, std::string_view mine) {
  gathered_.reset();
  told_waiting_.clear();
  wire::Gather part{sequence_, std::string(what), std::string(mine)};
  if (peers_.coordinates()) return contribute(peers_.rank(), std::move(part));
  peers_.send(peers_.coordinator(), wire::FrameKind::kGather, part.encode());
  return {};
}

std::optional<FailureCause> AllGather::contribute(int32_t from, wire::Gather part) {
  auto& place = parts_[static_cast<size_t>(from)];
  if (place || part.sequence != sequence_) {
    return FailureCause{Code::kProtocol, from,
                        fmt::format("{} is at exchange {} (\"{}\"), the group is at {}",
                                    peers_.describe(from), part.sequence, part.what, sequence_)};
  }
  if (present_ == 0) {
    what_ = part.what;
    what_rank_ = from;
  } else if (what_ != part.what) {
    return FailureCause{
        Code::kProtocol, from,
        fmt::format(
            "ranks do not agree on exchange {}: rank {} came for \"{}\", rank {} for \"{}\"",
            part.sequence, what_rank_, what_, from, part.what)};
  }
  place = std::move(part.data);
  if (++present_ == peers_.size()) finish();
  return {};
}

void AllGather::finish() {
  wire::Gathered all{sequence_++, {}};
  for (auto& part : parts_) all.data.push_back(std::exchange(part, std::nullopt).value());
  present_ = 0;
  reported_missing_.clear();
  if (peers_.size() > 1) {
    const std::string text = all.encode();
    for (int32_t r = 0; r < peers_.size(); ++r) {
      peers_.send(r, wire::FrameKind::kGathered, text);
    }
  }
  gathered_ = std::move(all.data);
}

std::optional<FailureCause> AllGather::on_left(int32_t rank) const {
  if (present_ == 0 || parts_[static_cast<size_t>(rank)]) return {};
  return FailureCause{Code::kPeerLost, rank,
                      fmt::format("{} has left the group during the exchange \"{}\"",
                                  peers_.describe(rank), what_)};
}

Status AllGather::on_answer(wire::Bytes payload) {
  auto all = wire::Gathered::decode(payload);
  if (!all.ok()) return all.status();
  if (all->sequence != sequence_ || all->data.size() != static_cast<size_t>(peers_.size())) {
    return error(Code::kProtocol, "answer to exchange {} with {}; rank {} is at exchange {} of {}",
                 all->sequence, counted(all->data.size(), "part"), peers_.rank(), sequence_,
                 counted(peers_.size(), "rank"));
  }
  ++sequence_;
  gathered_ = std::move(all->data);
  return {};
}

std::string AllGather::waiting() const {
  if (!peers_.coordinates()) return told_waiting_;
  return present_ > 0 ? missing() : "";
}

std::string AllGather::missing() const {
  std::vector<int32_t> ranks;
  for (int32_t r = 0; r < peers_.size(); ++r) {
    if (!parts_[static_cast<size_t>(r)]) ranks.push_back(r);
  }
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", rank_list(ranks));
}

void AllGather::report_missing() {
  if (present_ == 0) return;
  const std::string ranks = missing();
  if (ranks == reported_missing_) return;
  reported_missing_ = ranks;
  const std::string text = wire::Heartbeat{ranks, {}}.encode();
  for (int32_t r = 0; r < peers_.size(); ++r) {
    if (parts_[static_cast<size_t>(r)]) peers_.send_sign(r, text);
  }
}

}  // namespace sotto::tcp
