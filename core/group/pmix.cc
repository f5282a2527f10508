#include "core/group/pmix.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "core/base/log.h"
#include "core/base/text.h"

namespace sotto::pmix {
namespace {

constexpr char kCollect[] = "pmix.collect", kJobSize[] = "pmix.job.size";
constexpr int64_t kLongestSleepUs = 1'000'000;

// What a thread that calls the library shares with the one that waits for it. Either may be the
// last to leave it.
struct Work {
  std::mutex mutex;
  std::condition_variable changed;
  const char* call = "";
  std::optional<Result<std::string>> result;

  void now(const char* name) {
    const std::lock_guard lock(mutex);
    call = name;
  }
};
using Calls = std::function<Result<std::string>(Work&)>;

// The library's calls have no time limits.
Result<std::string> run(const std::string& name, Calls calls, const Clock& clock,
                        Deadline deadline) {
  const auto work = std::make_shared<Work>();
  std::thread([work, calls = std::move(calls)]() noexcept {
    Result<std::string> result = caught([&] { return calls(*work); });
    const std::lock_guard lock(work->mutex);
    work->result = std::move(result);
    work->changed.notify_all();
  }).detach();
  std::unique_lock lock(work->mutex);
  while (!work->result.has_value()) {
    if (deadline.passed(clock))
      return error(Code::kTimeout, "{}: {} has not returned within the time limit", name,
                   work->call);
    work->changed.wait_for(
        lock, std::chrono::microseconds(std::min(deadline.left_us(clock), kLongestSleepUs)));
  }
  return std::move(*work->result);
}

Status failed(const Api& api, const std::string& name, const char* call, int status) {
  return error(Code::kTransport, "{}: {} of {}: {} ({})", name, call, api.path,
               api.error_string(status), status);
}

Proc proc(const Proc& self, uint32_t rank) {
  Proc other = self;
  other.rank = rank;
  return other;
}

using ValuePointer = std::unique_ptr<Value, void (*)(Value*)>;
void release(Value* value) {
  if (value != nullptr && value->type == kString) std::free(value->data.string);
  std::free(value);
}

Result<ValuePointer> get(const Api& api, const std::string& name, const Proc& of, const char* key,
                         uint16_t type) {
  Value* value = nullptr;
  const int status = api.get(&of, key, nullptr, 0, &value);
  ValuePointer found(value, &release);
  if (status != 0 || value == nullptr)
    return failed(api, name, fmt::format("PMIx_Get({})", key).c_str(), status);
  if (value->type != type) {
    return error(Code::kProtocol, "{}: PMIx_Get({}) brought a value of type {}; expected: {}", name,
                 key, value->type, type);
  }
  return found;
}

class Pmix final : public ProcessManager {
 public:
  Pmix(const Api& api, std::string name, const Proc& self, const Clock& clock)
      : api_(api), name_(std::move(name)), self_(self), clock_(clock) {}
  // mpirun takes a process that ends without this call for one that has failed.
  ~Pmix() override {
    if (ready_ && getpid() == owner_) api_.finalize(nullptr, 0);
  }

  Result<std::string> publish(const std::string& key, const std::string& mine,
                              Deadline deadline) override {
    ready_ = false;  // a call that has not returned may hold the library
    Result<std::string> text = run(
        name_,
        [api = api_, name = name_, self = self_, key, mine](Work& work) {
          return exchange(api, name, self, key, mine, work);
        },
        clock_, deadline);
    ready_ = text.ok();
    return text;
  }

 private:
  static Result<std::string> exchange(const Api& api, const std::string& name, const Proc& self,
                                      const std::string& key, std::string mine, Work& work) {
    if (self.rank == 0) SOTTO_TRY(put(api, name, key, mine, work));
    Info collect{};
    std::strncpy(collect.key, kCollect, sizeof collect.key - 1);
    collect.value.type = kBool;
    collect.value.data.flag = true;
    work.now("PMIx_Fence");
    if (const int status = api.fence(nullptr, 0, &collect, 1); status != 0)
      return failed(api, name, "PMIx_Fence", status);
    if (self.rank == 0) return mine;
    work.now("PMIx_Get");
    SOTTO_ASSIGN(const ValuePointer found, get(api, name, proc(self, 0), key.c_str(), kString));
    return std::string(found->data.string);
  }

