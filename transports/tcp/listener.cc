#include "transports/tcp/listener.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "transports/tcp/fork_guard.h"
#include "transports/tcp/net.h"

namespace sotto::tcp {
namespace {

constexpr int kBacklog = 1024;
constexpr int64_t kSweepMs = 100;
// Time for the peer to read its refusal.
constexpr int64_t kLingerMs = 1000;
// Connections accepted per tick, so that other work has its turn. kUnexpected: where no rank is
// expected; also the limit of pending connections there.
constexpr size_t kMostAccepts = 2048, kUnexpected = 8;

size_t pending_limit() {
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) != 0) return kFewestPending;
  return static_cast<size_t>(
      std::clamp<rlim_t>(files.rlim_cur / 4, rlim_t{kFewestPending}, rlim_t{kMostPending}));
}

bool out_of_descriptors(const error_code& failed) {
  const int number = failed.value();
  return number == EMFILE || number == ENFILE || number == ENOBUFS || number == ENOMEM;
}

}  // namespace

// A connection whose first frame has not come, or that was refused and has to read the reason.
class FrameListener::Pending final : public StreamOwner {
 public:
  explicit Pending(State& listener) : listener_(listener) {}
  Status start(int fd, std::string name);
  void start_refused(std::unique_ptr<FrameStream> stream, const Refusal& refusal);

  bool done() const { return stream_ == nullptr || !stream_->open(); }
  bool delivered() const { return done() || stream_->delivered(); }
  bool refused() const { return refused_; }
  int64_t since_ns() const { return since_ns_; }
  bool overdue(int64_t now_ns) const { return now_ns >= until_ns_; }
  void look() {
    if (!done()) stream_->look();
  }
  // Closes it; why: "has sent no join within 5 s".
  void drop(std::string_view cause, const std::string& why);

 private:
  void refuse(const Refusal& refusal);
  Result<PayloadPlace> on_header(FrameStream& s, const wire::FrameHeader& header) override;
  Status on_frame(FrameStream& s, const wire::FrameHeader& header) override;
  bool next_frame(FrameStream& s, OutFrame& out) override;
  void on_sent(FrameStream& s, const OutFrame& out) override;
  void on_broken(FrameStream& s, Status why) override;

  State& listener_;
  std::unique_ptr<FrameStream> stream_;  // null: admitted
  int64_t since_ns_ = 0, until_ns_ = 0;
  bool refused_ = false, to_send_ = false;
  std::string inbox_, outbox_;
};

struct FrameListener::State : std::enable_shared_from_this<State> {
  State(Reactor& r, const Entrance& e, AdmitFn fn, asio::ip::tcp::acceptor a, std::string place)
      : reactor(r),
        kind(e.kind),
        max_payload(e.max_payload),
        limit(pending_limit() + e.expected),
        admit(std::move(fn)),
        on_full(e.on_full),
        refusals(std::move(place)),
        acceptor(std::move(a)) {}
  ~State() { release_reserve(); }

  Reactor& reactor;
  const wire::FrameKind kind;
  const uint64_t max_payload;
  size_t limit;
  AdmitFn admit;
  std::function<void(const Status& why)> on_full;
  int64_t full_since_ns = 0;  // 0: it is not
  RefusalLog refusals;
  asio::ip::tcp::acceptor acceptor;
  Timers::Timer timer;
  std::vector<std::unique_ptr<Pending>> pending;  // the oldest first
  bool expected = true;                           // ranks are to come
  int reserve = -1;                    // descriptor for a connection when there is no other
  size_t accepts_left = kMostAccepts;  // until the next tick
  bool accepting = false;              // a wait for the next connection is pending
  bool armed = false;                  // the timer is

  void sweep();
  bool evict();
  bool make_room();
  void accept();
  void accepted(asio::ip::tcp::socket socket);
  void not_accepted(const error_code& failed);
  void look_for_room(const error_code& failed);
  void tick();
  void arm();

  void take_reserve() {
    if (expected && reserve < 0) reserve = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  }
  bool release_reserve() {
    if (reserve < 0) return false;
    ::close(std::exchange(reserve, -1));
    return true;
  }
};

// ---- one connection

Status FrameListener::Pending::start(int fd, std::string name) {
  SOTTO_ASSIGN(stream_, FrameStream::make(listener_.reactor, fd, std::move(name), *this));
  since_ns_ = listener_.reactor.now_ns();
  until_ns_ = since_ns_ + kFirstFrameMs * 1'000'000;
  return {};
}

void FrameListener::Pending::start_refused(std::unique_ptr<FrameStream> stream,
                                           const Refusal& refusal) {
  stream_ = std::move(stream);
  stream_->set_owner(*this, stream_->name());
  since_ns_ = listener_.reactor.now_ns();
  refuse(refusal);
}

