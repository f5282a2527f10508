// sotto-tunlink: carries the packets of a network lab whose kernel has no netem. Every host has a
// TUN device instead of one end of a veth pair, and this one process is what connects them
// (wires.h). integration/netns/lab.sh starts and controls it; see there for what the settings mean.
//
// It runs in the network namespace of the lab's bridge, which is also where its control socket
// lives (an abstract one), so that labs are apart and nothing is left on disk. It ends on SIGTERM,
// when that namespace has lost its name, and when the process that owns the lab has ended.
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "integration/netns/frame.h"
#include "integration/netns/wires.h"

namespace sotto_netns {
namespace {

constexpr const char* kUsage =
    "usage: sotto-tunlink run --lab NETNS [--seed N] [--owner PID] HOST..   go to the background\n"
    "       sotto-tunlink set BITS_PER_S BURST_BYTES QUEUE_BYTES DELAY_NS LOSS_PPM\n"
    "       sotto-tunlink part [NUMBER..]   these hosts are apart from the others; none: heal\n"
    "       sotto-tunlink counters\n"
    "NETNS: file of the namespace that it is started in. HOST: NUMBER,NETNS,ADDRESS[,ADDRESS..]\n"
    "Used by integration/netns/lab.sh.\n";

constexpr const char* kDevice = "eth0";
constexpr const char* kControlName = "sotto-tunlink";  // in the abstract namespace
constexpr size_t kMaxFrame = Frame::kHeader + 65536;
constexpr size_t kMaxMessage = 4096;
constexpr int kReadsPerTurn = 64;  // from one host before the others have their turn
constexpr int64_t kNsPerS = 1'000'000'000;
// The shortest sleep. A full bucket holds more than what passes meanwhile, so a rate is kept, and a
// fast link is not served packet by packet.
constexpr int64_t kTickNs = 50'000;

[[noreturn]] void fail(const std::string& text) { throw std::runtime_error(text); }
[[noreturn]] void fail_errno(const std::string& doing) {
  fail(doing + ": " + std::strerror(errno));
}

int64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * kNsPerS + t.tv_nsec;
}

uint64_t number(const std::string& what, const std::string& text, uint64_t most) {
  uint64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, failed] = std::from_chars(text.data(), end, value);
  if (failed != std::errc() || stop != end || value > most)
    fail(what + " is '" + text + "', expected 0 to " + std::to_string(most));
  return value;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

Address parse_address(const std::string& text) {
  Address address{};
  if (inet_pton(AF_INET6, text.c_str(), address.data()) == 1) return address;
  address = {};
  address[10] = address[11] = 0xff;
  if (inet_pton(AF_INET, text.c_str(), address.data() + 12) != 1)
    fail("'" + text + "' is not an IPv4 or IPv6 address");
  return address;
}

// ---- namespaces and devices ----

int open_namespace(const std::string& file) {
  const int fd = open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail_errno("cannot open the network namespace " + file);
  return fd;
}

void enter_namespace(int fd, const std::string& file) {
  if (setns(fd, CLONE_NEWNET) != 0) fail_errno("cannot enter the network namespace " + file);
}

int open_tun_here() {
  const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) fail_errno("cannot open /dev/net/tun, which delay and loss need without netem");
  ifreq request{};
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  std::strncpy(request.ifr_name, kDevice, IFNAMSIZ - 1);
  if (ioctl(fd, TUNSETIFF, &request) != 0)
    fail_errno(std::string("cannot make the TUN device ") + kDevice);
  return fd;
}

// Whether the host may hand over what becomes several packets in one piece, as it does with network
// cards. Tens of times fewer reads, writes and passes through the kernel's TCP; but nothing smaller
// than a piece can be lost then.
void offload_segmentation(int tun, bool offload) {
  const unsigned features = offload ? TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 : 0;
  if (ioctl(tun, TUNSETOFFLOAD, features) != 0)
    fail_errno(std::string("cannot set segmentation offload of the TUN device ") + kDevice);
}