  static Status put(const Api& api, const std::string& name, const std::string& key,
                    std::string& mine, Work& work) {
    Value value{};
    value.type = kString;
    value.data.string = mine.data();
    work.now("PMIx_Put");
    if (const int status = api.put(kGlobal, key.c_str(), &value); status != 0)
      return failed(api, name, "PMIx_Put", status);
    work.now("PMIx_Commit");
    const int status = api.commit();
    return status == 0 ? ok_status() : failed(api, name, "PMIx_Commit", status);
  }

  const Api api_;
  const std::string name_;
  const Proc self_;
  const Clock& clock_;
  const pid_t owner_ = getpid();
  bool ready_ = true;  // for a call
};

Status check_equal(const std::string& name, const char* what, uint32_t told, int32_t own) {
  if (std::cmp_equal(told, own)) return ok_status();
  return invalid_argument(
      "{}: the server says {}={}, the environment {}; it is that of another job", name, what, told,
      own);
}

// The bytes of what the server calls this process.
Result<std::string> begin(const Api& api, const std::string& name, int32_t rank, int32_t size,
                          Work& work) {
  Proc self{};
  work.now("PMIx_Init");
  if (const int status = api.init(&self, nullptr, 0); status != 0)
    return failed(api, name, "PMIx_Init", status);
  SOTTO_TRY(check_equal(name, "rank", self.rank, rank));
  work.now("PMIx_Get");
  SOTTO_ASSIGN(const ValuePointer known, get(api, name, proc(self, kAnyRank), kJobSize, kUint32));
  SOTTO_TRY(check_equal(name, "size", known->data.number, size));
  return std::string(reinterpret_cast<const char*>(&self), sizeof self);
}

}  // namespace

Result<Api> load(const char* library) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return unsupported(
        "ranks of Open MPI meet through PMIx, but its library was not found ({}); install it "
        "(libpmix2), or set SOTTO_RENDEZVOUS=tcp://host:port (an address of rank 0)",
        dlerror());
  }
  Api api;
  std::string missing;
  const auto look_up = [&]<class Function>(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(dlsym(handle, name));
    if (function == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
  };
  look_up(api.init, "PMIx_Init");
  look_up(api.finalize, "PMIx_Finalize");
  look_up(api.put, "PMIx_Put");
  look_up(api.commit, "PMIx_Commit");
  look_up(api.fence, "PMIx_Fence");
  look_up(api.get, "PMIx_Get");
  look_up(api.error_string, "PMIx_Error_string");
  if (!missing.empty()) {
    return unsupported("{} is no PMIx that can be used: it lacks {}; set SOTTO_RENDEZVOUS", library,
                       missing);
  }
  Dl_info info{};
  const bool known = dladdr(reinterpret_cast<const void*>(api.init), &info) != 0;
  api.path = known && info.dli_fname != nullptr ? info.dli_fname : library;
  log(LogLevel::kDebug, "PMIx from {}", api.path);
  return api;
}

Result<std::string> server_name(const Environment& environment) {
  const auto job = environment.get("PMIX_NAMESPACE");
  if (!job.has_value() || job->empty()) {
    return invalid_argument(
        "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE are set, but not PMIX_NAMESPACE, the job of "
        "mpirun's PMIx server, through which ranks could meet; set "
        "SOTTO_RENDEZVOUS=tcp://host:port (an address of rank 0)");
  }
  return "PMIx (PMIX_NAMESPACE=" + printable(*job) + ")";
}

Result<std::unique_ptr<ProcessManager>> open(const Api& api, std::string name, int32_t rank,
                                             int32_t size, const Clock& clock, Deadline deadline) {
  SOTTO_ASSIGN(
      const std::string bytes,
      run(
          name, [api, name, rank, size](Work& work) { return begin(api, name, rank, size, work); },
          clock, deadline));
  Proc self{};
  std::memcpy(&self, bytes.data(), sizeof self);
  return std::unique_ptr<ProcessManager>(std::make_unique<Pmix>(api, std::move(name), self, clock));
}

}  // namespace sotto::pmix
