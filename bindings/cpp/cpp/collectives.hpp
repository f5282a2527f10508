// Collectives, as a comm starts them and a group collects them.
#ifndef SOTTO_CPP_COLLECTIVES_HPP
#define SOTTO_CPP_COLLECTIVES_HPP

#include <algorithm>
#include <cstdint>
#include <string>

#include "buffer.hpp"
#include "call.hpp"
#include "params.hpp"
#include "status.hpp"

namespace sotto {
inline namespace SOTTO_CPP_ABI {

// Derived::submit(function, options, arguments...) makes the call, Derived::refused(text) none; Out
// is what comes of it: an op, or nothing. `in` and `out` are as many buffers; on ranks where
// sotto.h says that one of them may be NULL it may be empty.
template <class Derived, class Out>
class collectives {
 public:
  outcome<Out> barrier(const call& options = call()) {
    return self().submit(sotto_barrier, options);
  }

  outcome<Out> broadcast(const in_buffers& in, const out_buffers& out, std::int32_t root,
                         const call& options = call()) {
    return exchange("broadcast", sotto_broadcast, in, out, options, root);
  }
  // In place.
  outcome<Out> broadcast(const out_buffers& both, std::int32_t root, const call& options = call()) {
    return self().submit(sotto_broadcast, options, both.data(), both.data(), count(both), root);
  }

  outcome<Out> all_gather(const in_buffers& in, const out_buffers& out,
                          const call& options = call()) {
    return exchange("all_gather", sotto_all_gather, in, out, options);
  }
  outcome<Out> all_gather_v(const in_buffers& in, const out_buffers& out, span<const parts> split,
                            const call& options = call()) {
    return exchange_parts("all_gather_v", sotto_all_gather_v, in, out, split, options);
  }

  outcome<Out> reduce_scatter(const in_buffers& in, const out_buffers& out,
                              const call& options = call()) {
    return exchange("reduce_scatter", sotto_reduce_scatter, in, out, options);
  }
  outcome<Out> reduce_scatter_v(const in_buffers& in, const out_buffers& out,
                                span<const parts> split, const call& options = call()) {
    return exchange_parts("reduce_scatter_v", sotto_reduce_scatter_v, in, out, split, options);
  }

  outcome<Out> reduce(const in_buffers& in, const out_buffers& out, std::int32_t root,
                      const call& options = call()) {
    return exchange("reduce", sotto_reduce, in, out, options, root);
  }
  // In place.
  outcome<Out> reduce(const out_buffers& both, std::int32_t root, const call& options = call()) {
    return self().submit(sotto_reduce, options, both.data(), both.data(), count(both), root);
  }

  outcome<Out> all_reduce(const in_buffers& in, const out_buffers& out,
                          const call& options = call()) {
    return exchange("all_reduce", sotto_all_reduce, in, out, options);
  }
  // In place.
  outcome<Out> all_reduce(const out_buffers& both, const call& options = call()) {
    return self().submit(sotto_all_reduce, options, both.data(), both.data(), count(both));
  }

  outcome<Out> gather(const in_buffers& in, const out_buffers& out, std::int32_t root,
                      const call& options = call()) {
    return exchange("gather", sotto_gather, in, out, options, root);
  }
  outcome<Out> scatter(const in_buffers& in, const out_buffers& out, std::int32_t root,
                       const call& options = call()) {
    return exchange("scatter", sotto_scatter, in, out, options, root);
  }

  // Equal parts.
  outcome<Out> all_to_all(const in_buffers& in, const out_buffers& out,
                          const call& options = call()) {
    const sotto_parts* const equal = nullptr;
    return exchange("all_to_all", sotto_all_to_all, in, out, options, equal);
  }
  outcome<Out> all_to_all(const in_buffers& in, const out_buffers& out, span<const parts> split,
                          const call& options = call()) {
    return exchange_parts("all_to_all", sotto_all_to_all, in, out, split, options);
  }

  outcome<Out> send(const in_buffers& in, std::int32_t peer, const call& options = call()) {
    return self().submit(sotto_send, options, in.data(), count(in), peer);
  }
  outcome<Out> recv(const out_buffers& out, std::int32_t peer, const call& options = call()) {
    return self().submit(sotto_recv, options, out.data(), count(out), peer);
  }

 private:
  Derived& self() noexcept { return static_cast<Derived&>(*this); }

  template <class List>
  static std::uint64_t count(const List& list) noexcept {
    return list.size();
  }

  // The C interface takes one number for both lists.
  template <class F, class... More>
  outcome<Out> exchange(const char* name, F f, const in_buffers& in, const out_buffers& out,
                        const call& options, More... more) {
    if (in.size() != out.size() && in.size() != 0 && out.size() != 0) {
      return self().refused(different(name, "in", in.size(), "out", out.size()));
    }
    const std::uint64_t n = std::max(in.size(), out.size());
    return self().submit(f, options, in.data(), out.data(), n, more...);
  }
  template <class F>
  outcome<Out> exchange_parts(const char* name, F f, const in_buffers& in, const out_buffers& out,
                              span<const parts> split, const call& options) {
    const std::size_t n = std::max(in.size(), out.size());
    if (split.size() != n) {
      return self().refused(different(name, "the buffers", n, "parts", split.size()));
    }
    const sotto_parts* const first = split.data();
    return exchange(name, f, in, out, options, first);
  }

  static std::string different(const char* name, const char* a, std::size_t n, const char* b,
                               std::size_t m) {
    return std::string(name) + ": " + a + " are " + std::to_string(n) + " and " + b + " are " +
           std::to_string(m) + "; allowed: as many";
  }
};

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_COLLECTIVES_HPP
