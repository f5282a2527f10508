// Compressed all-reduces, their residuals, and what exported state holds.
#ifndef SOTTO_CPP_CODEC_HPP
#define SOTTO_CPP_CODEC_HPP

#include <cstdint>
#include <vector>

#include "comm.hpp"

namespace sotto {
inline namespace SOTTO_CPP_ABI {

enum class state_mode : sotto_state_mode {
  configured = SOTTO_STATE_CONFIGURED,
  exact = SOTTO_STATE_EXACT,
  reset = SOTTO_STATE_RESET,
  mean = SOTTO_STATE_MEAN,
  common = SOTTO_STATE_COMMON
};

namespace detail {

// Functions that export and import state all have the same form.
template <class C, class F>
outcome<std::vector<std::uint8_t>> state_export(const C* c, F f, state_mode mode) {
  return read_bytes([=](void* buf, std::uint64_t cap, std::uint64_t* length) {
    return f(c, static_cast<sotto_state_mode>(mode), buf, cap, length);
  });
}
template <class C, class F>
outcome<void> state_import(C* c, F f, state_mode mode, bytes state) {
  return finish(f(c, static_cast<sotto_state_mode>(mode), state.data(), state.size()));
}

}  // namespace detail

// For call::encode.
class SOTTO_CPP_CHECKED codec : public handle<sotto_codec, sotto_codec_destroy> {
 public:
  using handle::handle;
  codec() noexcept {}

  static outcome<codec> create(comm& comm, text json, const in_buffers& like) {
    sotto_codec* c = nullptr;
    const sotto_status code =
        sotto_codec_create(comm.get(), json.c_str(), like.data(), like.size(), &c);
    return detail::finish(code, codec(c));
  }

  outcome<std::vector<std::uint8_t>> state_export(state_mode mode) const {
    const sotto_codec* const c = get();
    return detail::state_export(c, sotto_codec_state_export, mode);
  }
  outcome<void> state_import(state_mode mode, bytes state) {
    return detail::state_import(get(), sotto_codec_state_import, mode, state);
  }
};

// The library would send data as it is without a codec: an empty one becomes what is no handle,
// which it refuses.
inline call& call::encode(const codec& codec) noexcept {
  c_.codec = codec ? codec.get() : reinterpret_cast<sotto_codec*>(std::uintptr_t{1});
  return *this;
}

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_CODEC_HPP
