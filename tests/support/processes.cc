#include "tests/support/processes.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>

#include "core/base/clock.h"

namespace sotto::test {
namespace {

// In a rank's process: lines to the parent; one byte back lets the rank go on.
constexpr int kTellFd = 3;
constexpr int kGoFd = 4;

std::map<std::string, RankMain>& mains() {
  static auto* const all = new std::map<std::string, RankMain>;  // filled before main, in any order
  return *all;
}

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  ~Fd() { reset(); }
  Fd(Fd&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  Fd& operator=(Fd&& o) noexcept {
    reset();
    fd_ = std::exchange(o.fd_, -1);
    return *this;
  }
  int get() const { return fd_; }
  void reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

[[noreturn]] void fail_errno(const char* what) {
  throw RankError(fmt::format("{}: {}", what, std::strerror(errno)));
}

// Above the numbers that a rank's process gives a meaning to.
Fd lifted(int fd) {
  const int high = fcntl(fd, F_DUPFD_CLOEXEC, 10);
  ::close(fd);
  if (high < 0) fail_errno("fcntl");
  return Fd(high);
}

struct Pipe {
  Fd read, write;
};

Pipe make_pipe() {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) fail_errno("pipe2");
  Fd read = lifted(fds[0]);
  return {std::move(read), lifted(fds[1])};
}

void write_line(std::string line) {
  std::replace(line.begin(), line.end(), '\n', ' ');
  line += '\n';
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t n = ::write(kTellFd, line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // the parent is gone; so will be this process
    done += static_cast<size_t>(n);
  }
}

std::string argument_of(int argc, char** argv, const std::string& name,
                        const std::string& fallback = "") {
  for (int i = 1; i + 1 < argc; ++i) {
    if (name == argv[i]) return argv[i + 1];
  }
  return fallback;
}

}  // namespace

void ProcessRank::at(const std::string& point) const {
  write_line("at " + point);
  if (std::find(stop_at.begin(), stop_at.end(), point) == stop_at.end()) return;
  char byte = 0;
  while (::read(kGoFd, &byte, 1) < 0 && errno == EINTR) {
  }
}

void ProcessRank::say(const std::string& text) const { write_line("say " + text); }

bool register_rank_main(const std::string& name, RankMain main) {
  if (!mains().emplace(name, std::move(main)).second) {
    std::fprintf(stderr, "two rank mains are named %s\n", name.c_str());
    std::abort();
  }
  return true;
}

bool is_rank_process(int argc, char** argv) {
  return argc > 2 && std::strcmp(argv[1], "--rank-main") == 0;
}

int run_rank_process(int argc, char** argv) {
  ProcessRank self;
  self.rank = std::atoi(argument_of(argc, argv, "--rank", "0").c_str());
  self.size = std::atoi(argument_of(argc, argv, "--size", "1").c_str());
  self.argument = argument_of(argc, argv, "--argument");
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--stop-at") == 0) self.stop_at.push_back(argv[i + 1]);
  }
  const auto it = mains().find(argv[2]);
  if (it == mains().end()) {
    std::fprintf(stderr, "no rank main is named %s\n", argv[2]);
    return 2;
  }
  try {
    return it->second(self);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}

struct Processes::Process {
  pid_t pid = -1;
  Fd pidfd, output, tell, go;
  std::string partial;
  std::vector<std::string> points;
  size_t points_seen = 0;
  std::deque<std::string> messages;
  bool ended = false;
  int last_signal = 0;
  Exit exit;
};

Processes::Processes(const std::string& main_name, int size, const ProcessOptions& options) {
  ends_at_ns_ = Clock::monotonic().now_ns() + options.timeout_ms * 1'000'000;
  for (int rank = 0; rank < size; ++rank) start(main_name, size, rank, options);
}

Processes::~Processes() {
  for (auto& p : processes_) {
    if (p->ended) continue;
    ::kill(p->pid, SIGKILL);
    waitpid(p->pid, nullptr, 0);
  }
}

void Processes::start(const std::string& main_name, int size, int rank,
                      const ProcessOptions& options) {
  std::vector<std::string> args = {
      "/proc/self/exe", "--rank-main",        main_name,    "--rank",        std::to_string(rank),
      "--size",         std::to_string(size), "--argument", options.argument};
  const std::string mine = std::to_string(rank) + ":";
  for (const std::string& stop : options.stop_at) {
    if (stop.rfind(mine, 0) == 0) args.insert(args.end(), {"--stop-at", stop.substr(mine.size())});
  }
  std::vector<std::string> environment = options.environment;
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string_view entry = *e;
    const std::string_view name = entry.substr(0, entry.find('=') + 1);
    const bool replaced = std::any_of(options.environment.begin(), options.environment.end(),
                                      [&](const std::string& o) { return o.rfind(name, 0) == 0; });
    if (!replaced) environment.emplace_back(entry);
  }
  std::vector<char*> argv, envp;
  for (std::string& a : args) argv.push_back(a.data());
  for (std::string& e : environment) envp.push_back(e.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);

