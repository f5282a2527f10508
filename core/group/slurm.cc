#include "core/group/slurm.h"

#include <string_view>

#include "core/base/text.h"
#include "core/group/variables.h"

namespace sotto {
namespace {

constexpr int64_t kFirstPort = 20000, kPorts = 10000, kSteps = 16;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool in_name(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '.' ||
         c == '_';
}

// Reads a list from left to right. The parts of the first host are collected.
class HostList {
 public:
  HostList(const std::string& variable, const std::string& text)
      : variable_(variable), text_(text) {}

  Result<SlurmHosts> read() {
    SOTTO_TRY(host());
    hosts_.first = std::move(name_);
    while (take(',')) {
      hosts_.several = true;
      SOTTO_TRY(host());
    }
    if (at_ < text_.size()) return bad("a \",\" or the end");
    return hosts_;
  }

 private:
  bool more() const { return at_ < text_.size(); }
  bool take(char c) {
    const bool here = more() && text_[at_] == c;
    if (here) ++at_;
    return here;
  }

  Status host() {
    const size_t begin = at_;
    while (more() && (in_name(text_[at_]) || text_[at_] == '[')) {
      if (take('[')) {
        SOTTO_TRY(numbers());
      } else {
        name_ += text_[at_++];
      }
    }
    return at_ == begin ? bad("a host") : ok_status();
  }

  // Behind "[": numbers and ranges up to "]". The host has the first of them.
  Status numbers() {
    for (bool first = true;; first = false) {
      SOTTO_ASSIGN(const std::string_view low, number());
      if (first) name_ += low;
      if (take('-')) {
        SOTTO_ASSIGN(const std::string_view high, number());
        const bool falls = high.size() < low.size() || (high.size() == low.size() && high < low);
        if (falls) return bad(fmt::format("a number from {} on before this place", low));
        hosts_.several = true;
      }
      if (take(']')) return ok_status();
      if (!take(',')) return bad("\"-\", \",\" or \"]\"");
      hosts_.several = true;
    }
  }

  Result<std::string_view> number() {
    const size_t begin = at_;
    while (more() && is_digit(text_[at_])) ++at_;
    if (at_ == begin) return bad("a number");
    return std::string_view(text_).substr(begin, at_ - begin);
  }

  Status bad(std::string_view expected) const {
    return invalid_argument(
        "environment variable {} is \"{}\": {} is expected at character {}; a list of hosts looks "
        "like node[01-03,7],other5",
        variable_, printable(text_), expected, at_ + 1);
  }

  const std::string& variable_;
  const std::string& text_;
  size_t at_ = 0;
  std::string name_;
  SlurmHosts hosts_;
};

}  // namespace

Result<SlurmHosts> slurm_hosts(const std::string& variable, const std::string& list) {
  return HostList(variable, list).read();
}

uint16_t slurm_port(int64_t job, int64_t step) {
  return static_cast<uint16_t>(kFirstPort + (job % kPorts * kSteps + step % kPorts) % kPorts);
}

Result<SlurmPlace> slurm_place(const Environment& environment) {
  std::string variable = "SLURM_STEP_NODELIST";
  auto list = environment.get(variable);
  if (!list.has_value()) list = environment.get(variable = "SLURM_JOB_NODELIST");
  const auto job = environment.get("SLURM_JOB_ID");
  if (!list.has_value() || !job.has_value()) {
    return invalid_argument(
        "SLURM_PROCID and SLURM_NTASKS are set, but not {}, from which it follows where ranks "
        "meet; set SOTTO_RENDEZVOUS=tcp://host:port (an address of rank 0)",
        list.has_value() ? "SLURM_JOB_ID" : "SLURM_STEP_NODELIST or SLURM_JOB_NODELIST");
  }
  SOTTO_ASSIGN(const SlurmHosts hosts, slurm_hosts(variable, *list));
  SOTTO_ASSIGN(const int64_t job_number, number_of("SLURM_JOB_ID", *job, 0, UINT32_MAX));
  SOTTO_ASSIGN(
      const int64_t step,
      number_of("SLURM_STEP_ID", environment.get("SLURM_STEP_ID").value_or("0"), 0, UINT32_MAX));
  return SlurmPlace{fmt::format("tcp://{}:{}", hosts.first, slurm_port(job_number, step)),
                    hosts.several};
}

}  // namespace sotto
