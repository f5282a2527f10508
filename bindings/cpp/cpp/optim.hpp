// Optimizers.
#ifndef SOTTO_CPP_OPTIM_HPP
#define SOTTO_CPP_OPTIM_HPP

#include <cstdint>
#include <string>
#include <vector>
#if !defined(SOTTO_CPP_NO_EXCEPTIONS)
#include <exception>
#endif

#include "outer.hpp"

namespace sotto {
inline namespace SOTTO_CPP_ABI {

namespace detail {

// A function of the caller's that the library calls during one call of its own. Nothing that it
// throws passes through the library: it ends the call and is thrown again behind it. Without
// exceptions it must not throw.
template <class F>
class callback {
 public:
  explicit callback(F& f) noexcept : f_(&f) {}

  template <class... A>
  std::int32_t run(A... arguments) noexcept {
#if defined(SOTTO_CPP_NO_EXCEPTIONS)
    return (*f_)(arguments...) ? 0 : 1;
#else
    try {
      return (*f_)(arguments...) ? 0 : 1;
    } catch (...) {
      thrown_ = std::current_exception();
      return 1;
    }
#endif
  }
  outcome<void> finish(sotto_status code) {
#if !defined(SOTTO_CPP_NO_EXCEPTIONS)
    if (thrown_) std::rethrow_exception(thrown_);
#endif
    return detail::finish(code);
  }

  static std::int32_t write(void* user, const void* data, std::uint64_t size) noexcept {
    return static_cast<callback*>(user)->run(data, size);
  }
  static std::int32_t read(void* user, std::uint64_t offset, void* data,
                           std::uint64_t size) noexcept {
    return static_cast<callback*>(user)->run(offset, data, size);
  }

 private:
  F* f_;
#if !defined(SOTTO_CPP_NO_EXCEPTIONS)
  std::exception_ptr thrown_;
#endif
};

}  // namespace detail

class SOTTO_CPP_CHECKED optim : public handle<sotto_optim, sotto_optim_destroy> {
 public:
  using handle::handle;
  optim() noexcept {}

  // Collective. json: a DeepSpeed file's text.
  static outcome<optim> create(comm& comm, text json, span<const param> params) {
    sotto_optim* c = nullptr;
    const sotto_status code =
        sotto_optim_create(comm.get(), json.c_str(), params.data(), params.size(), &c);
    return detail::finish(code, optim(c));
  }

  // Collective.
  outcome<op> step(const call& options = call()) {
    return detail::start(get(), sotto_optim_step, options);
  }
  // The operation of a recorded step is in flight once more.
  outcome<void> replay(op& recorded) {
    return detail::finish(sotto_optim_replay(get(), recorded.get()));
  }
  outcome<op> accumulate(const call& options = call()) {
    return detail::start(get(), sotto_optim_accumulate, options);
  }
  // Collective.
  outcome<op> synchronize(const call& options = call()) {
    return detail::start(get(), sotto_optim_synchronize, options);
  }

  // group -1: all of them.
  outcome<void> set(text name, double value, std::int32_t group = -1) {
    return detail::finish(sotto_optim_set(get(), name.c_str(), group, value));
  }
  outcome<void> set_grads(const in_buffers& grads) {
    return detail::finish(sotto_optim_set_grads(get(), grads.data(), grads.size()));
  }
  // Without model copies these stay where they are.
  outcome<void> set_params(const out_buffers& params,
                           const out_buffers& model_copies = out_buffers()) {
    return detail::set_params(get(), sotto_optim_set_params, params, model_copies);
  }
  // A flag, 0 or 1, for each parameter.
  outcome<void> set_frozen(span<const std::uint8_t> frozen) {
    return detail::finish(sotto_optim_set_frozen(get(), frozen.data(), frozen.size()));
  }

  outcome<sotto_optim_info> info() const {
    sotto_optim_info out = SOTTO_OPTIM_INFO_INIT;
    const sotto_status code = sotto_optim_get_info(get(), &out);
    return detail::finish(code, out);
  }
  outcome<std::string> report(text kind = text()) const {
    const sotto_optim* const c = get();
    return detail::read_text([=](char* buf, std::uint64_t cap, std::uint64_t* length) {
      return sotto_optim_report(c, kind.c_str(), buf, cap, length);
    });
  }

  outcome<std::vector<std::uint8_t>> state_export(state_mode mode = state_mode::configured) const {
    const sotto_optim* const c = get();
    return detail::state_export(c, sotto_optim_state_export, mode);
  }
  outcome<void> state_import(state_mode mode, bytes state) {
    return detail::state_import(get(), sotto_optim_state_import, mode, state);
  }
  // Collective.
  outcome<void> state_import_arrays(span<const named_array> arrays) {
    return detail::finish(sotto_optim_state_import_arrays(get(), arrays.data(), arrays.size()));
  }
  // write(const void* data, std::uint64_t size) takes the next bytes; false ends the export.
  template <class F>
  outcome<void> state_write(state_mode mode, F&& write) const {
    typedef detail::callback<typename std::remove_reference<F>::type> callback;
    callback mine(write);
    const sotto_status code =
        sotto_optim_state_write(get(), static_cast<sotto_state_mode>(mode), callback::write, &mine);
    return mine.finish(code);
  }
  // read(std::uint64_t offset, void* data, std::uint64_t size) fills data with the bytes from
  // offset on; false ends the import. size: bytes of the state.
  template <class F>
  outcome<void> state_read(state_mode mode, F&& read, std::uint64_t size) {
    typedef detail::callback<typename std::remove_reference<F>::type> callback;
    callback mine(read);
    const sotto_status code = sotto_optim_state_read(get(), static_cast<sotto_state_mode>(mode),
                                                     callback::read, &mine, size);
    return mine.finish(code);
  }
  outcome<void> set_user_state(bytes state) {
    return detail::finish(sotto_optim_set_user_state(get(), state.data(), state.size()));
  }
  outcome<std::vector<std::uint8_t>> user_state() const {
    const sotto_optim* const c = get();
    return detail::read_bytes([=](void* buf, std::uint64_t cap, std::uint64_t* length) {
      return sotto_optim_get_user_state(c, buf, cap, length);
    });
  }

  // Of a file with "sotto": {"outer": ...}.
  outcome<sotto::outer> outer() {
    sotto_outer* c = nullptr;
    const sotto_status code = sotto_optim_outer(get(), &c);
    return detail::finish(code, sotto::outer(c));
  }
};

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_OPTIM_HPP