  auto p = std::make_unique<Process>();
  const int memory = memfd_create("rank-output", MFD_CLOEXEC);
  if (memory < 0) fail_errno("memfd_create");
  p->output = lifted(memory);
  Pipe tell = make_pipe();
  Pipe go = make_pipe();
  const pid_t parent = getpid();
  p->pid = fork();
  if (p->pid < 0) fail_errno("fork");
  if (p->pid == 0) {  // only async-signal-safe calls from here to exec
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    dup2(p->output.get(), 1);
    dup2(p->output.get(), 2);
    dup2(tell.write.get(), kTellFd);
    dup2(go.read.get(), kGoFd);
    execve(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  p->pidfd = Fd(static_cast<int>(syscall(SYS_pidfd_open, p->pid, 0)));
  if (p->pidfd.get() < 0) fail_errno("pidfd_open");
  p->tell = std::move(tell.read);
  p->go = std::move(go.write);
  processes_.push_back(std::move(p));
}

Processes::Process& Processes::at(int rank) const {
  return *processes_.at(static_cast<size_t>(rank));
}

void Processes::read_lines(Process& p) {
  char buffer[4096];
  const ssize_t n = ::read(p.tell.get(), buffer, sizeof buffer);
  if (n <= 0) {
    if (n == 0) p.tell.reset();
    return;
  }
  p.partial.append(buffer, static_cast<size_t>(n));
  for (size_t end; (end = p.partial.find('\n')) != std::string::npos; p.partial.erase(0, end + 1)) {
    const std::string line = p.partial.substr(0, end);
    if (line.rfind("at ", 0) == 0) p.points.push_back(line.substr(3));
    if (line.rfind("say ", 0) == 0) p.messages.push_back(line.substr(4));
  }
}

void Processes::reap(int rank) {
  Process& p = at(rank);
  int status = 0;
  if (waitpid(p.pid, &status, WNOHANG) != p.pid) return;
  p.ended = true;
  if (WIFEXITED(status)) p.exit.status = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) p.exit.signal = WTERMSIG(status);
  p.exit.killed = p.exit.signal != 0 && p.exit.signal == p.last_signal;
  p.pidfd.reset();
  ended_.push_back(rank);
}

// Waits for anything to happen; throws when the time is over.
void Processes::pump(int rank, const char* doing) {
  std::vector<pollfd> fds;
  for (const auto& p : processes_) {  // a negative fd is skipped by poll
    fds.push_back({p->tell.get(), POLLIN, 0});
    fds.push_back({p->ended ? -1 : p->pidfd.get(), POLLIN, 0});
  }
  const int64_t left_ms = (ends_at_ns_ - Clock::monotonic().now_ns()) / 1'000'000;
  const int n = left_ms <= 0 ? 0
                             : ::poll(fds.data(), fds.size(),
                                      static_cast<int>(std::min<int64_t>(left_ms, 1 << 30)));
  if (n == 0)
    throw RankError(fmt::format("time is over {} rank {}\n{}", doing, rank, prefixed_output()));
  for (size_t i = 0; i < processes_.size(); ++i) {
    if ((fds[2 * i].revents & (POLLIN | POLLHUP)) != 0) read_lines(*processes_[i]);
    // What it told before its end comes first.
    else if (fds[2 * i + 1].revents != 0)
      reap(static_cast<int>(i));
  }
}

void Processes::await(int rank, const std::string& point) {
  Process& p = at(rank);
  for (;;) {
    const auto from = p.points.begin() + static_cast<ptrdiff_t>(p.points_seen);
    const auto it = std::find(from, p.points.end(), point);
    if (it != p.points.end()) {
      p.points_seen = static_cast<size_t>(it - p.points.begin()) + 1;
      return;
    }
    if (p.ended) {
      throw RankError(fmt::format("rank {} ended before it came to \"{}\"\n{}", rank, point,
                                  prefixed_output()));
    }
    pump(rank, ("waiting for \"" + point + "\" of").c_str());
  }
}

void Processes::go(int rank) {
  const char byte = 'g';
  if (::write(at(rank).go.get(), &byte, 1) != 1) fail_errno("write");
}

std::string Processes::message(int rank) {
  Process& p = at(rank);
  while (p.messages.empty()) {
    if (p.ended)
      throw RankError(fmt::format("rank {} ended without a message\n{}", rank, prefixed_output()));
    pump(rank, "waiting for a message of");
  }
  std::string text = std::move(p.messages.front());
  p.messages.pop_front();
  return text;
}

const Exit& Processes::wait(int rank) {
  while (!at(rank).ended) pump(rank, "waiting for the end of");
  return at(rank).exit;
}

void Processes::wait_all() {
  for (size_t i = 0; i < processes_.size(); ++i) wait(static_cast<int>(i));
}

void Processes::kill(int rank, int signal) {
  Process& p = at(rank);
  if (p.ended)
    throw RankError(fmt::format("rank {} has ended already\n{}", rank, prefixed_output()));
  p.last_signal = signal;
  if (::kill(p.pid, signal) != 0) fail_errno("kill");
}

pid_t Processes::pid(int rank) const { return at(rank).pid; }

bool Processes::running(int rank) {
  if (!at(rank).ended) reap(rank);
  return !at(rank).ended;
}

const Exit& Processes::exit_of(int rank) const { return at(rank).exit; }

std::string Processes::failure() const {
  for (const int rank : ended_) {
    const Exit& e = at(rank).exit;
    if (e.ok() || e.killed) continue;
    const std::string how =
        e.signal != 0 ? fmt::format("was ended by signal {} ({})", e.signal, strsignal(e.signal))
                      : fmt::format("ended with {}", e.status);
    return fmt::format("rank {} {}: {}", rank, how, output(rank));
  }
  return "";
}

std::string Processes::output(int rank) const {
  const int fd = at(rank).output.get();
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = pread(fd, buffer, sizeof buffer, static_cast<off_t>(text.size()))) > 0;) {
    text.append(buffer, static_cast<size_t>(n));
  }
  return text;
}

std::string Processes::prefixed_output() const {
  std::string all;
  for (size_t i = 0; i < processes_.size(); ++i) {
    const std::string text = output(static_cast<int>(i));
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find('\n', at), text.size());
      all += fmt::format("[{}] {}\n", i, text.substr(at, end - at));
      at = end + 1;
    }
  }
  return all;
}

}  // namespace sotto::test
