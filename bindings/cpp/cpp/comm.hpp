// Groups of ranks.
#ifndef SOTTO_CPP_COMM_HPP
#define SOTTO_CPP_COMM_HPP

#include <cstdint>
#include <string>
#include <utility>

#include "collectives.hpp"
#include "context.hpp"
#include "op.hpp"

namespace sotto {
inline namespace SOTTO_CPP_ABI {

// The fields of sotto_comm_config, each at its default until it is set. A text is borrowed until
// comm::create has returned; an id is copied.
class comm_config {
 public:
  comm_config() noexcept : c_(initial()), id_() {}
  comm_config(const comm_config& other) noexcept : c_(other.c_), id_(other.id_) { keep_id(); }
  comm_config& operator=(const comm_config& other) noexcept {
    c_ = other.c_;
    id_ = other.id_;
    keep_id();
    return *this;
  }

  comm_config& rank(std::int32_t rank, std::int32_t size) noexcept {
    c_.rank = rank;
    c_.size = size;
    return *this;
  }
  comm_config& id(const sotto_unique_id& id) noexcept {
    id_ = id;
    c_.id = &id_;
    return *this;
  }
  comm_config& transport(text name) noexcept {
    c_.transport = name.c_str();
    return *this;
  }
  template <class S, class = detail::if_temporary_string<S>>
  comm_config& transport(S&& name) = delete;
  comm_config& timeout(microseconds timeout) noexcept {
    c_.timeout_us = timeout.count();
    return *this;
  }
  // `fn` must not throw.
  comm_config& all_gather(sotto_all_gather_fn fn, void* user) noexcept {
    c_.all_gather = fn;
    c_.user = user;
    return *this;
  }
  // An ncclComm_t, lent to the comm.
  comm_config& native_comm(void* comm) noexcept {
    c_.native_comm = comm;
    return *this;
  }

  const sotto_comm_config* get() const noexcept { return &c_; }

 private:
  static sotto_comm_config initial() noexcept {
    sotto_comm_config c = SOTTO_COMM_CONFIG_INIT;
    return c;
  }

  void keep_id() noexcept {
    if (c_.id != nullptr) c_.id = &id_;
  }

  sotto_comm_config c_;
  sotto_unique_id id_;  // what c_.id leads to, unless that is NULL
};

// Calls that are collected on a comm, from comm::group on, and progress together. Collectives of
// the comm itself wait until end() has been called. The destructor of a group that was not ended
// closes it and starts nothing.
class SOTTO_CPP_CHECKED group : public collectives<group, void> {
 public:
  group() noexcept : comm_(nullptr) {}
  group(group&& other) noexcept : comm_(other.take()), refused_(std::move(other.refused_)) {}
  group& operator=(group&& other) noexcept {
    if (this != &other) {
      give_up();
      comm_ = other.take();
      refused_ = std::move(other.refused_);
    }
    return *this;
  }
  group(const group&) = delete;
  group& operator=(const group&) = delete;
  ~group() { give_up(); }

  // Starts what was collected as one operation; after a call that was refused nothing, and that
  // error is told. The group is closed in any case.
  outcome<op> end(const call& options = call()) {
    sotto_op* started = nullptr;
    const sotto_status code = sotto_group_end(take(), options.get(), &started);
    if (!refused_.empty() && code == SOTTO_E_INVALID_ARGUMENT)
      return detail::refuse<op>(std::move(refused_));
    return detail::finish(code, op(started));
  }

 private:
  friend class comm;
  friend class collectives<group, void>;

  explicit group(sotto_comm* comm) noexcept : comm_(comm) {}

  template <class F, class... A>
  outcome<void> submit(F f, const call& options, A... arguments) {
    return detail::finish(f(comm_, arguments..., options.get(), nullptr));
  }
  // The library has to know, since it has not seen the call.
  outcome<void> refused(std::string why) {
    refuse_one(comm_);
    if (refused_.empty()) refused_ = why;
    return detail::refuse<void>(std::move(why));
  }
  sotto_comm* take() noexcept {
    sotto_comm* const comm = comm_;
    comm_ = nullptr;
    return comm;
  }
  // A call that is refused makes the library start nothing of a group.
  static void refuse_one(sotto_comm* comm) noexcept {
    sotto_send(comm, nullptr, 0, -1, nullptr, nullptr);
  }
  void give_up() noexcept {
    sotto_comm* const comm = take();
    if (comm == nullptr) return;
    refuse_one(comm);
    sotto_group_end(comm, nullptr, nullptr);
  }

  sotto_comm* comm_;
  std::string refused_;  // the first call that has not reached the library
};

class SOTTO_CPP_CHECKED comm : public handle<sotto_comm, sotto_comm_destroy>,
                               public collectives<comm, op> {
 public:
  using handle::handle;
  comm() noexcept {}

  // Collective.
  static outcome<comm> create(context& context, const comm_config& config = comm_config()) {
    sotto_comm* c = nullptr;
    const sotto_status code = sotto_comm_create(context.get(), config.get(), &c);
    return detail::finish(code, comm(c));
  }
  // Collective. color -1: this rank gets an empty comm.
  outcome<comm> split(std::int32_t color, std::int32_t key) {
    sotto_comm* c = nullptr;
    const sotto_status code = sotto_comm_split(get(), color, key, &c);
    return detail::finish(code, comm(c));
  }

  outcome<std::int32_t> rank() const {
    std::int32_t rank = 0;
    const sotto_status code = sotto_comm_rank(get(), &rank);
    return detail::finish(code, rank);
  }
  outcome<std::int32_t> size() const {
    std::int32_t size = 0;
    const sotto_status code = sotto_comm_size(get(), &size);
    return detail::finish(code, size);
  }

  outcome<void> abort(text reason = text()) {
    return detail::finish(sotto_comm_abort(get(), reason.c_str()));
  }
  // The first cause of failure. Throws nothing but bad_alloc.
  status error() const {
    const char* said = nullptr;
    const sotto_status code = sotto_comm_error(get(), &said);
    return detail::told(code, said);
  }
  outcome<std::string> report(text kind = text()) const {
    const sotto_comm* const c = get();
    return detail::read_text([=](char* buf, std::uint64_t cap, std::uint64_t* length) {
      return sotto_comm_report(c, kind.c_str(), buf, cap, length);
    });
  }
  outcome<sotto_comm_counters> counters() const {
    sotto_comm_counters out = SOTTO_COMM_COUNTERS_INIT;
    const sotto_status code = sotto_comm_get_counters(get(), &out);
    return detail::finish(code, out);
  }
  // JSON: what an operation would send.
  outcome<std::string> plan(text request) const {
    const sotto_comm* const c = get();
    return detail::read_text([=](char* buf, std::uint64_t cap, std::uint64_t* length) {
      return sotto_plan_report(c, request.c_str(), buf, cap, length);
    });
  }

  // Begins to collect calls.
  outcome<sotto::group> group() {
    const sotto_status code = sotto_group_begin(get());
    return detail::finish(code, sotto::group(code == SOTTO_OK ? get() : nullptr));
  }

 private:
  friend class collectives<comm, op>;

  template <class F, class... A>
  outcome<op> submit(F f, const call& options, A... arguments) {
    sotto_op* started = nullptr;
    const sotto_status code = f(get(), arguments..., options.get(), &started);
    return detail::finish(code, op(started));
  }
  static outcome<op> refused(std::string why) { return detail::refuse<op>(std::move(why)); }
};

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_COMM_HPP
