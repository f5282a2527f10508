#include "integration/cli/remote_ranks.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "integration/cli/waiting.h"
#include "integration/cli/words.h"

namespace sotto_cli {
namespace {

// How long a remote shell may go on when its agent has nothing more to do, or has closed its
// output.
constexpr int64_t kShellEndNs = 2 * kNsPerS;
constexpr int64_t kShellExitNs = kNsPerS;
// Reads of what a shell has left behind: as much as the largest pipe holds, since a process that it
// has lost may write without end.
constexpr int kLastReads = 16;

void close_fd(int& fd) {
  if (fd >= 0) ::close(fd);
  fd = -1;
}

// Appends what one read gives; false at the end or if there is nothing now. Ends close fd.
bool read_some(int& fd, std::string& bytes) {
  if (fd < 0) return false;
  char buffer[65536];
  ssize_t n = 0;
  while ((n = read(fd, buffer, sizeof buffer)) < 0 && errno == EINTR) {
  }
  if (n > 0) {
    bytes.append(buffer, static_cast<size_t>(n));
  } else if (n == 0 || errno != EAGAIN) {
    close_fd(fd);
  }
  return n > 0;
}

}  // namespace

RemoteRanks::RemoteRanks(const RemoteShell& shell, const Host& host, Job job,
                         std::shared_ptr<Heartbeats> heartbeats, Watcher& watcher, Sink& messages)
    : host_(host),
      program_(shell.program),
      job_(std::move(job)),
      heartbeats_(std::move(heartbeats)),
      watcher_(watcher),
      messages_(messages, fmt::format("[{}] ", host.name), false),
      greeting_(messages, fmt::format("[{}] ", host.name), false),
      closed_(static_cast<size_t>(job_.group.count)),
      heard_ns_(now_ns()) {
  // A socket, since a write to a pipe without a reader would end this process.
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw std::runtime_error(fmt::format("host {}: no socket: {}", host.name, strerror(errno)));
  writer_ = std::make_shared<FrameWriter>(ends[0]);
  RankCommand command;
  command.words = shell.words;
  command.words.push_back(host.target);
  command.words.push_back("exec " + join_words({shell.program, "--agent"}));
  command.stdin_fd = ends[1];
  const StartedRank started = start_rank(command);
  ::close(ends[1]);
  if (started.error != 0) {
    throw std::runtime_error(fmt::format("host {}: cannot start the remote shell: {}: {}",
                                         host.name, join_words({shell.words.front()}),
                                         strerror(started.error)));
  }
  watcher_.add(started.pid);
  shell_.pid = started.pid;
  shell_.out = started.stdout_fd;
  shell_.err = started.stderr_fd;
  for (const int fd : {shell_.out, shell_.err}) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

RemoteRanks::~RemoteRanks() {
  writer_->close();
  close_fd(shell_.out);
  close_fd(shell_.err);
}

void RemoteRanks::start(const std::string& rendezvous, RankListener& /*listener*/) {
  stage_ = Stage::kStarted;
  Frame frame;
  frame.kind = FrameKind::kStart;
  frame.body = rendezvous;
  writer_->send(frame);
}

void RemoteRanks::signal_all(int number) {
  if (stage_ == Stage::kStarted) writer_->send({FrameKind::kSignal, 0, number, {}});
}

void RemoteRanks::pause(bool stopping) {
  heartbeats_->pause(stopping);
  if (stopping && stage_ != Stage::kCalled) writer_->send({FrameKind::kPause, 0, 0, {}});
}

void RemoteRanks::watch(std::vector<pollfd>& fds) {
  const auto add = [&](int fd, short events) -> size_t {
    if (fd < 0 || events == 0) return 0;
    fds.push_back({fd, events, 0});
    return fds.size() - 1;
  };
  shell_.in_at = add(writer_->fd(), writer_->queued() != 0 && !writer_->broken() ? POLLOUT : 0);
  shell_.out_at = add(shell_.out, shell_.held ? 0 : POLLIN);
  shell_.err_at = add(shell_.err, POLLIN);
}

int64_t RemoteRanks::due_ns() const {
  if (shell_.pid < 0) return kNever;
  if (shell_.kill_ns != 0) return shell_.kill_ns;
  if (done()) return kNever;
  return shell_.eof_ns != 0 ? shell_.eof_ns + kShellExitNs : heard_ns_ + job_.silence_ns;
}

void RemoteRanks::handle(const std::vector<pollfd>& fds, RankListener& listener) {
  const auto woken = [&](size_t at) { return at != 0 && fds[at].revents != 0; };
  if (woken(shell_.in_at)) writer_->flush();
  if (woken(shell_.err_at)) read_messages();
  if (woken(shell_.out_at)) read_output(listener);
  collect_shell(listener);
  lose_if_due(listener);
}

bool RemoteRanks::read_messages() {
  std::string bytes;
  const bool more = read_some(shell_.err, bytes);
  messages_.take(bytes);
  return more;
}

bool RemoteRanks::read_output(RankListener& listener) {
  std::string bytes;
  const bool open = shell_.out >= 0;
  const bool more = read_some(shell_.out, bytes);
  if (open && shell_.out < 0) shell_.eof_ns = now_ns();
  if (bytes.empty() || done()) return more;
  if (stage_ == Stage::kCalled) {
    look_for_hello(bytes, listener);
  } else {
    heard_ns_ = now_ns();
    reader_.feed(bytes);
    take_frames(listener);
  }
  return more;
}

void RemoteRanks::look_for_hello(std::string_view bytes, RankListener& listener) {
  before_hello_ += bytes;
  const size_t at = before_hello_.find(kHello);
  if (at == std::string::npos) {
    // Not what may be the beginning of it.
    const size_t noise = before_hello_.size() - std::min(before_hello_.size(), kHello.size() - 1);
    greeting_.take(std::string_view(before_hello_).substr(0, noise));
    before_hello_.erase(0, noise);
    return;
  }
  const size_t end = before_hello_.find('\n', at);
  if (end == std::string::npos) return;
  greeting_.take(std::string_view(before_hello_).substr(0, at));
  greeting_.finish();
  const size_t word = at + kHello.size();
  const std::string protocol = before_hello_.substr(word, end - word);
  if (protocol != kProtocol) {
    return lose(fmt::format("{} there speaks protocol {}, this one {}", join_words({program_}),
                            protocol, kProtocol),
                listener);
  }
  stage_ = Stage::kAnswered;
  heard_ns_ = now_ns();
  Frame frame;
  frame.kind = FrameKind::kJob;
  frame.body = pack(job_);
  writer_->send(frame);
  heartbeats_->add(writer_);
  reader_.feed(std::string_view(before_hello_).substr(end + 1));
  before_hello_.clear();
  take_frames(listener);
}

void RemoteRanks::take_frames(RankListener& listener) {
  Frame frame;
  while (stage_ != Stage::kLost && reader_.next(frame)) take_frame(frame, listener);
  if (reader_.damaged() && stage_ != Stage::kLost)
    lose("what sotto-run sends from there is damaged", listener);
}

void RemoteRanks::take_frame(const Frame& frame, RankListener& listener) {
  if (frame.kind == FrameKind::kHeartbeat) return;
  if (frame.kind == FrameKind::kRefused) return lose(frame.body, listener);
  if (frame.kind == FrameKind::kReady && stage_ == Stage::kAnswered) {
    stage_ = Stage::kReady;
    rendezvous_ = frame.body;
    return;
  }
  const int32_t i = frame.rank - job_.group.first;
  if (stage_ != Stage::kStarted || i < 0 || i >= job_.group.count ||
      closed_[static_cast<size_t>(i)])
    return lose("what sotto-run sends from there is damaged", listener);
  switch (frame.kind) {
    case FrameKind::kStartFailed:
      return listener.on_start_failed(frame.rank, frame.value, host_.name);
    case FrameKind::kOutput:
      return listener.on_output(frame.rank, static_cast<Stream>(frame.value), frame.body);
    case FrameKind::kEnded: return listener.on_end(frame.rank, frame.value);
    case FrameKind::kClosed:
      closed_[static_cast<size_t>(i)] = true;
      return listener.on_closed(frame.rank);
    default: return lose("what sotto-run sends from there is damaged", listener);
  }
}

void RemoteRanks::collect_shell(RankListener& listener) {
  siginfo_t info{};
  if (shell_.pid < 0 ||
      waitid(P_PID, static_cast<id_t>(shell_.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid == 0) {
    return;
  }
  kill(-shell_.pid, SIGKILL);
  watcher_.forget(shell_.pid);
  int wait_status = 0;
  waitpid(shell_.pid, &wait_status, 0);
  shell_.pid = -1;
  for (int i = 0; i < kLastReads && read_messages(); ++i) {
  }
  messages_.finish();
  for (int i = 0; i < kLastReads && read_output(listener); ++i) {
  }
  if (stage_ == Stage::kCalled) greeting_.take(before_hello_);
  greeting_.finish();
  if (done()) return;
  const std::string how = how_it_ended(wait_status);
  if (stage_ != Stage::kCalled)
    return lose(fmt::format("the remote shell ended with {}", how), listener);
  std::string why =
      fmt::format("the remote shell ended with {} before sotto-run answered there", how);
  if (WIFEXITED(wait_status) &&
      (WEXITSTATUS(wait_status) == 126 || WEXITSTATUS(wait_status) == 127)) {
    why += fmt::format("; it was to run {}, --remote-run names another program",
                       join_words({program_}));
  }
  lose(why, listener);
}

void RemoteRanks::lose_if_due(RankListener& listener) {
  if (shell_.pid < 0) return;
  if (shell_.kill_ns != 0) {
    if (now_ns() < shell_.kill_ns) return;
    kill(-shell_.pid, SIGKILL);
    shell_.kill_ns = now_ns() + kShellEndNs;
    return;
  }
  if (done()) return;
  if (shell_.eof_ns != 0) {
    if (now_ns() >= shell_.eof_ns + kShellExitNs)
      lose("the remote shell has closed its output", listener);
    return;
  }
  if (now_ns() < heard_ns_ + job_.silence_ns) return;
  // This process may have been stopped or may have waited for the reader of its output.
  read_output(listener);
  if (done() || now_ns() < heard_ns_ + job_.silence_ns) return;
  const double limit_s = static_cast<double>(job_.silence_ns) / static_cast<double>(kNsPerS);
  lose(stage_ == Stage::kCalled
           ? fmt::format("sotto-run has not answered there within {:g} s", limit_s)
           : fmt::format("nothing has been heard from it for {:g} s", limit_s),
       listener);
}

bool RemoteRanks::done() const {
  return shell_.kill_ns != 0 || stage_ == Stage::kLost ||
         (stage_ == Stage::kStarted &&
          std::all_of(closed_.begin(), closed_.end(), [](bool closed) { return closed; }));
}

void RemoteRanks::lose(const std::string& why, RankListener& listener) {
  const std::string text = fmt::format("host {}: {}{}", host_.name, why, lost_ranks());
  stage_ = Stage::kLost;
  writer_->close();
  if (shell_.pid >= 0) kill(-shell_.pid, SIGKILL);
  for (size_t i = 0; i < closed_.size(); ++i) {
    if (!closed_[i]) listener.on_closed(job_.group.first + static_cast<int32_t>(i));
    closed_[i] = true;
  }
  listener.on_host_failed(text);
}

std::string RemoteRanks::lost_ranks() const {
  if (stage_ != Stage::kStarted) return {};
  std::string list;
  for (size_t i = 0; i < closed_.size(); ++i) {
    if (!closed_[i])
      list += fmt::format("{}{}", list.empty() ? "; lost with it: rank " : ", ",
                          job_.group.first + static_cast<int32_t>(i));
  }
  return list;
}

void RemoteRanks::close() {
  if (shell_.kill_ns != 0) return;
  writer_->close();
  const bool knows = stage_ != Stage::kCalled && stage_ != Stage::kLost;
  shell_.kill_ns = now_ns() + (knows ? kShellEndNs : 0);
}

}  // namespace sotto_cli