void FrameListener::Pending::refuse(const Refusal& refusal) {
  listener_.refusals.add(refusal.cause, refusal.from_rank, stream_->name(), refusal.told.text);
  refused_ = true;
  until_ns_ = listener_.reactor.now_ns() + kLingerMs * 1'000'000;
  const FailureCause& told = refusal.told;
  outbox_ = wire::Failure{static_cast<int32_t>(told.code), told.rank, told.text}.encode();
  to_send_ = true;
  stream_->flush();
}

void FrameListener::Pending::drop(std::string_view cause, const std::string& why) {
  if (done()) return;
  if (!refused_) listener_.refusals.add(cause, false, stream_->name(), stream_->name() + " " + why);
  stream_->close();
}

Result<PayloadPlace> FrameListener::Pending::on_header(FrameStream& s,
                                                       const wire::FrameHeader& header) {
  if (!refused_ && (header.kind != listener_.kind || header.payload_bytes > listener_.max_payload))
    refuse({"frame",
            false,
            {Code::kProtocol, -1,
             fmt::format("{} from {} instead of a {} of at most {} bytes", describe(header),
                         s.name(), wire::kind_name(listener_.kind), listener_.max_payload)}});
  if (refused_) return PayloadPlace{};
  inbox_.resize(header.payload_bytes);
  return PayloadPlace{reinterpret_cast<uint8_t*>(inbox_.data()), inbox_.size()};
}

Status FrameListener::Pending::on_frame(FrameStream& /*s*/, const wire::FrameHeader& header) {
  if (refused_) return {};
  const auto refusal = listener_.admit(
      stream_, header, {reinterpret_cast<const uint8_t*>(inbox_.data()), inbox_.size()});
  if (refusal) refuse(*refusal);
  return {};
}

bool FrameListener::Pending::next_frame(FrameStream& /*s*/, OutFrame& out) {
  if (!std::exchange(to_send_, false)) return false;
  out = OutFrame{};
  out.header.kind = wire::FrameKind::kFailure;
  out.header.payload_bytes = outbox_.size();
  out.payload = reinterpret_cast<const uint8_t*>(outbox_.data());
  return true;
}

void FrameListener::Pending::on_sent(FrameStream& s, const OutFrame& /*out*/) { s.shutdown_send(); }

void FrameListener::Pending::on_broken(FrameStream& s, Status why) {
  if (refused_) return;
  const bool version = wire::is_version_mismatch(why);
  if (why.code() == Code::kPeerLost) {
    listener_.refusals.add(
        "closed", false, s.name(),
        fmt::format("{}; no {} had come", why.text(), wire::kind_name(listener_.kind)));
  } else {
    listener_.refusals.add(version ? "version" : "garbage", version, s.name(), why.text());
  }
}

// ---- all of them

void FrameListener::State::sweep() {
  std::erase_if(pending, [](const auto& p) { return p->done(); });
}

// Closes the oldest if its time is over. True: there is room.
bool FrameListener::State::evict() {
  if (pending.empty()) return false;
  Pending& oldest = *pending.front();
  oldest.look();
  if (!oldest.done()) {
    if (reactor.now_ns() - oldest.since_ns() < kLeastMs * 1'000'000) return false;
    oldest.drop("crowded",
                fmt::format("has sent no {} and is closed to make room for others, {} wait",
                            wire::kind_name(kind), pending.size()));
  }
  sweep();
  return true;
}

bool FrameListener::State::make_room() {
  sweep();
  return pending.size() < limit || evict();
}

void FrameListener::State::accept() {
  if (!accepting && accepts_left > 0 && acceptor.is_open() && make_room()) {
    accepting = true;
    acceptor.async_accept(
        [weak = weak_from_this()](const error_code& failed, asio::ip::tcp::socket socket) {
          const std::shared_ptr<State> self = weak.lock();
          if (!self || !self->acceptor.is_open()) return;
          self->accepting = false;
          if (failed) {
            self->not_accepted(failed);
          } else {
            self->accepted(std::move(socket));
          }
        });
  }
  arm();
}

void FrameListener::State::accepted(asio::ip::tcp::socket socket) {
  --accepts_left;
  full_since_ns = 0;
  error_code failed;
  const std::string name = endpoint_text(socket.remote_endpoint(failed));
  const int fd = failed ? -1 : socket.release(failed);
  if (!failed) {
    auto one = std::make_unique<Pending>(*this);
    if (Status status = one->start(fd, name); status.ok()) {
      pending.push_back(std::move(one));
    } else {
      refusals.add("descriptors", false, name, status.text());
    }
  }
  accept();
}

