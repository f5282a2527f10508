// A program without exceptions, in C++11 (CMakeLists.txt): the same training as with them, and
// errors as results. Returns "" or what went wrong.
#include "tests/cpp/no_exceptions.h"

#include <sotto/sotto.hpp>

#include <cstring>
#include <vector>

#if !defined(SOTTO_CPP_NO_EXCEPTIONS) || defined(__cpp_exceptions)
#error "this file is compiled without exceptions"
#endif

namespace {

const char* const kAdam = "{\"optimizer\": {\"type\": \"Adam\", \"params\": {\"lr\": 0.1}}}";

#define EXPECT(condition)                                            \
  do {                                                               \
    if (!(condition)) return std::string("not so: ") + (#condition); \
  } while (0)

bool has(const std::string& text, const char* word) { return text.find(word) != std::string::npos; }

std::string errors_are_results(sotto::context& context, sotto::comm& comm) {
  std::vector<float> x(4, 1.0f), y(3);
  const sotto::result<sotto::comm> none =
      sotto::comm::create(context, sotto::comm_config().rank(3, 2));
  EXPECT(!none.ok() && !none && none.code() == SOTTO_E_INVALID_ARGUMENT);
  EXPECT(has(none.text(), "rank") && none.error().message() == "INVALID_ARGUMENT: " + none.text());
  EXPECT(!none.value());
  // An empty handle is refused, and the first error is what a wait tells.
  const sotto::result<void> refused = sotto::wait(comm.all_reduce(x, y));
  EXPECT(refused.code() == SOTTO_E_INVALID_ARGUMENT && has(refused.text(), "out"));
  const std::vector<sotto_buffer> two(2, sotto::buffer_of(x));
  const sotto::result<void> counts = sotto::wait(comm.all_reduce(two, sotto::buffer_of(x)));
  EXPECT(counts.text() == "all_reduce: in are 2 and out are 1; allowed: as many");
  sotto::comm empty;
  EXPECT(empty.rank().code() == SOTTO_E_INVALID_ARGUMENT && *empty.rank() == 0);
  EXPECT(has(sotto::config_report("{").text(), "line 1"));
  return "";
}

std::string trains(sotto::comm& comm) {
  std::vector<float> weights(8), gradients(8, 1.0f);
  const sotto::param params[] = {sotto::param("w", weights).grad(gradients)};
  sotto::result<sotto::optim> made = sotto::optim::create(comm, kAdam, params);
  EXPECT(made.ok());
  sotto::optim optim = made.take();
  EXPECT(sotto::wait(optim.step()).ok());
  EXPECT(weights[0] == -0.1f && optim.info()->step == 1);
  std::string state;
  const sotto::result<void> written =
      optim.state_write(sotto::state_mode::exact, [&](const void* data, std::uint64_t size) {
        state.append(static_cast<const char*>(data), size);
        return true;
      });
  EXPECT(written.ok() && !state.empty());
  const sotto::result<void> stopped =
      optim.state_write(sotto::state_mode::exact, [](const void*, std::uint64_t) { return false; });
  EXPECT(stopped.code() == SOTTO_E_CANCELLED);
  weights.assign(8, 5.0f);
  EXPECT(optim
             .state_read(
                 sotto::state_mode::exact,
                 [&](std::uint64_t offset, void* data, std::uint64_t size) {
                   std::memcpy(data, state.data() + offset, size);
                   return true;
                 },
                 state.size())
             .ok());
  EXPECT(weights[7] == -0.1f);
  EXPECT(optim.close().ok() && !optim);
  return "";
}

}  // namespace

std::string trained_without_exceptions() {
  sotto::result<sotto::context> context =
      sotto::context::create(sotto::context_config().cpu_threads(1));
  EXPECT(context.ok());
  sotto::result<sotto::comm> comm = sotto::comm::create(*context, sotto::comm_config().rank(0, 1));
  EXPECT(comm.ok() && *comm->size() == 1);
  const std::string problem = errors_are_results(*context, *comm);
  return problem.empty() ? trains(*comm) : problem;
}
