#include "integration/cli/supervisor.h"

#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "integration/cli/words.h"

namespace sotto_cli {
namespace {

constexpr int64_t kNsPerS = 1000000000;
constexpr int64_t kNsPerMs = 1000000;
// After SIGTERM; and for streams that something outside the rank's process group still holds open.
constexpr int64_t kTermToKillNs = 5 * kNsPerS;
constexpr int64_t kDrainNs = kNsPerS;

int64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * kNsPerS + t.tv_nsec;
}

int64_t to_ns(double seconds) {
  return static_cast<int64_t>(seconds * static_cast<double>(kNsPerS));
}

bool failed(int wait_status) { return !WIFEXITED(wait_status) || WEXITSTATUS(wait_status) != 0; }

int exit_code_of(int wait_status) {
  return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : kExitSignal + WTERMSIG(wait_status);
}

std::string how_it_ended(int wait_status) {
  if (WIFEXITED(wait_status)) return fmt::format("exit code {}", WEXITSTATUS(wait_status));
  const int number = WTERMSIG(wait_status);
  return fmt::format("signal {} ({})", number, strsignal(number));
}

int open_signal_fd() {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) sigaddset(&set, number);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

}  // namespace

Supervisor::Supervisor(RunOptions options)
    : options_(std::move(options)),
      rendezvous_(options_.rendezvous),
      redraw_(options_.raw_rank >= 0 && isatty(STDOUT_FILENO) != 0) {}

Supervisor::~Supervisor() {
  if (signal_fd_ >= 0) close(signal_fd_);
}

int Supervisor::run() {
  if (rendezvous_.empty()) {
    const uint16_t port = port_.reserve();
    if (port == 0) {
      say("no free TCP port on 127.0.0.1; name one with --rendezvous tcp://host:port");
      return kExitOwnFailure;
    }
    rendezvous_ = fmt::format("tcp://127.0.0.1:{}", port);
  }
  signal_fd_ = open_signal_fd();
  if (signal_fd_ < 0 || !watcher_.start()) {
    say(fmt::format("cannot start: {}", strerror(errno)));
    return kExitOwnFailure;
  }
  if (options_.timeout_s > 0) time_limit_ns_ = now_ns() + to_ns(options_.timeout_s);
  if (start_all()) {
    while (!everything_done()) wait_for_events();
    show_first_failure();
  }
  watcher_.stop();
  return exit_code_;
}

bool Supervisor::start_all() {
  for (int32_t r = 0; r < options_.ranks; ++r) {
    RankCommand command;
    command.words = options_.wrapper;
    command.words.insert(command.words.end(), options_.command.begin(), options_.command.end());
    command.environment = environment_of(r);
    command.inherit_stdout = r == options_.raw_rank;
    const StartedRank started = start_rank(command);
    if (started.error != 0) {
      exit_code_ = report_start_failure(r, started.error);
      signal_all(SIGKILL);
      while (any_running()) wait_for_events();
      return false;
    }
    watcher_.add(started.pid);
    const std::string prefix = fmt::format("{}[{}] ", redraw_ ? "\r\x1b[K" : "", r);
    Rank rank;
    rank.pid = started.pid;
    if (started.stdout_fd >= 0)
      rank.out = std::make_unique<Relay>(started.stdout_fd, STDOUT_FILENO, prefix, false);
    rank.err =
        std::make_unique<Relay>(started.stderr_fd, STDERR_FILENO, prefix, r == options_.raw_rank);
    ranks_.push_back(std::move(rank));
  }
  return true;
}

int Supervisor::report_start_failure(int32_t rank, int error) {
  const std::string& program =
      options_.wrapper.empty() ? options_.command.front() : options_.wrapper.front();
  say(fmt::format("cannot start rank {}: {}: {}", rank, join_words({program}), strerror(error)));
  if (error == ENOENT) return kExitNotFound;
  return error == EAGAIN || error == EMFILE || error == ENFILE || error == ENOMEM ? kExitOwnFailure
                                                                                  : kExitCannotRun;
}

std::vector<std::string> Supervisor::environment_of(int32_t rank) const {
  return {fmt::format("SOTTO_RANK={}", rank), fmt::format("SOTTO_WORLD_SIZE={}", options_.ranks),
          fmt::format("SOTTO_LOCAL_RANK={}", rank),
          fmt::format("SOTTO_LOCAL_SIZE={}", options_.ranks),
          fmt::format("SOTTO_RENDEZVOUS={}", rendezvous_)};
}

int64_t Supervisor::poll_wait_ms() const {
  int64_t next = INT64_MAX;
  for (const int64_t due : {next_stage_ns_, stage_ == RankStage::kRunning ? time_limit_ns_ : 0}) {
    if (due != 0) next = std::min(next, due);
  }
  for (const Rank& rank : ranks_) {
    if (rank.pid < 0) next = std::min(next, rank.ended_ns + kDrainNs);
  }
  if (next == INT64_MAX) return -1;
  return std::clamp<int64_t>((next - now_ns() + kNsPerMs - 1) / kNsPerMs, 0, INT32_MAX);
}