void FrameListener::State::not_accepted(const error_code& failed) {
  const bool full = out_of_descriptors(failed);
  refusals.add("accept", full, "", "accepting it: " + failed.message());
  if (full && (release_reserve() || evict())) {
    accept();
  } else {
    if (full && pending.empty()) look_for_room(failed);
    arm();  // accepting again at once would spin
  }
}

// Reports the lack of descriptors when it has lasted.
void FrameListener::State::look_for_room(const error_code& failed) {
  const int64_t now = reactor.now_ns();
  if (full_since_ns == 0) full_since_ns = now;
  if (!on_full || now - full_since_ns < kLeastMs * 1'000'000) return;
  rlimit files{};
  (void)::getrlimit(RLIMIT_NOFILE, &files);
  on_full(error(Code::kTransport,
                "cannot be accepted: {}: {} descriptors are allowed (RLIMIT_NOFILE, ulimit -n)",
                failed.message(), static_cast<uint64_t>(files.rlim_cur)));
}

// Ticks while connections are pending, none is accepted, or there is no reserve.
void FrameListener::State::arm() {
  if (armed || (pending.empty() && accepting && (reserve >= 0 || !expected))) return;
  armed = true;
  timer = reactor.after(kSweepMs, [weak = weak_from_this()] {
    const std::shared_ptr<State> self = weak.lock();
    if (!self) return;
    self->armed = false;
    self->tick();
  });
}

void FrameListener::State::tick() {
  const int64_t now = reactor.now_ns();
  for (size_t i = 0; i < pending.size(); ++i) {
    Pending& one = *pending[i];
    if (!one.overdue(now)) continue;
    one.look();  // the frame may have come without having been read
    if (one.overdue(now))
      one.drop("silent", fmt::format("has sent no {} within {} s", wire::kind_name(kind),
                                     kFirstFrameMs / 1000));
  }
  sweep();
  // Not sooner: a connection that waits for the descriptor would not get it.
  if (pending.empty()) take_reserve();
  accepts_left = expected ? kMostAccepts : kUnexpected;
  accept();
}

// ---- the listener

Result<std::unique_ptr<FrameListener>> FrameListener::open(Reactor& reactor, const Endpoint& at,
                                                           const Entrance& entrance,
                                                           AdmitFn admit) {
  asio::ip::tcp::acceptor acceptor(reactor.io());
  error_code failed;
  const auto cannot = [&](const char* what) {
    return error(Code::kTransport, "cannot listen at {}: {}: {}", endpoint_text(at), what,
                 failed.message());
  };
  if (acceptor.open(at.protocol(), failed); failed) return cannot("socket");
  ::fcntl(acceptor.native_handle(), F_SETFD, FD_CLOEXEC);
  acceptor.set_option(asio::ip::tcp::acceptor::reuse_address(true), failed);
  if (at.address().is_v6() && at.address().is_unspecified()) {
    acceptor.set_option(asio::ip::v6_only(false), failed);
  }
  if (acceptor.bind(at, failed); failed) return cannot("bind");
  if (acceptor.listen(kBacklog, failed); failed) return cannot("listen");
  const Endpoint bound = acceptor.local_endpoint(failed);
  if (failed) return cannot("getsockname");
  keep_from_children(acceptor.native_handle());
  std::unique_ptr<FrameListener> listener(new FrameListener);
  listener->port_ = bound.port();
  listener->state_ =
      std::make_shared<State>(reactor, entrance, std::move(admit), std::move(acceptor),
                              fmt::format("{} at {}", entrance.place, endpoint_text(bound)));
  listener->state_->take_reserve();
  listener->state_->accept();
  return listener;
}

FrameListener::~FrameListener() {
  error_code ignored;
  forget_kept(state_->acceptor.native_handle());
  state_->acceptor.close(ignored);
  state_->timer.reset();
  state_->pending.clear();
}

void FrameListener::expect_no_rank() {
  state_->expected = false;
  state_->limit = state_->accepts_left = kUnexpected;
  state_->release_reserve();
  auto& pending = state_->pending;
  for (size_t i = 0; i + kUnexpected < pending.size(); ++i)
    pending[i]->drop("crowded", fmt::format("has sent no {} when all ranks were there",
                                            wire::kind_name(state_->kind)));
}

void FrameListener::refuse(std::unique_ptr<FrameStream> stream, const Refusal& refusal) {
  auto one = std::make_unique<Pending>(*state_);
  Pending& refused = *one;
  state_->pending.push_back(std::move(one));
  refused.start_refused(std::move(stream), refusal);
  state_->arm();
}

bool FrameListener::delivered() const {
  return std::all_of(state_->pending.begin(), state_->pending.end(),
                     [](const auto& p) { return !p->refused() || p->delivered(); });
}

size_t FrameListener::pending() const { return state_->pending.size(); }

RefusalLog& FrameListener::refusals() { return state_->refusals; }

}  // namespace sotto::tcp