// The device stays in the host's namespace; this process comes back to its own.
int open_tun(const std::string& file) {
  const int home = open_namespace("/proc/self/ns/net");
  const int host = open_namespace(file);
  enter_namespace(host, file);
  const int tun = open_tun_here();
  enter_namespace(home, "of the bridge");
  close(host);
  close(home);
  return tun;
}

// ---- control socket: one datagram is a request, another its answer ----

sockaddr_un control_address(socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t bytes = std::strlen(kControlName);
  std::memcpy(address.sun_path + 1, kControlName, bytes);  // after a 0: abstract
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
  return address;
}

int control_socket() {
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) fail_errno("cannot make a socket");
  return fd;
}

int listen_for_control() {
  const int fd = control_socket();
  socklen_t length = 0;
  const sockaddr_un address = control_address(&length);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0)
    fail_errno("cannot make the control socket (does one run in this namespace already?)");
  return fd;
}

// Sends a request to the process that runs in this namespace and prints its answer.
int request(const std::string& text) {
  constexpr timeval kPatience{10, 0};
  const int fd = control_socket();
  socklen_t length = 0;
  const sockaddr_un address = control_address(&length);
  const sa_family_t any = AF_UNIX;  // the kernel chooses a name, which the answer goes to
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof kPatience);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&any), sizeof any) != 0 ||
      connect(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0)
    fail_errno("no sotto-tunlink runs in this network namespace");
  if (send(fd, text.data(), text.size(), MSG_NOSIGNAL) < 0) fail_errno("cannot send the request");
  std::vector<char> answer(kMaxMessage);
  const ssize_t bytes = recv(fd, answer.data(), answer.size(), 0);
  if (bytes < 0) fail_errno("no answer");
  close(fd);
  const std::string reply(answer.data(), static_cast<size_t>(bytes));
  if (reply.rfind("error: ", 0) == 0) fail(reply.substr(std::strlen("error: ")));
  if (!reply.empty()) std::printf("%s\n", reply.c_str());
  return 0;
}

// ---- the process that carries packets ----

struct Host {
  uint64_t number = 0;
  int tun = -1;
};

struct TunnelOptions {
  std::string lab;
  uint64_t seed = 1;
  pid_t owner = 0;  // 0: nobody
  std::vector<std::string> hosts;
};

class Tunlink {
 public:
  explicit Tunlink(const TunnelOptions& options);
  void run();

 private:
  enum Special { kControl, kSignal, kOwner, kSpecials };  // in polled_, before the hosts

  void add_host(const std::string& text);
  void watch_signals();
  void watch_owner(pid_t owner);
  bool lab_is_there() const;
  void read_packets(size_t host);
  void answer_request();
  std::string carry_out(const std::vector<std::string>& words);
  void set(const std::vector<std::string>& words);
  void part(const std::vector<std::string>& words);
  std::string counters() const;

  Wires wires_;
  std::vector<Host> hosts_;
  std::vector<pollfd> polled_;
  std::string lab_file_;
  struct stat lab_ = {};
  uint64_t undelivered_ = 0;  // the device was down
  std::vector<uint8_t> buffer_ = std::vector<uint8_t>(kMaxFrame);
};

Tunlink::Tunlink(const TunnelOptions& options)
    : wires_(options.seed), polled_(kSpecials), lab_file_(options.lab) {
  if (stat("/proc/self/ns/net", &lab_) != 0) fail_errno("/proc/self/ns/net");
  if (!lab_is_there()) fail(lab_file_ + " is not the network namespace that this runs in");
  polled_[kControl] = {listen_for_control(), POLLIN, 0};
  watch_signals();
  watch_owner(options.owner);
  for (const std::string& host : options.hosts) add_host(host);
}

