#include "core/outer/context.h"

#include <string>

namespace sotto {

Status OuterContext::failure() const {
  const Status failed = comm->failure();
  if (shards == nullptr) return failed;
  const Status of_shards = shards->failure();
  if (failed.ok() == of_shards.ok()) return failed;
  const Status& found = failed.ok() ? of_shards : failed;
  (failed.ok() ? comm : shards)->abort(std::string(found.text()));
  return found;
}

int64_t OuterContext::timeout_us(const CallOptions& options) const {
  if (options.timeout_us != 0 || !config.timeout_ms) return options.timeout_us;
  return static_cast<int64_t>(*config.timeout_ms) * 1000;
}

Status OuterContext::admit(const CallOptions& options) const {
  const int64_t us = timeout_us(options);
  return comm->engine().admit(us == 0 ? comm->timeout_us() : us, !options.no_block);
}

}  // namespace sotto
