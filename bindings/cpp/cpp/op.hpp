// Operations in flight.
#ifndef SOTTO_CPP_OP_HPP
#define SOTTO_CPP_OP_HPP

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "call.hpp"
#include "handle.hpp"

namespace sotto {
inline namespace SOTTO_CPP_ABI {

namespace detail {

// The operation ends by its own deadline. In a callback of the library waiting is refused.
inline sotto_status wait_and_release(sotto_op* op) {
  if (op == nullptr) return SOTTO_OK;
  sotto_op_wait(op, -1);
  return sotto_op_release(op);
}

}  // namespace detail

// A collective, a group of them or a step. The destructor waits until it has ended, and drops its
// error: wait() tells it.
class SOTTO_CPP_CHECKED op : public handle<sotto_op, detail::wait_and_release> {
 public:
  using handle::handle;
  op() noexcept {}

  // Waits until the operation has ended, for which its own deadline provides.
  outcome<void> wait() { return detail::finish(sotto_op_wait(get(), -1)); }
  // Waits at most so long; whether the operation has ended.
  outcome<bool> wait_for(microseconds timeout) {
    return detail::ended(sotto_op_wait(get(), timeout.count()));
  }
  // Whether the operation has ended. Makes some progress itself.
  outcome<bool> test() { return detail::ended(sotto_op_test(get())); }
  // The operation's own status, IN_PROGRESS before its end. Throws nothing but bad_alloc.
  status error() const {
    const char* said = nullptr;
    const sotto_status code = sotto_op_error(get(), &said);
    return detail::told(code, said);
  }
  // What is queued on a cudaStream_t from now on comes after the operation.
  outcome<void> stream_wait(void* stream) {
    return detail::finish(sotto_op_stream_wait(get(), stream));
  }
  outcome<sotto_op_stats> stats() const {
    sotto_op_stats out = SOTTO_OP_STATS_INIT;
    const sotto_status code = sotto_op_get_stats(get(), &out);
    return detail::finish(code, out);
  }
  // Gives the handle back at once: the operation goes on, and its memory has to live until the comm
  // has been destroyed.
  outcome<void> detach() { return detail::finish(sotto_op_release(release())); }
  void close() = delete;  // wait() and detach() tell the two apart
};

namespace detail {

// Arrays of operations are arrays of their pointers.
static_assert(sizeof(op) == sizeof(sotto_op*) && std::is_standard_layout<op>::value,
              "an op is a pointer");
inline sotto_op* const* pointers(span<const op> ops) noexcept {
  return reinterpret_cast<sotto_op* const*>(ops.data());
}

}  // namespace detail

// Waits until one of several operations has ended; the lowest index of those that have, or their
// number if the time is over. Empty ones are skipped. The operation's own error is not told: ask
// it.
inline outcome<std::size_t> wait_any(span<const op> ops, microseconds timeout = no_limit()) {
  std::uint64_t index = ops.size();
  const sotto_status code =
      sotto_op_wait_any(detail::pointers(ops), ops.size(), timeout.count(), &index);
  return detail::finish(code == SOTTO_IN_PROGRESS ? SOTTO_OK : code,
                        static_cast<std::size_t>(index));
}

// Waits until all operations have ended, also if some fail; the error of the first that has. False:
// the time is over.
inline outcome<bool> wait_all(span<const op> ops, microseconds timeout = no_limit()) {
  return detail::ended(sotto_op_wait_all(detail::pointers(ops), ops.size(), timeout.count()));
}

// Waits for what a function has started, and tells the error of either.
inline outcome<void> wait(outcome<op>&& started) {
#if defined(SOTTO_CPP_NO_EXCEPTIONS)
  return started.ok() ? started->wait() : result<void>(started.error());
#else
  started.wait();
#endif
}

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_OP_HPP
