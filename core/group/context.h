// One rank's context: parameters, device, engine and the backends of its transports.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "core/base/params.h"
#include "core/base/status.h"
#include "core/base/transports.h"
#include "core/engine/engine.h"
#include "core/iface/device.h"
#include "core/iface/rendezvous.h"

namespace sotto {

// How to make a backend, and what is known of its transport.
struct BackendFactory {
  std::function<Result<std::unique_ptr<Backend>>(const Params&)> make;
  TransportRow transport = {};
  // The one of its own variables that asks for all messages, so that "auto" puts no other transport
  // beside it. Empty: none does.
  std::string_view alone_by = {};
};
using BackendFactories = std::map<std::string, BackendFactory>;  // by the transport's name

struct ContextOptions {
  Params params;
  std::string listing = "[]";  // of all variables, for reports: ParamReader::to_json
  Environment environment;
  std::shared_ptr<Device> device;  // of calls that name none
  std::string device_text;         // for reports: "cpu (avx2, 1 thread)"
  // Makes the other devices, at their first use; empty: there are none.
  std::function<Result<std::shared_ptr<Device>>(const DeviceId&)> make_device;
  // What there is beside `device`, or why not, for reports: "cuda:0 (...)".
  std::function<std::vector<std::string>()> other_devices;
  BackendFactories backends;
  const Clock* clock = &Clock::monotonic();  // of operations; lives longer
  uint32_t max_ops = 1024;
  bool progress_thread = true;
};

class Context : public std::enable_shared_from_this<Context> {
 public:
  explicit Context(ContextOptions options);

  const Params& params() const { return options_.params; }
  const Environment& environment() const { return options_.environment; }
  const std::shared_ptr<Engine>& engine() const { return engine_; }
  const std::shared_ptr<Device>& device() const { return options_.device; }
  // The device that a call names, or else the context's.
  const std::shared_ptr<Device>& device_or_default(const std::shared_ptr<Device>& named) const {
    return named != nullptr ? named : device();
  }
  // The device of an id; made at first use, lives as long as the context. UNSUPPORTED: this build
  // has none; DEVICE: it cannot be used, with the reason. Threads: any.
  Result<std::shared_ptr<Device>> device_of(const DeviceId& id);

  // The backend of a name, made at first use; it lives as long as the engine. UNSUPPORTED names
  // what exists.
  Result<Backend*> backend(const std::string& name);
  // The transport that "auto" chooses for ranks so far apart: of those of this build that reach
  // them the one of the highest priority. UNSUPPORTED: there is none.
  Result<std::string> auto_transport(Reach distance) const;
  // Whether it takes all messages of comms that "auto" gives it (BackendFactory::alone_by).
  bool alone(const std::string& transport) const;
  // What links ranks of one host where the transport is named, if that reaches no others. Empty:
  // the named transport links all ranks alike.
  std::string in_host(const std::string& transport) const;
  // The backend whose rendezvous comms of the named transport have.
  Result<Backend*> rendezvous(const std::string& transport);
  // An id of the transport in force (SOTTO_TRANSPORT; auto: the one for Reach::kNetwork).
  Result<UniqueId> make_unique_id();
  // One id makes one comm. INVALID_ARGUMENT: this context has used it.
  Status check_unused(const UniqueId& id);
  // Ranks of one context could not meet: a thread would wait for the other. INVALID_ARGUMENT:
  // another thread of this context meets others with the id; else until note_use.
  Status meet_with(const UniqueId& id);
  // This context has met others with the id. `made` false: it failed; then only the context that
  // made the id cannot use it again, since it no longer listens.
  void note_use(const UniqueId& id, bool made);
  // The existing or new backend that can join with the id.
  Result<Backend*> backend_for(const UniqueId& id);

  std::string report_json() const;

 private:
  ContextOptions options_;
  std::shared_ptr<Engine> engine_;
  std::mutex mutex_;
  std::map<std::string, Backend*> backends_;
  std::map<DeviceId, std::shared_ptr<Device>> devices_;
  std::set<UniqueId> made_here_;   // ids not yet used here
  std::set<UniqueId> meeting_;     // ids with which it meets others now
  std::map<UniqueId, bool> used_;  // whether a comm came of it
};

}  // namespace sotto