void Tunlink::add_host(const std::string& text) {
  const std::vector<std::string> parts = split(text, ',');
  if (parts.size() < 3) fail("host '" + text + "': expected NUMBER,NETNS,ADDRESS[,ADDRESS..]");
  std::vector<Address> addresses;
  for (size_t i = 2; i < parts.size(); ++i) addresses.push_back(parse_address(parts[i]));
  Host host;
  host.number = number("the number of a host", parts[0], UINT32_MAX);
  host.tun = open_tun(parts[1]);
  polled_.push_back({host.tun, POLLIN, 0});
  hosts_.push_back(host);
  wires_.add_host(addresses);
}

void Tunlink::watch_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT}) sigaddset(&set, signal);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  polled_[kSignal] = {signalfd(-1, &set, SFD_CLOEXEC), POLLIN, 0};
  if (polled_[kSignal].fd < 0) fail_errno("signalfd");
}

void Tunlink::watch_owner(pid_t owner) {
  polled_[kOwner] = {-1, POLLIN, 0};
  if (owner == 0) return;
  polled_[kOwner].fd = static_cast<int>(syscall(SYS_pidfd_open, owner, 0));
  if (polled_[kOwner].fd < 0) fail_errno("the owner of the lab, process " + std::to_string(owner));
}

bool Tunlink::lab_is_there() const {
  struct stat now = {};
  return stat(lab_file_.c_str(), &now) == 0 && now.st_ino == lab_.st_ino &&
         now.st_dev == lab_.st_dev;
}

void Tunlink::read_packets(size_t host) {
  for (int i = 0; i < kReadsPerTurn; ++i) {
    const ssize_t bytes = read(hosts_[host].tun, buffer_.data(), buffer_.size());
    if (bytes > 0) {
      wires_.send(host, buffer_.data(), static_cast<size_t>(bytes));
    } else if (bytes == 0 || errno == EAGAIN) {
      return;
    } else if (errno != EINTR) {
      polled_[kSpecials + host].fd = -1;  // the device is gone
      return;
    }
  }
}

void Tunlink::set(const std::vector<std::string>& words) {
  constexpr uint64_t kMostBytes = uint64_t{1} << 40;
  if (words.size() != 6) fail("set needs five numbers");
  WireSettings settings;
  settings.bits_per_second = static_cast<double>(number("the rate", words[1], 1'000'000'000'000));
  settings.burst_bytes = number("the burst", words[2], kMostBytes);
  settings.queue_bytes = number("the queue", words[3], kMostBytes);
  settings.delay_ns = static_cast<int64_t>(number("the delay", words[4], 3600 * kNsPerS));
  settings.loss_ppm = static_cast<uint32_t>(number("the loss", words[5], 1'000'000));
  // A loss is one packet.
  for (const Host& host : hosts_) offload_segmentation(host.tun, settings.loss_ppm == 0);
  wires_.set(settings, now_ns());
}

void Tunlink::part(const std::vector<std::string>& words) {
  std::vector<bool> apart(hosts_.size());
  for (size_t w = 1; w < words.size(); ++w) {
    const uint64_t wanted = number("the number of a host", words[w], UINT32_MAX);
    const auto found = std::find_if(hosts_.begin(), hosts_.end(),
                                    [&](const Host& host) { return host.number == wanted; });
    if (found == hosts_.end()) fail("no host " + words[w]);
    apart[static_cast<size_t>(found - hosts_.begin())] = true;
  }
  wires_.part(apart);
}

std::string Tunlink::counters() const {
  const WireCounters& c = wires_.counters();
  return std::to_string(c.delivered - undelivered_) + " packets delivered, " +
         std::to_string(c.lost) + " lost, " + std::to_string(c.queue_full) +
         " dropped by full queues, " + std::to_string(c.cut) + " by partitions";
}

std::string Tunlink::carry_out(const std::vector<std::string>& words) {
  if (words[0] == "set") {
    set(words);
  } else if (words[0] == "part") {
    part(words);
  } else if (words[0] == "counters" && words.size() == 1) {
    return counters();
  } else {
    fail("unknown request '" + words[0] + "'");
  }
  return "";
}