void Supervisor::wait_for_events() {
  std::vector<pollfd> fds{{signal_fd_, POLLIN, 0}};
  std::vector<Relay*> relays;
  for (Rank& rank : ranks_) {
    for (Relay* relay : {rank.out.get(), rank.err.get()}) {
      if (relay == nullptr || relay->source() < 0) continue;
      fds.push_back({relay->source(), POLLIN, 0});
      relays.push_back(relay);
    }
  }
  if (poll(fds.data(), fds.size(), static_cast<int>(poll_wait_ms())) > 0) {
    for (size_t i = 0; i < relays.size(); ++i) {
      if (fds[i + 1].revents != 0) relays[i]->pump();
    }
    signalfd_siginfo info{};
    while (read(signal_fd_, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
      on_signal(static_cast<int>(info.ssi_signo));
    }
  }
  collect_ended();
  escalate_if_due();
  close_leftover_streams();
}

void Supervisor::on_signal(int number) {
  if (number == SIGCHLD)
    return;  // collect_ended looks at every rank anyway: signals of one kind merge
  if (stage_ >= RankStage::kAsked) {
    signal_all(SIGKILL);
    stage_ = RankStage::kKilled;
    next_stage_ns_ = 0;
    return;
  }
  end_all(number, fmt::format("ended by signal {} ({})", number, strsignal(number)),
          kExitSignal + number);
}

void Supervisor::collect_ended() {
  std::vector<int32_t> failures;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
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
    waitpid(rank.pid, &rank.wait_status, 0);
    rank.pid = -1;
    rank.ended_ns = now_ns();
    if (failed(rank.wait_status)) failures.push_back(static_cast<int32_t>(r));
  }
  if (failures.empty() || first_failure_ >= 0 || stage_ != RankStage::kRunning) return;
  // Of several that ended since the last look, one that was killed is the cause and those that
  // noticed are the effect.
  const auto killed = std::find_if(failures.begin(), failures.end(), [&](int32_t r) {
    return WIFSIGNALED(ranks_[static_cast<size_t>(r)].wait_status);
  });
  on_failure(killed != failures.end() ? *killed : failures.front());
}

void Supervisor::on_failure(int32_t rank) {
  first_failure_ = rank;
  const int wait_status = ranks_[static_cast<size_t>(rank)].wait_status;
  exit_code_ = exit_code_of(wait_status);
  if (!any_running()) return;
  stage_ = RankStage::kGrace;
  next_stage_ns_ = now_ns() + to_ns(options_.grace_s);
  say(fmt::format("rank {} failed with {}; rank {} may go on for {:g} s", rank,
                  how_it_ended(wait_status), running_ranks(), options_.grace_s));
}

void Supervisor::escalate_if_due() {
  const int64_t now = now_ns();
  if (stage_ == RankStage::kRunning && time_limit_ns_ != 0 && now >= time_limit_ns_ &&
      any_running()) {
    end_all(SIGTERM,
            fmt::format("the time limit of {:g} s is over; rank {} was still running",
                        options_.timeout_s, running_ranks()),
            kExitTimeLimit);
  }
  if (next_stage_ns_ == 0 || now < next_stage_ns_ || !any_running()) return;
  if (stage_ == RankStage::kGrace) {
    say(fmt::format("ending rank {}", running_ranks()));
    signal_all(SIGTERM);
    stage_ = RankStage::kAsked;
    next_stage_ns_ = now + kTermToKillNs;
  } else {
    signal_all(SIGKILL);
    stage_ = RankStage::kKilled;
    next_stage_ns_ = 0;
  }
}

void Supervisor::end_all(int signal_number, std::string_view why, int exit_code) {
  if (first_failure_ < 0) {
    exit_code_ = exit_code;
    ended_because_ = why;
  }
  signal_all(signal_number);
  stage_ = RankStage::kAsked;
  next_stage_ns_ = now_ns() + to_ns(options_.grace_s);
}

void Supervisor::signal_all(int signal_number) {
  for (const Rank& rank : ranks_) {
    if (rank.pid > 0) kill(-rank.pid, signal_number);
  }
}

void Supervisor::close_leftover_streams() {
  const int64_t now = now_ns();
  for (Rank& rank : ranks_) {
    if (rank.pid >= 0 || now < rank.ended_ns + kDrainNs) continue;
    for (Relay* relay : {rank.out.get(), rank.err.get()}) {
      if (relay != nullptr) relay->close();
    }
  }
}

bool Supervisor::everything_done() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
    return rank.pid < 0 && (rank.out == nullptr || rank.out->source() < 0) &&
           rank.err->source() < 0;
  });
}

bool Supervisor::any_running() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.pid > 0; });
}

std::string Supervisor::running_ranks() const {
  std::string list;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].pid > 0) list += fmt::format("{}{}", list.empty() ? "" : ", ", r);
  }
  return list;
}

void Supervisor::say(const std::string& text) const {
  write_all(STDERR_FILENO, fmt::format("{}sotto-run: {}\n", redraw_ ? "\r\x1b[K" : "", text));
}

void Supervisor::show_first_failure() const {
  if (!ended_because_.empty()) say(ended_because_);
  if (first_failure_ < 0) return;
  const Rank& rank = ranks_[static_cast<size_t>(first_failure_)];
  const bool use_err = !rank.err->last_lines().empty() || rank.out == nullptr;
  const std::deque<std::string>& lines = (use_err ? rank.err : rank.out)->last_lines();
  std::string text = fmt::format("rank {} failed first, with {}; ", first_failure_,
                                 how_it_ended(rank.wait_status));
  if (lines.empty()) {
    say(text + (rank.out == nullptr ? "its output is above" : "it printed nothing"));
    return;
  }
  text += "its last messages:";
  for (const std::string& line : lines) text += fmt::format("\n[{}] {}", first_failure_, line);
  say(text);
}

}  // namespace sotto_cli
