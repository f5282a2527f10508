// sotto_context_*, sotto_unique_id_create, sotto_build_info
#include <atomic>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>

#include "capi/src/abi_version.h"
#include "capi/src/backends.h"
#include "capi/src/convert.h"
#include "capi/src/handles.h"
#include "capi/src/log_level.h"
#include "capi/src/struct_in.h"
#include "core/base/json_text.h"
#include "core/base/log.h"

using namespace sotto;        // NOLINT: the definitions below are the border itself
using namespace sotto::capi;  // NOLINT

namespace {

constexpr uint32_t kMaxThreads = 4096;
constexpr uint32_t kMaxMaxOps = 1u << 20;

// Contexts of this process, and those that a parent process had when it forked this one: their
// locks may be held by threads that do not exist here.
std::atomic<uint32_t> g_contexts{0};
std::atomic<uint32_t> g_generation_of_contexts{0};

Status check_no_context_of_a_parent() {
  const uint32_t generation = fork_generation();
  if (g_contexts.load() != 0 && g_generation_of_contexts.load() != generation) {
    return invalid_state(
        "this process was forked from one that had a context; start ranks with exec (or "
        "sotto-run), or fork before the "
        "first context is created");
  }
  return ok_status();
}

Status check_config(const sotto_context_config& c) {
  if (c.no_progress_thread > 1) {
    return invalid_argument("config.no_progress_thread is {}; allowed: 0 or 1",
                            c.no_progress_thread);
  }
  if (c.cpu_threads > kMaxThreads) {
    return invalid_argument("config.cpu_threads is {}; allowed: 0 to {}", c.cpu_threads,
                            kMaxThreads);
  }
  if (c.max_ops > kMaxMaxOps)
    return invalid_argument("config.max_ops is {}; allowed: 0 to {}", c.max_ops, kMaxMaxOps);
  return ok_status();
}

Status check_local_rank(const Params& params) {
  if (params.local_size == 0 || params.local_rank < params.local_size) return ok_status();
  return invalid_argument(
      "environment variable SOTTO_LOCAL_RANK is \"{}\", allowed is a whole number from 0 to {} "
      "(SOTTO_LOCAL_SIZE is {})",
      params.local_rank, params.local_size - 1, params.local_size);
}

void warn(const ParamReader& reader, const Params& params, const BackendFactories& backends) {
  for (const std::string& warning : reader.warnings()) log(LogLevel::kWarn, "{}", warning);
  if (params.transport == kAutoTransport) return;
  for (const auto& [name, factory] : backends) {
    if (factory.alone_by.empty() || name == params.transport) continue;
    log(LogLevel::kWarn,
        "environment variable {} is for transport {} and has no effect on messages over {}, which "
        "SOTTO_TRANSPORT names",
        factory.alone_by, name, params.transport);
  }
}

Status create(uint32_t abi_version, const sotto_context_config* config,
              sotto_context** out_context) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_abi_version(abi_version, SOTTO_ABI_VERSION, kOldestClient, SOTTO_VERSION));
  SOTTO_TRY(check_no_context_of_a_parent());
  SOTTO_TRY(check_pointer(out_context, "out_context"));
  sotto_context_config c = SOTTO_CONTEXT_CONFIG_INIT;
  if (config != nullptr) SOTTO_TRY(take(config, c, sizeof(sotto_context_config), "config"));
  SOTTO_TRY(check_config(c));

  const Environment environment = process_environment();
  ParamReader reader(environment);
  const auto params = reader.read<Params>();
  BackendFactories backends = all_backends(reader);
  SOTTO_TRY(reader.status());
  SOTTO_TRY(check_local_rank(params));
  apply_log_parameter(params.log);
  warn(reader, params, backends);
  ContextOptions options;
  options.params = params;
  options.listing = reader.to_json();
  options.environment = environment;
  options.backends = std::move(backends);
  auto object = std::make_unique<sotto_context>();
  SOTTO_ASSIGN(object->core, make_context(std::move(options),
                                          {c.cpu_threads, c.max_ops, c.no_progress_thread == 0}));
  SOTTO_ASSIGN(*out_context, give_out(std::move(object)));
  g_generation_of_contexts.store(fork_generation());
  g_contexts.fetch_add(1);
  return ok_status();
}

Status trace_span(sotto_context* context, const char* name, int64_t begin_ns, int64_t end_ns) {
  SOTTO_TRY(check_pointer(name, "name"));
  if (end_ns < begin_ns)
    return invalid_argument("end_ns is {}; allowed: from begin_ns, {}", end_ns, begin_ns);
  context->core->engine()->trace_span(name, begin_ns, end_ns);
  return ok_status();
}

Status poll(sotto_context* context, int64_t timeout_us) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  context->core->engine()->poll(timeout_us);
  return ok_status();
}

Status report(const sotto_context* context, const char* kind, char* buf, uint64_t cap,
              uint64_t* out_len) {
  const std::string_view word = kind == nullptr ? "all" : kind;
  if (word != "all") return invalid_argument("kind is \"{}\"; known: \"all\" (or NULL)", word);
  nlohmann::ordered_json json;
  json["version"] = SOTTO_VERSION;
  json["abi"] = fmt::format("{}.{}", SOTTO_ABI_MAJOR, SOTTO_ABI_MINOR);
  json.update(nlohmann::ordered_json::parse(context->core->report_json()));
  return write_text(dump_text(json), buf, cap, out_len);
}

Status make_id(sotto_context* context, sotto_unique_id* out_id) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_pointer(out_id, "out_id"));
  SOTTO_ASSIGN(const UniqueId id, context->core->make_unique_id());
  static_assert(sizeof(id) == sizeof(out_id->bytes));
  std::memcpy(out_id->bytes, id.data(), id.size());
  return ok_status();
}

}  // namespace

extern "C" {

const char* sotto_build_info(void) {
  try {
    return build_info().c_str();
  } catch (...) {  // out of memory: the function has no status to tell it with
    return "{}";
  }
}

sotto_status sotto_context_create_v(uint32_t abi_version, const sotto_context_config* config,
                                    sotto_context** out_context) {
  return guarded("sotto_context_create", [&] { return create(abi_version, config, out_context); });
}

sotto_status sotto_context_destroy(sotto_context* context) {
  return destroyed("sotto_context_destroy", context, [](sotto_context&) {
    g_contexts.fetch_sub(1);
    return ok_status();
  });
}

sotto_status sotto_trace_span(sotto_context* context, const char* name, int64_t begin_ns,
                              int64_t end_ns) {
  return guarded_on("sotto_trace_span", context,
                    [&](auto* object) { return trace_span(object, name, begin_ns, end_ns); });
}

sotto_status sotto_context_poll(sotto_context* context, int64_t timeout_us) {
  return guarded_on("sotto_context_poll", context,
                    [&](auto* object) { return poll(object, timeout_us); });
}

sotto_status sotto_context_report(const sotto_context* context, const char* kind, char* buf,
                                  uint64_t cap, uint64_t* out_len) {
  return guarded_on("sotto_context_report", context,
                    [&](auto* object) { return report(object, kind, buf, cap, out_len); });
}

sotto_status sotto_unique_id_create(sotto_context* context, sotto_unique_id* out_id) {
  return guarded_on("sotto_unique_id_create", context,
                    [&](auto* object) { return make_id(object, out_id); });
}

}  // extern "C"
