#include "integration/cli/supervisor.h"

#include <fmt/core.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "integration/cli/local_ranks.h"
#include "integration/cli/waiting.h"
#include "integration/cli/words.h"

namespace sotto_cli {
namespace {

constexpr int64_t kTermToKillNs = 5 * kNsPerS;  // after SIGTERM
// Bytes that may wait for a reader before ranks have to wait too, and before those of ranks that
// are being ended are lost.
constexpr size_t kMostUnread = size_t{1} << 20, kMostUnreadAtEnd = size_t{64} << 20;

bool failed(int wait_status) { return !WIFEXITED(wait_status) || WEXITSTATUS(wait_status) != 0; }

int exit_code_of(int wait_status) {
  return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : kExitSignal + WTERMSIG(wait_status);
}

std::vector<std::unique_ptr<RankRunner>> make_runners(const RunOptions& options, Watcher& watcher,
                                                      Sink& messages) {
  RankGroup group;
  group.count = group.world = options.ranks;
  group.words = options.wrapper;
  group.words.insert(group.words.end(), options.command.begin(), options.command.end());
  group.environment = options.environment;
  std::vector<std::unique_ptr<RankRunner>> runners;
  if (options.hosts.empty()) {
    runners.push_back(std::make_unique<LocalRanks>(std::move(group), options.raw_rank, watcher));
    return runners;
  }
  Job job;
  job.group = std::move(group);
  job.folder = working_directory();
  job.has_others = options.hosts.size() > 1;
  job.silence_ns = to_ns(options.host_timeout_s);
  const auto heartbeats = std::make_shared<Heartbeats>(heartbeat_interval_ns(job.silence_ns));
  for (const Host& host : options.hosts) {
    job.host = host.name;
    job.group.count = host.slots;
    job.has_rendezvous = runners.empty() && options.rendezvous.empty();
    runners.push_back(
        std::make_unique<RemoteRanks>(options.shell, host, job, heartbeats, watcher, messages));
    job.group.first += host.slots;
  }
  return runners;
}

}  // namespace

Supervisor::Supervisor(RunOptions options)
    : options_(std::move(options)),
      ranks_(static_cast<size_t>(options_.ranks)),
      redraw_(options_.raw_rank >= 0 && isatty(STDOUT_FILENO) != 0) {}

Supervisor::~Supervisor() {
  if (signal_fd_ >= 0) close(signal_fd_);
}

int Supervisor::run() {
  signal_fd_ = open_signal_fd();
  if (signal_fd_ < 0 || !watcher_.start()) {
    say(fmt::format("cannot start: {}", strerror(errno)));
    return kExitOwnFailure;
  }
  if (options_.timeout_s > 0) time_limit_ns_ = now_ns() + to_ns(options_.timeout_s);
  runners_ = make_runners(options_, watcher_, err_);
  wait_until_ready();
  if (stage_ == RankStage::kRunning) start_all();
  while (!everything_done()) wait_for_events();
  close_runners();
  watcher_.stop();
  finish_output();
  show_first_failure();
  finish_output();
  const bool lost_output = out_.failed() || err_.failed();
  return exit_code_ == 0 && lost_output ? kExitOwnFailure : exit_code_;
}

void Supervisor::wait_until_ready() {
  while (stage_ == RankStage::kRunning &&
         !std::all_of(runners_.begin(), runners_.end(),
                      [](const auto& runner) { return runner->ready(); })) {
    wait_for_events();
  }
}

void Supervisor::start_all() {
  const std::string rendezvous =
      options_.rendezvous.empty() ? runners_.front()->rendezvous() : options_.rendezvous;
  started_ = true;
  for (const auto& runner : runners_) {
    if (stage_ != RankStage::kRunning) return;
    const RankGroup& group = runner->group();
    for (int32_t r = group.first; r < group.first + group.count; ++r) expect_rank(r);
    runner->start(rendezvous, *this);
  }
}

void Supervisor::expect_rank(int32_t r) {
  Rank& rank = ranks_[static_cast<size_t>(r)];
  const std::string prefix = fmt::format("{}[{}] ", redraw_ ? "\r\x1b[K" : "", r);
  const bool raw = r == options_.raw_rank;
  if (!raw || !options_.hosts.empty()) rank.out = std::make_unique<Relay>(out_, prefix, raw);
  rank.err = std::make_unique<Relay>(err_, prefix, raw);
  rank.running = true;
}

int64_t Supervisor::due_ns() const {
  int64_t due = kNever;
  for (const int64_t at : {next_stage_ns_, stage_ == RankStage::kRunning ? time_limit_ns_ : 0}) {
    if (at != 0) due = std::min(due, at);
  }
  for (const auto& runner : runners_) due = std::min(due, runner->due_ns());
  return due;
}

void Supervisor::wait_for_events() {
  std::vector<pollfd> fds{{signal_fd_, POLLIN, 0}};
  for (const Sink* sink : {&out_, &err_}) {
    if (sink->queued() != 0) fds.push_back({sink->fd(), POLLOUT, 0});
  }
  // Ranks that are being ended can always print.
  const bool held = queued() > kMostUnread && stage_ < RankStage::kAsked;
  for (const auto& runner : runners_) {
    runner->hold_output(held);
    runner->watch(fds);
  }
  poll_until(fds, due_ns());
  for (const int number : take_signals(signal_fd_)) on_signal(number);
  for (Sink* sink : {&out_, &err_}) sink->flush();
  for (const auto& runner : runners_) runner->handle(fds, *this);
  look_for_failure();
  escalate_if_due();
}

void Supervisor::on_signal(int number) {
  if (number == SIGCHLD) return;  // runners look at every child anyway: signals of one kind merge
  if (number == SIGTSTP) return stop_as_asked();
  if (number == SIGUSR1 || number == SIGUSR2) return signal_all(number);
  if (stage_ >= RankStage::kAsked) {
    signal_all(SIGKILL);
    stage_ = RankStage::kKilled;
    next_stage_ns_ = 0;
    return;
  }
  end_all(number, fmt::format("ended by signal {} ({})", number, strsignal(number)),
          kExitSignal + number);
}

// As the signal would have done, had it not been taken.
void Supervisor::stop_as_asked() {
  for (const auto& runner : runners_) runner->pause(true);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTSTP);
  raise(SIGTSTP);
  sigprocmask(SIG_UNBLOCK, &set, nullptr);  // stands here until SIGCONT
  sigprocmask(SIG_BLOCK, &set, nullptr);
  for (const auto& runner : runners_) runner->pause(false);
}

