#include "integration/cli/agent.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "integration/cli/launch.h"
#include "integration/cli/local_ranks.h"
#include "integration/cli/protocol.h"
#include "integration/cli/rendezvous.h"
#include "integration/cli/waiting.h"

namespace sotto_cli {
namespace {

// Bytes that may wait for a reader before ranks have to wait too.
constexpr size_t kMostQueued = size_t{1} << 20;

class Agent final : public RankListener {
 public:
  // Streams of the remote shell.
  Agent(int in, int out) : in_(in), writer_(out) {}
  ~Agent() override {
    if (signal_fd_ >= 0) close(signal_fd_);
  }

  int run();

  void on_output(int32_t rank, Stream stream, std::string_view bytes) override {
    send(FrameKind::kOutput, rank, static_cast<int32_t>(stream), std::string(bytes));
  }
  void on_end(int32_t rank, int wait_status) override {
    send(FrameKind::kEnded, rank, wait_status);
  }
  void on_closed(int32_t rank) override { send(FrameKind::kClosed, rank, 0); }
  void on_start_failed(int32_t rank, int error, const std::string& /*host*/) override {
    send(FrameKind::kStartFailed, rank, error);
  }
  void on_host_failed(const std::string& /*text*/) override {}

 private:
  void send(FrameKind kind, int32_t rank, int32_t value, std::string body = {}) {
    writer_.send({kind, rank, value, std::move(body)});
  }
  void wait_for_events();
  void read_frames();
  void take_frame(const Frame& frame);
  void take_job(const std::string& body);
  void prepare(const Job& job);
  void end_if_silent();
  bool done() const;

  const int in_;
  FrameWriter writer_;
  FrameReader reader_;
  Watcher watcher_;
  ReservedPort port_;
  std::unique_ptr<LocalRanks> ranks_;
  int signal_fd_ = -1;
  bool started_ = false;
  bool ending_ = false;  // ranks are to be killed
  bool paused_ = false;
  int64_t silence_ns_ = to_ns(kHostTimeoutS);
  int64_t heard_ns_ = now_ns();
  int64_t beat_ns_ = kNever;
};

int Agent::run() {
  fcntl(writer_.fd(), F_SETFL, fcntl(writer_.fd(), F_GETFL) | O_NONBLOCK);
  signal_fd_ = open_signal_fd();
  writer_.put(fmt::format("{}{}\n", kHello, kProtocol));
  beat_ns_ = now_ns() + heartbeat_interval_ns(silence_ns_);
  while (!ending_ && !done()) wait_for_events();
  if (ranks_ != nullptr) ranks_->signal_all(SIGKILL);
  watcher_.stop();
  return 0;
}

void Agent::wait_for_events() {
  std::vector<pollfd> fds{{signal_fd_, POLLIN, 0}, {in_, POLLIN, 0}};
  if (writer_.queued() != 0) fds.push_back({writer_.fd(), POLLOUT, 0});
  int64_t due = std::min(beat_ns_, paused_ ? kNever : heard_ns_ + silence_ns_);
  if (started_) {
    ranks_->hold_output(writer_.queued() > kMostQueued);
    ranks_->watch(fds);
    due = std::min(due, ranks_->due_ns());
  }
  poll_until(fds, due);
  for (const int number : take_signals(signal_fd_))
    ending_ = ending_ || number == SIGINT || number == SIGTERM || number == SIGHUP;
  // In this order: a frame may start ranks, which are not among the descriptors yet.
  if (started_) ranks_->handle(fds, *this);
  if (fds[1].revents != 0) read_frames();
  writer_.flush();
  if (now_ns() >= beat_ns_) {
    writer_.beat();
    beat_ns_ = now_ns() + heartbeat_interval_ns(silence_ns_);
  }
  end_if_silent();
  ending_ = ending_ || writer_.broken();
}

void Agent::read_frames() {
  char buffer[65536];
  const ssize_t n = read(in_, buffer, sizeof buffer);
  if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (n <= 0) {
    ending_ = true;
    return;
  }
  heard_ns_ = now_ns();
  paused_ = false;
  reader_.feed(std::string_view(buffer, static_cast<size_t>(n)));
  Frame frame;
  while (!ending_ && reader_.next(frame)) take_frame(frame);
  ending_ = ending_ || reader_.damaged();
}

void Agent::take_frame(const Frame& frame) {
  switch (frame.kind) {
    case FrameKind::kHeartbeat: break;
    case FrameKind::kPause: paused_ = true; break;
    case FrameKind::kJob: take_job(frame.body); break;
    case FrameKind::kStart:
      if (ranks_ == nullptr || started_) {
        ending_ = true;
        break;
      }
      started_ = true;
      ranks_->start(frame.body, *this);
      break;
    case FrameKind::kSignal:
      if (started_) ranks_->signal_all(frame.value);
      break;
    default: ending_ = true;
  }
}

void Agent::take_job(const std::string& body) {
  Job job;
  if (ranks_ != nullptr || !unpack(body, job)) {
    ending_ = true;
    return;
  }
  silence_ns_ = job.silence_ns;
  beat_ns_ = now_ns() + heartbeat_interval_ns(silence_ns_);
  try {
    prepare(job);
  } catch (const std::exception& e) {
    send(FrameKind::kRefused, 0, 0, e.what());
  }
}

void Agent::prepare(const Job& job) {
  if (chdir(job.folder.c_str()) != 0) {
    throw std::runtime_error(fmt::format("working directory {}: {}", job.folder, strerror(errno)));
  }
  if (!watcher_.start()) throw std::runtime_error(fmt::format("no process: {}", strerror(errno)));
  std::string rendezvous;
  if (job.has_rendezvous) rendezvous = reserve_for_others(job.host, job.has_others, port_);
  ranks_ = std::make_unique<LocalRanks>(job.group, -1, watcher_);
  send(FrameKind::kReady, 0, 0, rendezvous);
}

void Agent::end_if_silent() {
  if (ending_ || paused_ || now_ns() < heard_ns_ + silence_ns_) return;
  // This process may have been stopped itself.
  pollfd in{in_, POLLIN, 0};
  if (poll(&in, 1, 0) > 0) return;
  ending_ = true;
}

bool Agent::done() const { return started_ && ranks_->all_closed() && writer_.queued() == 0; }

}  // namespace

int run_agent() {
  // Kept away from what ranks inherit.
  const int in = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int out = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  if (in < 0 || out < 0) throw std::runtime_error("--agent: no standard input or output");
  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  dup2(nothing, STDIN_FILENO);
  dup2(nothing, STDOUT_FILENO);
  close(nothing);
  return Agent(in, out).run();
}

}  // namespace sotto_cli
