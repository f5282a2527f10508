// Outer optimizers: CO2, DiLoCo, SlowMo, local SGD and their family.
#ifndef SOTTO_CPP_OUTER_HPP
#define SOTTO_CPP_OUTER_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "codec.hpp"

namespace sotto {
inline namespace SOTTO_CPP_ABI {

namespace detail {

// Functions that start an operation of a handle all have the same form.
template <class C, class F>
outcome<op> start(C* c, F f, const call& options) {
  sotto_op* started = nullptr;
  const sotto_status code = f(c, options.get(), &started);
  return finish(code, op(started));
}

// Functions that say where parameters and model copies lie from now on.
template <class C, class F>
outcome<void> set_params(C* c, F f, const out_buffers& params, const out_buffers& model_copies) {
  if (model_copies.size() != 0 && model_copies.size() != params.size()) {
    return refuse<void>("set_params: params are " + std::to_string(params.size()) +
                        " and model_copies are " + std::to_string(model_copies.size()) +
                        "; allowed: as many, or none");
  }
  return finish(f(c, params.data(), model_copies.data(), params.size()));
}

}  // namespace detail

class SOTTO_CPP_CHECKED outer : public handle<sotto_outer, sotto_outer_destroy> {
 public:
  using handle::handle;
  outer() noexcept {}

  // Collective.
  static outcome<outer> create(comm& comm, text json, span<const param> params) {
    sotto_outer* c = nullptr;
    const sotto_status code =
        sotto_outer_create(comm.get(), json.c_str(), params.data(), params.size(), &c);
    return detail::finish(code, outer(c));
  }
  // Of parameters that are shards; shards: of the ranks with those of this replica. Collective
  // among both.
  static outcome<outer> create_sharded(comm& comm, sotto::comm& shards, text json,
                                       span<const param> params) {
    sotto_outer* c = nullptr;
    const sotto_status code = sotto_outer_create_sharded(comm.get(), shards.get(), json.c_str(),
                                                         params.data(), params.size(), &c);
    return detail::finish(code, outer(c));
  }

  outcome<void> set(text name, double value) {
    return detail::finish(sotto_outer_set(get(), name.c_str(), value));
  }
  // Without model copies these stay where they are.
  outcome<void> set_params(const out_buffers& params,
                           const out_buffers& model_copies = out_buffers()) {
    return detail::set_params(get(), sotto_outer_set_params, params, model_copies);
  }
  // Collective where something happens: an inner step has been made.
  outcome<op> step(const call& options = call()) {
    return detail::start(get(), sotto_outer_step, options);
  }
  // Collective.
  outcome<op> flush(const call& options = call()) {
    return detail::start(get(), sotto_outer_flush, options);
  }
  outcome<op> swap(const call& options = call()) {
    return detail::start(get(), sotto_outer_swap, options);
  }
  outcome<void> vote(std::uint32_t bits) { return detail::finish(sotto_outer_vote(get(), bits)); }
  outcome<sotto_outer_info> info() const {
    sotto_outer_info out = SOTTO_OUTER_INFO_INIT;
    const sotto_status code = sotto_outer_get_info(get(), &out);
    return detail::finish(code, out);
  }
  outcome<std::vector<std::uint8_t>> state_export(state_mode mode) const {
    const sotto_outer* const c = get();
    return detail::state_export(c, sotto_outer_state_export, mode);
  }
  outcome<void> state_import(state_mode mode, bytes state) {
    return detail::state_import(get(), sotto_outer_state_import, mode, state);
  }
};

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_OUTER_HPP
