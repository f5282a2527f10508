// Ranks as threads that use nothing but sotto.h.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "sotto/sotto.h"
#include "tests/support/ranks.h"

namespace sotto::test {

// Ends the rank with the library's text.
inline void ok(sotto_status status, const char* what) {
  if (status != SOTTO_OK) {
    throw RankError(std::string(what) + ": " + sotto_status_name(status) + ": " +
                    sotto_last_error());
  }
}
#define OK(call) ::sotto::test::ok((call), #call)

// The status and the words that its text must have.
inline void fails(sotto_status status, sotto_status expected, const std::vector<std::string>& words,
                  const char* what) {
  const std::string text = sotto_last_error();
  require(status == expected, std::string(what) + ": " + sotto_status_name(status) +
                                  " instead of " + sotto_status_name(expected) + ": " + text);
  for (const std::string& word : words) {
    require(text.find(word) != std::string::npos,
            std::string(what) + ": the text lacks \"" + word + "\": " + text);
  }
}
#define FAILS(call, code, ...) ::sotto::test::fails((call), (code), {__VA_ARGS__}, #call)

template <class T>
sotto_dtype dtype_of();
template <>
inline sotto_dtype dtype_of<float>() {
  return SOTTO_FLOAT32;
}
template <>
inline sotto_dtype dtype_of<double>() {
  return SOTTO_FLOAT64;
}
template <>
inline sotto_dtype dtype_of<int32_t>() {
  return SOTTO_INT32;
}
template <>
inline sotto_dtype dtype_of<int64_t>() {
  return SOTTO_INT64;
}
template <>
inline sotto_dtype dtype_of<uint8_t>() {
  return SOTTO_UINT8;
}
template <>
inline sotto_dtype dtype_of<int8_t>() {
  return SOTTO_INT8;
}
template <>
inline sotto_dtype dtype_of<uint32_t>() {
  return SOTTO_UINT32;
}
template <>
inline sotto_dtype dtype_of<uint64_t>() {
  return SOTTO_UINT64;
}

// Bit patterns.
template <>
inline sotto_dtype dtype_of<uint16_t>() {
  return SOTTO_BFLOAT16;
}

template <class T>
sotto_buffer buffer(T* data, uint64_t count) {
  return {data, count, dtype_of<T>(), SOTTO_DEVICE_CPU, 0, 0};
}
template <class T>
sotto_buffer buffer(std::vector<T>& data) {
  return buffer(data.data(), data.size());
}

inline sotto_call call_with(const std::function<void(sotto_call&)>& change) {
  sotto_call call = SOTTO_CALL_INIT;
  change(call);
  return call;
}

inline sotto_context* new_context(bool progress_thread = true, uint32_t max_ops = 0) {
  sotto_context_config config = SOTTO_CONTEXT_CONFIG_INIT;
  config.cpu_threads = 1;
  config.no_progress_thread = progress_thread ? 0 : 1;
  config.max_ops = max_ops;
  sotto_context* context = nullptr;
  OK(sotto_context_create(&config, &context));
  return context;
}

struct Member {
  int32_t rank = 0;
  int32_t size = 1;
  sotto_context* context = nullptr;
  sotto_comm* comm = nullptr;
};

struct WorldOptions {
  const char* transport = "inproc";
  int64_t timeout_us = 30'000'000;
  bool progress_thread = true;
  const char* transport_of_rank_1 = nullptr;
  void (*on_rank)(int32_t rank) = nullptr;  // on the thread of each, before its comm is made
  bool destroy = true;   // comms and contexts at the end of the body; false: the body does it
  uint32_t max_ops = 0;  // of each rank's context
};

// Runs the body on `size` ranks that have formed a comm. Returns the text of the rank that failed
// first.
inline std::string run_world(int32_t size, const WorldOptions& options,
                             const std::function<void(Member&)>& body) {
  // The transport of an id is a parameter of the context that makes it.
  setenv("SOTTO_TRANSPORT", options.transport, 1);
  sotto_context* const first = new_context(options.progress_thread, options.max_ops);
  sotto_unique_id id;
  OK(sotto_unique_id_create(first, &id));
  unsetenv("SOTTO_TRANSPORT");
  return run_ranks(size, [&](int rank) {
    Member self{rank, size, first, nullptr};
    if (rank != 0) self.context = new_context(options.progress_thread, options.max_ops);
    sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
    config.rank = rank;
    config.size = size;
    config.id = &id;
    config.timeout_us = options.timeout_us;
    config.transport = options.transport;
    if (options.on_rank != nullptr) options.on_rank(rank);
    if (rank == 1 && options.transport_of_rank_1 != nullptr)
      config.transport = options.transport_of_rank_1;
    OK(sotto_comm_create(self.context, &config, &self.comm));
    body(self);
    if (!options.destroy) return;
    sotto_comm_destroy(self.comm);
    OK(sotto_context_destroy(self.context));
  });
}

// JSON or blob of a report or an export.
inline std::string read_all(const std::function<sotto_status(char*, uint64_t, uint64_t*)>& call) {
  std::string text;
  uint64_t length = 0;
  // Counters go on, so a report may have grown since it was measured.
  while (length + 1 > text.size()) {
    text.assign(length + 1, '\0');
    OK(call(text.data(), text.size(), &length));
  }
  text.resize(length);
  return text;
}

// A state in one piece.
inline std::string one_shot(const sotto_optim* optim, sotto_state_mode mode) {
  return read_all([&](char* buffer, uint64_t size, uint64_t* length) {
    return sotto_optim_state_export(optim, mode, buffer, size, length);
  });
}

// Log lines of warnings, of all ranks of the process.
class Warnings {
 public:
  Warnings() { EXPECT_EQ(sotto_set_log(keep, this, 2), SOTTO_OK); }
  ~Warnings() { EXPECT_EQ(sotto_set_log(nullptr, nullptr, 0), SOTTO_OK); }
  Warnings(const Warnings&) = delete;
  Warnings& operator=(const Warnings&) = delete;
  uint64_t with(const std::string& words) const {
    const std::lock_guard lock(mutex_);
    return static_cast<uint64_t>(std::count_if(
        lines_.begin(), lines_.end(),
        [&](const std::string& line) { return line.find(words) != std::string::npos; }));
  }

 private:
  static void keep(void* self, int32_t, const char* line) {
    auto* warnings = static_cast<Warnings*>(self);
    const std::lock_guard lock(warnings->mutex_);
    warnings->lines_.emplace_back(line);
  }
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

}  // namespace sotto::test