void Supervisor::on_output(int32_t rank, Stream stream, std::string_view bytes) {
  Rank& from = ranks_[static_cast<size_t>(rank)];
  Relay* relay = stream == Stream::kOut ? from.out.get() : from.err.get();
  if (relay == nullptr) return;
  if (stage_ >= RankStage::kAsked && queued() > kMostUnreadAtEnd) {
    for (Sink* sink : {&out_, &err_}) sink->give_up();
  }
  relay->take(bytes);
}

void Supervisor::on_end(int32_t rank, int wait_status) {
  Rank& ended = ranks_[static_cast<size_t>(rank)];
  ended.running = false;
  ended.wait_status = wait_status;
  if (failed(wait_status)) failures_.push_back(rank);
}

void Supervisor::on_closed(int32_t rank) {
  Rank& closed = ranks_[static_cast<size_t>(rank)];
  closed.running = false;
  closed.closed = true;
  for (Relay* relay : {closed.out.get(), closed.err.get()}) {
    if (relay != nullptr) relay->finish();
  }
}

void Supervisor::on_start_failed(int32_t rank, int error, const std::string& host) {
  if (stage_ != RankStage::kRunning) return;
  const std::string& program =
      options_.wrapper.empty() ? options_.command.front() : options_.wrapper.front();
  say(fmt::format("cannot start rank {}{}: {}: {}", rank, host.empty() ? "" : " on host " + host,
                  join_words({program}), strerror(error)));
  if (error == ENOENT) {
    exit_code_ = kExitNotFound;
  } else {
    const bool own = error == EAGAIN || error == EMFILE || error == ENFILE || error == ENOMEM;
    exit_code_ = own ? kExitOwnFailure : kExitCannotRun;
  }
  signal_all(SIGKILL);
  stage_ = RankStage::kKilled;
}

