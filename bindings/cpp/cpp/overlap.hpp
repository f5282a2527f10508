// Gradients that are averaged, or used for a step, while others are still being computed.
#ifndef SOTTO_CPP_OVERLAP_HPP
#define SOTTO_CPP_OVERLAP_HPP

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "codec.hpp"
#include "optim.hpp"

namespace sotto {
inline namespace SOTTO_CPP_ABI {

// One round of an overlap, from overlap::begin on, and its operation. The destructor withdraws a
// round that finish() has not closed, and waits until the operation has ended: the others need not
// wait for this rank.
class SOTTO_CPP_CHECKED overlap_round : private op {
 public:
  overlap_round() noexcept : overlap_(nullptr) {}
  overlap_round(overlap_round&& other) noexcept
      : op(static_cast<op&&>(other)), overlap_(other.take()) {}
  overlap_round& operator=(overlap_round&& other) noexcept {
    if (this != &other) {
      give_up();
      overlap_ = other.take();
      op::operator=(static_cast<op&&>(other));
    }
    return *this;
  }
  overlap_round(const overlap_round&) = delete;
  overlap_round& operator=(const overlap_round&) = delete;
  ~overlap_round() { give_up(); }

  using op::error;
  using op::get;
  using op::stats;
  using op::stream_wait;
  using op::test;
  using op::wait;
  using op::wait_for;
  using op::operator bool;

  // Gradients where `like` said are final, behind what is queued on a cudaStream_t. Threads: any.
  outcome<void> ready(std::uint64_t index, void* stream = nullptr) {
    return ready(span<const std::uint64_t>(&index, 1), stream);
  }
  outcome<void> ready(span<const std::uint64_t> indices, void* stream = nullptr) {
    return mark(indices, nullptr, stream);
  }
  // The same, of gradients that are elsewhere in this round.
  outcome<void> ready(std::uint64_t index, const out_tensor& grad, void* stream = nullptr) {
    return mark(span<const std::uint64_t>(&index, 1), &grad.get(), stream);
  }
  outcome<void> ready(span<const std::uint64_t> indices, const out_buffers& grads,
                      void* stream = nullptr) {
    if (grads.size() != indices.size()) {
      return detail::refuse<void>("ready: indices are " + std::to_string(indices.size()) +
                                  " and grads are " + std::to_string(grads.size()) +
                                  "; allowed: as many");
    }
    return mark(indices, grads.data(), stream);
  }
  // Gradients that this rank does not have in this round. Threads: any.
  outcome<void> unused(span<const std::uint64_t> indices) {
    return detail::finish(sotto_overlap_unused(overlap_, indices.data(), indices.size()));
  }
  // Nothing more comes.
  outcome<void> finish() {
    const sotto_status code = sotto_overlap_finish(overlap_);
    if (code == SOTTO_OK) overlap_ = nullptr;
    return detail::finish(code);
  }
  // This rank gives the round up: wait() says CANCELLED, on every rank.
  outcome<void> withdraw(text reason = text()) {
    const sotto_status code = sotto_overlap_withdraw(overlap_, reason.c_str());
    if (code == SOTTO_OK) overlap_ = nullptr;
    return detail::finish(code);
  }

 private:
  friend class overlap;

  overlap_round(sotto_overlap* overlap, sotto_op* started) noexcept
      : op(started), overlap_(overlap) {}

  outcome<void> mark(span<const std::uint64_t> indices, const sotto_buffer* grads, void* stream) {
    const std::uint64_t n = indices.size();
    return detail::finish(sotto_overlap_ready(overlap_, indices.data(), grads, n, stream));
  }
  sotto_overlap* take() noexcept {
    sotto_overlap* const overlap = overlap_;
    overlap_ = nullptr;
    return overlap;
  }
  // An operation whose round could not be withdrawn has no end to wait for: it is given up. One of
  // an overlap that has been destroyed meanwhile has ended.
  void give_up() noexcept {
    sotto_overlap* const open = take();
    if (open == nullptr || sotto_overlap_withdraw(open, "the round was dropped") == SOTTO_OK)
      return;
    if (sotto_op_test(get()) == SOTTO_IN_PROGRESS) sotto_op_release(release());
  }

  sotto_overlap* overlap_;  // while the round is open
};

class SOTTO_CPP_CHECKED overlap : public handle<sotto_overlap, sotto_overlap_destroy> {
 public:
  using handle::handle;
  overlap() noexcept {}

  // Collective. like: gradients that lie there in every round, or buffer_like<float>(n).
  static outcome<overlap> create(comm& comm, text json, const out_buffers& like) {
    sotto_overlap* c = nullptr;
    const sotto_status code =
        sotto_overlap_create(comm.get(), json.c_str(), like.data(), like.size(), &c);
    return detail::finish(code, overlap(c));
  }

  // Rounds that are steps of an optimizer, with "sotto": {"overlap"} of its file
  // unless json is given. Collective.
  static outcome<overlap> create_step(optim& optim, text json = text()) {
    sotto_overlap* c = nullptr;
    const sotto_status code = sotto_overlap_create_step(optim.get(), json.c_str(), &c);
    return detail::finish(code, overlap(c));
  }

  // Collective.
  outcome<overlap_round> begin(const call& options = call()) {
    sotto_op* started = nullptr;
    const sotto_status code = sotto_overlap_begin(get(), options.get(), &started);
    return detail::finish(code, overlap_round(code == SOTTO_OK ? get() : nullptr, started));
  }

  outcome<sotto_overlap_info> info() const {
    sotto_overlap_info out = SOTTO_OVERLAP_INFO_INIT;
    const sotto_status code = sotto_overlap_get_info(get(), &out);
    return detail::finish(code, out);
  }
  outcome<std::string> report(text kind = text()) const {
    const sotto_overlap* const c = get();
    return detail::read_text([=](char* buf, std::uint64_t cap, std::uint64_t* length) {
      return sotto_overlap_report(c, kind.c_str(), buf, cap, length);
    });
  }
  outcome<std::vector<std::uint8_t>> state_export(state_mode mode) const {
    const sotto_overlap* const c = get();
    return detail::state_export(c, sotto_overlap_state_export, mode);
  }
  outcome<void> state_import(state_mode mode, bytes state) {
    return detail::state_import(get(), sotto_overlap_state_import, mode, state);
  }
};

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_OVERLAP_HPP
