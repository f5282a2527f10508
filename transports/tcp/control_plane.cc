#include "transports/tcp/control_plane.h"

#include <utility>

namespace sotto::tcp {
namespace {

Status exchange_failed(std::string_view what, const FailureCause& cause) {
  return cause.status().with_prefix(fmt::format("exchange \"{}\"", what));
}

}  // namespace

TcpControl::TcpControl(std::shared_ptr<Reactor> reactor, Membership membership,
                       int64_t heartbeat_ms)
    : reactor_(std::move(reactor)),
      star_(*reactor_, std::move(membership), *this),
      gather_(star_),
      signs_(star_, gather_, reactor_->clock(), heartbeat_ms),
      agreement_(star_, signs_, reactor_->clock(), [this] { failed(); }),
      service_(*reactor_, star_.rank(), star_.size(), star_.coordinator(),
               [this](int32_t rank, const std::string& payload) {
                 if (!star_.left(rank)) star_.send(rank, wire::FrameKind::kService, payload);
               }) {
  start_ticking();
}

// ---- all-gather

Result<std::vector<std::string>> TcpControl::all_gather(std::string_view what,
                                                        std::string_view mine, Driver& driver,
                                                        Deadline deadline) {
  if (mine.size() > wire::kMaxBlobBytes) {
    // The other ranks wait for this blob: the group fails.
    const Status status =
        invalid_argument("rank {}: {} bytes for the exchange \"{}\"; at most {} are allowed",
                         rank(), mine.size(), what, wire::kMaxBlobBytes);
    fail({status.code(), rank(), status.text(), rank()});
    return status;
  }
  if (star_.left(rank()))
    return invalid_state("rank {} has left the group and cannot take part in \"{}\"", rank(), what);
  if (failure() && !star_.coordinates()) return exchange_failed(what, *failure());
  decide(gather_.begin(what, mine));
  const auto abandoned = [this] { return !star_.coordinates() && star_.left(coordinator()); };
  const bool in_time =
      driver.run_until([&] { return failure() || gather_.complete() || abandoned(); }, deadline);
  if (gather_.complete()) return gather_.take();
  if (!failure() && abandoned()) {
    return error(Code::kPeerLost, "exchange \"{}\": the coordinator, {}, has left the group", what,
                 describe_rank(coordinator()));
  }
  if (in_time) return exchange_failed(what, *failure());
  const std::string missing = gather_.waiting();
  return error(Code::kTimeout, "rank {}: the exchange \"{}\" is not complete in time: {}", rank(),
               what,
               missing.empty()
                   ? fmt::format("no answer from the coordinator, {}", describe_rank(coordinator()))
                   : missing + " did not come");
}

// ---- messages

Status TcpControl::on_message(ControlLink& link, wire::FrameKind kind, wire::Bytes payload) {
  switch (kind) {
    case wire::FrameKind::kGather:
      if (star_.coordinates()) return on_gather(link.rank, payload);
      break;
    case wire::FrameKind::kGathered:
      if (!star_.coordinates()) return gather_.on_answer(payload);
      break;
    case wire::FrameKind::kHeartbeat: return on_heartbeat(payload);
    case wire::FrameKind::kFailure: return agreement_.on_frame(link.rank, payload);
    case wire::FrameKind::kBye: on_bye(link.rank); return {};
    case wire::FrameKind::kService: return service_.on_frame(link.rank, payload);
    default: break;
  }
  return error(Code::kProtocol, "{} frame from {} to rank {}", wire::kind_name(kind),
               describe_rank(link.rank), rank());
}

void TcpControl::on_lost(ControlLink& link, const Status& why) {
  agreement_.on_lost(link.rank, {why, link.damaged(), link.unanswered()});
}

Status TcpControl::on_gather(int32_t from, wire::Bytes payload) {
  auto part = wire::Gather::decode(payload);
  if (!part.ok()) return part.status();
  decide(gather_.contribute(from, part.take()));
  return {};
}

Status TcpControl::on_heartbeat(wire::Bytes payload) {
  auto beat = wire::Heartbeat::decode(payload);
  if (!beat.ok()) return beat.status();
  if (star_.coordinates()) {
    agreement_.on_sign();
  } else {
    gather_.on_waiting(beat->waiting);
    signs_.on_word(beat.take());
  }
  return {};
}

void TcpControl::on_bye(int32_t from) {
  star_.on_bye(from);
  agreement_.on_left(from);
  if (star_.coordinates()) decide(gather_.on_left(from));
}

// ---- service messages

Status TcpControl::send_service(int32_t to, uint32_t channel, std::string_view bytes) {
  if (failure()) return failure()->status();
  if (!star_.established() || star_.left(rank()))
    return invalid_state(
        "rank {}: service messages are for groups that are set up and have not ended", rank());
  return service_.send({rank(), to, channel, std::string(bytes)});
}

void TcpControl::set_service_listener(uint32_t channel, ServiceListener* listener) {
  service_.listen(channel, listener);
}

// ---- failure

void TcpControl::decide(std::optional<FailureCause> cause) {
  if (cause) agreement_.decide(*std::move(cause));
}

void TcpControl::failed() {
  service_.stop();
  asio::post(reactor_->io(), [this, alive = std::weak_ptr<bool>(alive_)] {
    if (!alive.expired() && listener_ != nullptr) listener_->on_control_failure(*failure());
  });
}

// ---- signs of life

void TcpControl::set_silence_limit(int64_t limit_ms) {
  signs_.set_limit(limit_ms);
  start_ticking();
}

void TcpControl::established() {
  star_.establish();
  signs_.restart();
}

void TcpControl::start_ticking() {
  if (size() > 1) ticker_ = reactor_->every(signs_.tick_ms(), [this] { tick(); });
}

void TcpControl::tick() {
  signs_.tick();
  agreement_.tick();
  if (star_.left(rank())) return;
  if (!signs_.beat()) gather_.report_missing();
}

// ---- end

void TcpControl::leave(Deadline deadline) {
  if (star_.left(rank())) return;
  agreement_.conclude_at_once();
  service_.stop();
  star_.leave(deadline);
}

}  // namespace sotto::tcp
