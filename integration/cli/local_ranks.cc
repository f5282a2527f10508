#include "integration/cli/local_ranks.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <utility>

#include "integration/cli/waiting.h"

namespace sotto_cli {
namespace {

// For streams that something outside the rank's process group still holds open.
constexpr int64_t kDrainNs = kNsPerS;
constexpr Stream kStreams[] = {Stream::kOut, Stream::kErr};

size_t index_of(Stream stream) { return static_cast<size_t>(stream); }

}  // namespace

LocalRanks::LocalRanks(RankGroup group, int32_t inherits_stdout, Watcher& watcher)
    : group_(std::move(group)), inherits_stdout_(inherits_stdout), watcher_(watcher) {}

LocalRanks::~LocalRanks() {
  for (Rank& rank : ranks_) {
    for (const Stream stream : kStreams) close_stream(rank, stream);
  }
}

std::string LocalRanks::rendezvous() {
  const uint16_t port = port_.reserve("127.0.0.1");
  if (port == 0) {
    throw std::runtime_error(
        "no free TCP port on 127.0.0.1; name one with --rendezvous tcp://host:port");
  }
  return fmt::format("tcp://127.0.0.1:{}", port);
}

void LocalRanks::start(const std::string& rendezvous, RankListener& listener) {
  ranks_.resize(static_cast<size_t>(group_.count));
  bool failed = false;
  for (int32_t i = 0; i < group_.count; ++i) {
    Rank& rank = ranks_[static_cast<size_t>(i)];
    if (failed) continue;
    RankCommand command;
    command.words = group_.words;
    command.environment = environment_of(i, rendezvous);
    command.inherit_stdout = group_.first + i == inherits_stdout_;
    const StartedRank started = start_rank(command);
    if (started.error != 0) {
      listener.on_start_failed(group_.first + i, started.error, "");
      failed = true;
      continue;
    }
    watcher_.add(started.pid);
    rank.pid = started.pid;
    rank.fds[index_of(Stream::kOut)] = started.stdout_fd;
    rank.fds[index_of(Stream::kErr)] = started.stderr_fd;
    for (const int fd : rank.fds) {
      if (fd >= 0) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    }
  }
  close_done(listener);
}

std::vector<std::string> LocalRanks::environment_of(int32_t rank,
                                                    const std::string& rendezvous) const {
  std::vector<std::string> all = {fmt::format("SOTTO_RANK={}", group_.first + rank),
                                  fmt::format("SOTTO_WORLD_SIZE={}", group_.world),
                                  fmt::format("SOTTO_LOCAL_RANK={}", rank),
                                  fmt::format("SOTTO_LOCAL_SIZE={}", group_.count),
                                  fmt::format("SOTTO_RENDEZVOUS={}", rendezvous)};
  all.insert(all.end(), group_.environment.begin(), group_.environment.end());
  return all;
}

void LocalRanks::signal_all(int number) {
  for (const Rank& rank : ranks_) {
    if (rank.pid <= 0) continue;
    kill(-rank.pid, number);
    kill(-rank.pid, SIGCONT);  // a stopped process acts on SIGKILL alone
  }
}

void LocalRanks::watch(std::vector<pollfd>& fds) {
  for (Rank& rank : ranks_) {
    for (const Stream stream : kStreams) {
      const int fd = rank.fds[index_of(stream)];
      rank.poll_at[index_of(stream)] = fd < 0 || held_ ? 0 : fds.size();
      if (fd >= 0 && !held_) fds.push_back({fd, POLLIN, 0});
    }
  }
}

int64_t LocalRanks::due_ns() const {
  int64_t due = kNever;
  for (const Rank& rank : ranks_) {
    if (!held_ && rank.pid < 0 && !rank.closed) due = std::min(due, rank.ended_ns + kDrainNs);
  }
  return due;
}

void LocalRanks::handle(const std::vector<pollfd>& fds, RankListener& listener) {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    for (const Stream stream : kStreams) {
      const size_t at = ranks_[i].poll_at[index_of(stream)];
      if (at != 0 && fds[at].revents != 0) read_stream(i, stream, listener);
    }
  }
  collect_ended(listener);
  close_done(listener);
}

void LocalRanks::read_stream(size_t i, Stream stream, RankListener& listener) {
  Rank& rank = ranks_[i];
  const int fd = rank.fds[index_of(stream)];
  if (fd < 0) return;
  char buffer[65536];
  ssize_t n = 0;
  while ((n = read(fd, buffer, sizeof buffer)) < 0 && errno == EINTR) {
  }
  if (n > 0) {
    listener.on_output(group_.first + static_cast<int32_t>(i), stream,
                       std::string_view(buffer, static_cast<size_t>(n)));
  } else if (n == 0 || errno != EAGAIN) {
    close_stream(rank, stream);
  }
}

void LocalRanks::close_stream(Rank& rank, Stream stream) {
  int& fd = rank.fds[index_of(stream)];
  if (fd >= 0) ::close(fd);
  fd = -1;
}

void LocalRanks::collect_ended(RankListener& listener) {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    siginfo_t info{};
    if (rank.pid < 0 ||
        waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid == 0) {
      continue;
    }
    // What the rank has left behind ends with it. The group's number is safe to use until the
    // leader is reaped.
    kill(-rank.pid, SIGKILL);
    watcher_.forget(rank.pid);
    int wait_status = 0;
    waitpid(rank.pid, &wait_status, 0);
    rank.pid = -1;
    rank.ended_ns = now_ns();
    listener.on_end(group_.first + static_cast<int32_t>(i), wait_status);
  }
}

void LocalRanks::close_done(RankListener& listener) {
  const int64_t now = now_ns();
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    if (rank.closed || rank.pid > 0) continue;
    if (!held_ && now >= rank.ended_ns + kDrainNs) {
      for (const Stream stream : kStreams) {
        read_stream(i, stream, listener);  // as much as a pipe holds
        close_stream(rank, stream);
      }
    }
    rank.closed = rank.fds[0] < 0 && rank.fds[1] < 0;
    if (rank.closed) listener.on_closed(group_.first + static_cast<int32_t>(i));
  }
}

bool LocalRanks::all_closed() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.closed; });
}

}  // namespace sotto_cli
