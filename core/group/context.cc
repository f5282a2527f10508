#include "core/group/context.h"

#include <nlohmann/json.hpp>

#include "core/base/json_text.h"

namespace sotto {

Context::Context(ContextOptions options) : options_(std::move(options)) {
  EngineOptions engine;
  engine.clock = options_.clock;
  engine.max_ops = options_.max_ops;
  engine.progress_thread = options_.progress_thread;
  engine.progress_nice = static_cast<int>(options_.params.progress_nice);
  engine.spin_us = options_.params.spin_us;
  engine.block_streams = options_.params.stream_block;
  engine.trace = options_.params.trace;
  engine_ = std::make_shared<Engine>(std::move(engine));
}

Result<std::shared_ptr<Device>> Context::device_of(const DeviceId& id) {
  if (id == options_.device->caps().id) return options_.device;
  std::lock_guard lock(mutex_);
  if (const auto it = devices_.find(id); it != devices_.end()) return it->second;
  if (!options_.make_device) return unsupported("this build has no device {}", device_name(id));
  SOTTO_ASSIGN(std::shared_ptr<Device> device, options_.make_device(id));
  devices_.emplace(id, device);
  return device;
}

Result<Backend*> Context::backend(const std::string& name) {
  const auto made_before = [&]() -> Backend* {
    std::lock_guard lock(mutex_);
    const auto it = backends_.find(name);
    return it == backends_.end() ? nullptr : it->second;
  };
  if (Backend* const found = made_before(); found != nullptr) return found;
  const auto factory = options_.backends.find(name);
  if (factory == options_.backends.end()) {
    std::string known;
    for (const auto& [known_name, unused] : options_.backends)
      known += (known.empty() ? "" : ", ") + known_name;
    return unsupported("transport \"{}\" is not compiled in; there are: {}", name, known);
  }
  // The driver looks backends up, so no thread waits for its role with the mutex.
  return engine_->drive([&](Driver&) -> Result<Backend*> {
    if (Backend* const found = made_before(); found != nullptr) return found;
    SOTTO_ASSIGN(std::unique_ptr<Backend> made, factory->second.make(options_.params));
    Backend* const backend = made.get();
    engine_->add_backend(std::move(made), factory->second.transport.blocking);
    std::lock_guard lock(mutex_);
    backends_.emplace(name, backend);
    return backend;
  });
}

Result<std::string> Context::auto_transport(Reach distance) const {
  const TransportRow* best = nullptr;
  for (const auto& [name, factory] : options_.backends) {
    const TransportRow& row = factory.transport;
    if (row.reach < distance || row.priority <= (best == nullptr ? 0 : best->priority)) continue;
    best = &row;
  }
  if (best == nullptr)
    return unsupported("transport \"{}\": none of this build reaches all ranks", kAutoTransport);
  return std::string(best->name);
}

bool Context::alone(const std::string& transport) const {
  const auto factory = options_.backends.find(transport);
  return factory != options_.backends.end() && !factory->second.alone_by.empty();
}

std::string Context::in_host(const std::string& transport) const {
  const auto named = options_.backends.find(transport);
  if (named == options_.backends.end()) return {};
  const auto inside = options_.backends.find(std::string(named->second.transport.in_host));
  const bool of_hosts =
      inside != options_.backends.end() && inside->second.transport.reach == Reach::kHost;
  return of_hosts ? inside->first : std::string();
}

Result<Backend*> Context::rendezvous(const std::string& transport) {
  const auto factory = options_.backends.find(transport);
  const bool known = factory != options_.backends.end();
  return backend(known ? std::string(factory->second.transport.rendezvous) : transport);
}

Result<UniqueId> Context::make_unique_id() {
  std::string name = params().transport;
  if (name == kAutoTransport) {
    SOTTO_ASSIGN(name, auto_transport(Reach::kNetwork));
  }
  SOTTO_ASSIGN(Backend * backend_of_id, rendezvous(name));
  SOTTO_ASSIGN(const UniqueId id, engine_->drive([&](Driver&) {
    return backend_of_id->make_unique_id(Reach::kHost);
  }));
  std::lock_guard lock(mutex_);
  made_here_.insert(id);
  return id;
}

Status Context::check_unused(const UniqueId& id) {
  std::lock_guard lock(mutex_);
  const auto it = used_.find(id);
  if (it == used_.end()) return ok_status();
  return invalid_argument(
      "the unique id has been used before: {}. One id makes one comm; make another with "
      "sotto_unique_id_create",
      it->second ? "a comm was made with it" : "its ranks did not come together");
}

Status Context::meet_with(const UniqueId& id) {
  std::lock_guard lock(mutex_);
  if (meeting_.insert(id).second) return ok_status();
  return invalid_argument(
      "another thread makes a comm with this unique id on the same context; ranks that are threads "
      "need a context each");
}

void Context::note_use(const UniqueId& id, bool made) {
  std::lock_guard lock(mutex_);
  meeting_.erase(id);
  if (made || made_here_.contains(id)) used_.emplace(id, made);
  made_here_.erase(id);
}

Result<Backend*> Context::backend_for(const UniqueId& id) {
  for (const auto& [name, factory] : options_.backends) {
    if (factory.transport.rendezvous != name) continue;  // it makes no ids
    SOTTO_ASSIGN(Backend * candidate, backend(name));
    if (candidate->knows(id)) return candidate;
  }
  return invalid_argument(
      "the unique id was not made by a transport of this build, or was damaged on its way");
}

std::string Context::report_json() const {
  nlohmann::ordered_json report;
  report["device"] = options_.device_text;
  if (options_.other_devices) report["other_devices"] = options_.other_devices();
  nlohmann::ordered_json transports = nlohmann::ordered_json::array();
  for (const auto& [name, unused] : options_.backends) transports.push_back(name);
  report["transports"] = transports;
  report["max_ops"] = options_.max_ops;
  report["progress_thread"] = options_.progress_thread;
  report["parameters"] = nlohmann::ordered_json::parse(options_.listing);
  return dump_text(report);
}

}  // namespace sotto
