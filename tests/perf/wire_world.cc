#include "tests/perf/wire_world.h"

#include <errno.h>
#include <fmt/core.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "core/cpu/cpu_device.h"
#include "transports/tcp/tcp_backend.h"

namespace sotto::perf {
namespace {

constexpr int64_t kTimeoutUs = 60'000'000;
constexpr int64_t kNoHeartbeatMs = 3'600'000;

// "" or why there is no namespace of our own.
std::string enter_own_network() {
  if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0)
    return fmt::format("no network namespace of its own: {}", std::strerror(errno));
  const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq lo{};
  std::memcpy(lo.ifr_name, "lo", 3);
  const bool up = fd >= 0 && ::ioctl(fd, SIOCGIFFLAGS, &lo) == 0 &&
                  (lo.ifr_flags = static_cast<short>(lo.ifr_flags | IFF_UP),
                   ::ioctl(fd, SIOCSIFFLAGS, &lo) == 0);
  const std::string why = std::strerror(errno);
  if (fd >= 0) ::close(fd);
  // Inside the namespace without loopback nothing can run.
  if (!up) throw std::runtime_error("loopback of an own network namespace: " + why);
  // Without tail loss probes, which send data again when a busy machine is slow to acknowledge it.
  // Where this is not permitted the counter of resent segments tells.
  std::ofstream("/proc/sys/net/ipv4/tcp_early_retrans") << 0;
  return "";
}

void write_all(int fd, const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = ::write(fd, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    at += static_cast<size_t>(n);
  }
}

std::string read_all(int fd) {
  std::string text;
  char part[4096];
  for (;;) {
    const ssize_t n = ::read(fd, part, sizeof part);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return text;
    text.append(part, static_cast<size_t>(n));
  }
}

}  // namespace

std::string run_isolated(const std::function<std::string(const std::string& why_shared)>& work) {
  int ends[2];
  if (::pipe(ends) != 0) throw std::runtime_error(fmt::format("pipe: {}", std::strerror(errno)));
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error(fmt::format("fork: {}", std::strerror(errno)));
  if (child == 0) {
    ::close(ends[0]);
    int status = 0;
    std::string text;
    try {
      text = work(enter_own_network());
    } catch (const std::exception& e) {
      text = e.what();
      status = 1;
    }
    write_all(ends[1], text);
    ::_exit(status);
  }
  ::close(ends[1]);
  std::string text = read_all(ends[0]);
  ::close(ends[0]);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (WIFSIGNALED(status))
    throw std::runtime_error(
        fmt::format("the process of the ranks died: {}", ::strsignal(WTERMSIG(status))));
  if (WEXITSTATUS(status) != 0) throw std::runtime_error(text);
  return text;
}

InterfaceCount loopback_sent() {
  std::ifstream file("/proc/self/net/dev");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || line.substr(0, colon).find("lo") == std::string::npos)
      continue;
    std::istringstream numbers(line.substr(colon + 1));
    uint64_t received[8];
    InterfaceCount sent;
    for (uint64_t& number : received) numbers >> number;
    if (numbers >> sent.bytes >> sent.packets) return sent;
  }
  throw std::runtime_error("/proc/self/net/dev has no counters of lo");
}

uint64_t resent_segments() {
  std::ifstream file("/proc/self/net/snmp");
  std::string names, values;
  while (std::getline(file, names) && std::getline(file, values)) {
    if (names.rfind("Tcp:", 0) != 0) continue;
    std::istringstream name(names), value(values);
    for (std::string n, v; name >> n && value >> v;) {
      if (n == "RetransSegs") return std::stoull(v);
    }
  }
  throw std::runtime_error("/proc/self/net/snmp has no RetransSegs");
}

uint64_t header_bytes_per_packet() {
  constexpr uint64_t kIpv4 = 20, kTcp = 20, kTimestamps = 12;  // the option padded by two bytes
  std::ifstream file("/proc/sys/net/ipv4/tcp_timestamps");
  int mode = 0;
  if (!(file >> mode)) throw std::runtime_error("cannot read net.ipv4.tcp_timestamps");
  return kIpv4 + kTcp + (mode != 0 ? kTimestamps : 0);
}

WireWorld::WireWorld(int32_t size) : comms_(static_cast<size_t>(size)) {
  for (int32_t r = 0; r < size; ++r) {
    ContextOptions options;
    options.params.transport = "tcp";
    options.environment = process_environment();
    options.device = std::make_shared<CpuDevice>(1, SimdLevel::kAuto);
    // Signs of life would come or not come during a measurement.
    options.params.heartbeat_ms = kNoHeartbeatMs;
    options.backends["tcp"] = {
        [](const Params& common) { return make_tcp_backend(tcp_options(common, {})); },
        transport_row("tcp")};
    contexts_.push_back(std::make_shared<Context>(std::move(options)));
  }
  const Result<UniqueId> id = contexts_[0]->make_unique_id();
  if (!id.ok()) throw std::runtime_error(id.status().text());
  on_all([&](int32_t r) -> Status {
    CommConfig config;
    config.rank = r;
    config.size = size;
    config.id = *id;
    config.timeout_us = kTimeoutUs;
    SOTTO_ASSIGN(comms_[static_cast<size_t>(r)],
                 Comm::create(contexts_[static_cast<size_t>(r)], config));
    return ok_status();
  });
}

void WireWorld::on_all(const std::function<Status(int32_t rank)>& f) const {
  std::vector<Status> results(comms_.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < comms_.size(); ++r) {
    threads.emplace_back([&, r] { results[r] = f(static_cast<int32_t>(r)); });
  }
  for (std::thread& t : threads) t.join();
  for (size_t r = 0; r < results.size(); ++r) {
    if (!results[r].ok())
      throw std::runtime_error(fmt::format("rank {}: {}", r, results[r].text()));
  }
}

uint64_t WireWorld::service_bytes(int32_t rank) const {
  const auto report = nlohmann::json::parse(comm(rank)->report_json("counters"));
  uint64_t sum = 0;
  for (const auto& peer : report.at("peers")) sum += peer.at("service_bytes_sent").get<uint64_t>();
  return sum;
}

void WireWorld::settle() const {
  const auto look = [this] {
    uint64_t sum = loopback_sent().packets;
    for (int32_t r = 0; r < size(); ++r) sum += service_bytes(r);
    return sum;
  };
  // Acknowledgements may still come: they are packets without data. On an interface that others use
  // it does not get quiet.
  constexpr auto kQuiet = std::chrono::milliseconds(10);
  uint64_t before = look();
  for (int i = 0; i < 50; ++i) {
    std::this_thread::sleep_for(kQuiet);
    const uint64_t now = look();
    if (now == before) return;
    before = now;
  }
}

}  // namespace sotto::perf