void Supervisor::on_host_failed(const std::string& text) {
  if (first_failure_ >= 0 || stage_ != RankStage::kRunning) return;
  exit_code_ = kExitOwnFailure;
  ended_because_ = text;
  if (started_) {
    enter_grace(text);
  } else {
    stage_ = RankStage::kKilled;
  }
}

void Supervisor::look_for_failure() {
  const std::vector<int32_t> failures = std::exchange(failures_, {});
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
  enter_grace(fmt::format("rank {} failed with {}", rank, how_it_ended(wait_status)));
}

void Supervisor::enter_grace(const std::string& why) {
  if (!any_running()) return;
  stage_ = RankStage::kGrace;
  next_stage_ns_ = now_ns() + to_ns(options_.grace_s);
  say(fmt::format("{}; rank {} may go on for {:g} s", why, running_ranks(), options_.grace_s));
}

void Supervisor::escalate_if_due() {
  const int64_t now = now_ns();
  if (stage_ == RankStage::kRunning && time_limit_ns_ != 0 && now >= time_limit_ns_ &&
      (any_running() || !started_ || queued() != 0)) {
    std::string when = "output had not been read";
    if (!started_) when = "no rank had been started";
    if (any_running()) when = fmt::format("rank {} was still running", running_ranks());
    end_all(SIGTERM, fmt::format("the time limit of {:g} s is over; {}", options_.timeout_s, when),
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
  if (first_failure_ < 0 && ended_because_.empty()) {
    exit_code_ = exit_code;
    ended_because_ = why;
  }
  signal_all(signal_number);
  stage_ = RankStage::kAsked;
  next_stage_ns_ = now_ns() + to_ns(options_.grace_s);
}

void Supervisor::signal_all(int signal_number) {
  for (const auto& runner : runners_) runner->signal_all(signal_number);
}

void Supervisor::close_runners() {
  for (const auto& runner : runners_) runner->close();
  while (!std::all_of(runners_.begin(), runners_.end(),
                      [](const auto& runner) { return runner->gone(); })) {
    wait_for_events();
  }
}

// What has been asked to end waits for readers as long as ranks would get.
void Supervisor::finish_output() {
  if (stage_ == RankStage::kGrace) stage_ = RankStage::kRunning;  // the time limit counts again
  const bool asked = stage_ >= RankStage::kAsked;
  next_stage_ns_ = asked ? now_ns() + to_ns(options_.grace_s) : 0;
  while (queued() != 0 && (stage_ < RankStage::kAsked || now_ns() < next_stage_ns_))
    wait_for_events();
  for (Sink* sink : {&out_, &err_}) sink->give_up();
}

// A rank that has not been started is no concern.
bool Supervisor::everything_done() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
    return rank.closed || (!rank.running && rank.err == nullptr);
  });
}

bool Supervisor::any_running() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.running; });
}

std::string Supervisor::running_ranks() const {
  std::string list;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].running) list += fmt::format("{}{}", list.empty() ? "" : ", ", r);
  }
  return list;
}

void Supervisor::say(const std::string& text) {
  err_.write(fmt::format("{}sotto-run: {}\n", redraw_ ? "\r\x1b[K" : "", text));
}

void Supervisor::show_first_failure() {
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
