// One rank of this process: devices, progress thread, parameters.
#ifndef SOTTO_CPP_CONTEXT_HPP
#define SOTTO_CPP_CONTEXT_HPP

#include <cstdint>
#include <string>

#include "call.hpp"
#include "handle.hpp"

namespace sotto {
inline namespace SOTTO_CPP_ABI {

// The fields of sotto_context_config, each at its default until it is set.
class context_config {
 public:
  context_config() noexcept : c_(initial()) {}

  context_config& no_progress_thread() noexcept {
    c_.no_progress_thread = 1;
    return *this;
  }
  context_config& cpu_threads(std::uint32_t n) noexcept {
    c_.cpu_threads = n;
    return *this;
  }
  context_config& max_ops(std::uint32_t n) noexcept {
    c_.max_ops = n;
    return *this;
  }

  const sotto_context_config* get() const noexcept { return &c_; }

 private:
  static sotto_context_config initial() noexcept {
    sotto_context_config c = SOTTO_CONTEXT_CONFIG_INIT;
    return c;
  }

  sotto_context_config c_;
};

class SOTTO_CPP_CHECKED context : public handle<sotto_context, sotto_context_destroy> {
 public:
  using handle::handle;
  context() noexcept {}

  static outcome<context> create(const context_config& config = context_config()) {
    sotto_context* c = nullptr;
    const sotto_status code = sotto_context_create_v(SOTTO_ABI_VERSION, config.get(), &c);
    return detail::finish(code, context(c));
  }

  outcome<void> poll(microseconds timeout = microseconds(0)) {
    return detail::finish(sotto_context_poll(get(), timeout.count()));
  }
  // Work of the trainer, in the time line that SOTTO_TRACE asks for. Threads: any.
  outcome<void> trace_span(text name, std::int64_t begin_ns, std::int64_t end_ns) {
    return detail::finish(sotto_trace_span(get(), name.c_str(), begin_ns, end_ns));
  }
  outcome<std::string> report(text kind = text()) const {
    const sotto_context* const c = get();
    return detail::read_text([=](char* buf, std::uint64_t cap, std::uint64_t* length) {
      return sotto_context_report(c, kind.c_str(), buf, cap, length);
    });
  }
  // 128 bytes that every rank passes to comm_config::id.
  outcome<sotto_unique_id> unique_id() {
    sotto_unique_id id = SOTTO_UNIQUE_ID_INIT;
    const sotto_status code = sotto_unique_id_create(get(), &id);
    return detail::finish(code, id);
  }
};

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_CONTEXT_HPP
