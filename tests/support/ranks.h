// Runs the ranks of a test as threads and says which one failed first and why.
//
// A rank reports a failure by throwing (check, require) or through gtest's EXPECT and ASSERT.
// Whatever happens, run_ranks ends by its deadline: a test that hangs becomes a failure with a
// text.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/base/status.h"
#include "tests/support/sanitized.h"

namespace sotto::test {

class RankError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Ends the rank with the text of a status that is not OK.
void check(const Status& status, std::string_view what = "");
template <class T>
T check(Result<T> result, std::string_view what = "") {
  check(result.status(), what);
  return result.take();
}
// Ends the rank with the text if the condition does not hold.
void require(bool condition, std::string_view text);

// Calls body(rank) on `size` threads. Returns "" if all ranks returned, else the text of the rank
// that failed first: "rank 2: ...". Threads cannot be stopped: if some are still running when the
// time is over, the process ends with a text that names them and the first failure.
[[nodiscard]] std::string run_ranks(int size, const std::function<void(int rank)>& body,
                                    int64_t timeout_ms = kSanitized ? 300'000 : 100'000);

// A barrier for the ranks of a run, any number of times. wait() throws when the time is over, or
// when another rank of the barrier broke off.
class RankBarrier {
 public:
  explicit RankBarrier(int size, int64_t timeout_ms = kSanitized ? 300'000 : 100'000);
  ~RankBarrier();
  void wait();
  void break_off();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sotto::test
