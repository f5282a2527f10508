// Ranks as threads that use nothing but sotto.hpp.
#pragma once

#include <gtest/gtest.h>
#include <sotto/sotto.hpp>

#include <functional>
#include <string>
#include <vector>

#include "tests/support/ranks.h"

// Not inside of namespace sotto, where names of the library itself would be seen.
namespace cpp_test {

using namespace sotto::SOTTO_CPP_ABI;
using namespace sotto::test;

inline constexpr const char* kAdam = R"({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}})";

// A comm and a context of one rank.
struct Alone {
  context ctx = context::create(context_config().cpu_threads(1));
  comm ranks = comm::create(ctx, comm_config().rank(0, 1));
};

// Runs the body on `size` ranks. Returns the text of the rank that failed first, "" if none has.
inline std::string on_ranks(int size, const std::function<void(comm&)>& body,
                            microseconds timeout = std::chrono::seconds(20)) {
  setenv("SOTTO_TRANSPORT", "inproc", 1);
  context first = context::create(context_config().cpu_threads(1));
  const sotto_unique_id id = first.unique_id();
  unsetenv("SOTTO_TRANSPORT");
  return run_ranks(size, [&](int rank) {
    context mine = context::create(context_config().cpu_threads(1));
    context& used = rank == 0 ? first : mine;
    comm ranks = comm::create(
        used, comm_config().rank(rank, size).id(id).transport("inproc").timeout(timeout));
    body(ranks);
  });
}

// The call ends with an error of this code whose text has these words.
template <class F>
void fails(F call, sotto_status code, const std::vector<std::string>& words, const char* what) {
  try {
    call();
  } catch (const error& e) {
    require(e.code() == code,
            std::string(what) + ": " + e.what() + ", instead of " + status_name(code));
    for (const std::string& word : words) {
      require(std::string(e.text()).find(word) != std::string::npos,
              std::string(what) + ": the text lacks \"" + word + "\": " + e.text());
    }
    require(std::string(e.what()) == std::string(status_name(code)) + ": " + e.text(), e.what());
    return;
  }
  require(false, std::string(what) + " has not failed");
}
#define FAILS(call, code, ...) \
  ::cpp_test::fails([&] { static_cast<void>(call); }, (code), {__VA_ARGS__}, #call)

}  // namespace cpp_test