void Tunlink::answer_request() {
  sockaddr_un from{};
  socklen_t length = sizeof from;
  std::vector<char> text(kMaxMessage);
  const ssize_t bytes = recvfrom(polled_[kControl].fd, text.data(), text.size(), MSG_DONTWAIT,
                                 reinterpret_cast<sockaddr*>(&from), &length);
  if (bytes < 0) return;
  std::string answer;
  try {
    answer = carry_out(split(std::string(text.data(), static_cast<size_t>(bytes)), ' '));
  } catch (const std::exception& e) {
    answer = std::string("error: ") + e.what();
  }
  // Who has gone away meanwhile needs no answer.
  sendto(polled_[kControl].fd, answer.data(), answer.size(), MSG_DONTWAIT | MSG_NOSIGNAL,
         reinterpret_cast<const sockaddr*>(&from), length);
}

void Tunlink::run() {
  const auto deliver = [this](size_t host, const uint8_t* frame, size_t bytes) {
    if (write(hosts_[host].tun, frame, bytes) < 0) ++undelivered_;
  };
  int64_t look_for_lab = now_ns();
  for (;;) {
    const int64_t next = wires_.advance(now_ns(), deliver);
    const int64_t now = now_ns();
    if (now >= look_for_lab) {
      if (!lab_is_there()) return;
      look_for_lab = now + kNsPerS;
    }
    int64_t sleep = look_for_lab - now;
    if (next >= 0) sleep = std::min(sleep, std::max(next - now, kTickNs));
    const timespec limit{sleep / kNsPerS, sleep % kNsPerS};
    if (ppoll(polled_.data(), polled_.size(), &limit, nullptr) < 0 && errno != EINTR)
      fail_errno("ppoll");
    if (polled_[kSignal].revents != 0 || polled_[kOwner].revents != 0) return;
    if (polled_[kControl].revents != 0) answer_request();
    for (size_t i = 0; i < hosts_.size(); ++i) {
      if (polled_[kSpecials + i].fd >= 0 && polled_[kSpecials + i].revents != 0) read_packets(i);
    }
  }
}

TunnelOptions parse_run(const std::vector<std::string>& words) {
  TunnelOptions options;
  size_t w = 1;
  for (; w < words.size() && words[w].rfind("--", 0) == 0; w += 2) {
    if (w + 1 == words.size()) fail(words[w] + " needs a value");
    const std::string& value = words[w + 1];
    if (words[w] == "--lab") {
      options.lab = value;
    } else if (words[w] == "--seed") {
      options.seed = number("--seed", value, UINT64_MAX);
    } else if (words[w] == "--owner") {
      options.owner = static_cast<pid_t>(number("--owner", value, INT32_MAX));
    } else {
      fail("unknown option " + words[w]);
    }
  }
  options.hosts.assign(words.begin() + static_cast<ptrdiff_t>(w), words.end());
  if (options.lab.empty() || options.hosts.empty()) fail("run needs --lab and hosts");
  return options;
}

// Returns when everything is set up; a child process goes on in the background.
int run_in_background(const TunnelOptions& options) {
  close_range(STDERR_FILENO + 1, ~0u, 0);  // a caller's pipe would stay open as long as the lab
  prctl(PR_SET_TIMERSLACK, 1);
  Tunlink tunlink(options);
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) fail_errno("fork");
  if (child > 0) _exit(0);
  setsid();
  if (chdir("/") != 0) return 1;
  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(nothing, fd);
  tunlink.run();
  return 0;
}

int command(const std::vector<std::string>& words) {
  if (words.empty()) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  if (words[0] == "-h" || words[0] == "--help") {
    std::fputs(kUsage, stdout);
    return 0;
  }
  if (words[0] == "run") return run_in_background(parse_run(words));
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  if (text.size() > kMaxMessage) fail("the request is too long");
  return request(text);
}

}  // namespace
}  // namespace sotto_netns

int main(int argc, char** argv) {
  try {
    return sotto_netns::command({argv + 1, argv + argc});
  } catch (const std::exception& e) {
    std::fprintf(stderr, "sotto-tunlink: %s\n", e.what());
    return 1;
  }
}
