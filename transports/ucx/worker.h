// The UCX worker of one transport: what UCX does for it, and the active messages that it brings to
// their ends. Transports share UCX's context alone, since endpoints of one worker that come and go
// between the same two workers are taken for each other by UCX 1.13. UCX's functions are called
// here and in Endpoint alone.
//
// UCX's callbacks may not call ucp_worker_progress, inside of which they are.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/base/clock.h"
#include "transports/ucx/api.h"
#include "transports/ucx/message.h"
#include "transports/ucx/poller.h"

namespace sotto::ucx {

// Something that messages are for.
class Receiver {
 public:
  virtual ~Receiver() = default;
  // Called inside of ucp_worker_progress, so without Worker::settle. Data that is not held is gone
  // on return. True: held data stays.
  virtual bool take(Arrived arrived) = 0;
  // There is something to do without an event.
  virtual bool due() const = 0;
  // Goes on with what has arrived and ended. True: something moved.
  virtual bool serve() = 0;
};

// Something that is told when UCX has lost the peer of an endpoint.
class LossListener {
 public:
  virtual ~LossListener() = default;
  virtual void lost(ucs_status_t why) = 0;
};

// UCX as one Sotto context has it.
class UcpContext {
 public:
  // TRANSPORT: what UCX says.
  static Result<std::shared_ptr<UcpContext>> make(std::shared_ptr<const Api> api);
  explicit UcpContext(std::shared_ptr<const Api> api) : api_(std::move(api)) {}  // for make
  ~UcpContext();
  UcpContext(const UcpContext&) = delete;

  const Api& api() const { return *api_; }
  ucp_context_h handle() const { return context_; }

 private:
  const std::shared_ptr<const Api> api_;
  ucp_context_h context_ = nullptr;
};

class Worker final : public Served {
 public:
  // Served by the poller. TRANSPORT: what UCX says.
  static Result<std::shared_ptr<Worker>> make(std::shared_ptr<UcpContext> context,
                                              std::shared_ptr<UcxPoller> poller);
  Worker(std::shared_ptr<UcpContext> context, std::shared_ptr<UcxPoller> poller)  // for make
      : context_(std::move(context)), poller_(std::move(poller)) {}
  ~Worker() override;
  Worker(const Worker&) = delete;

  int descriptor() const override { return descriptor_; }
  bool arm() override;
  bool pass() override;

  const Api& api() const { return context_->api(); }
  ucp_worker_h handle() const { return worker_; }
  // By which others connect to it.
  const std::string& address() const { return address_; }

  // Messages for the number are its own. remove is legal inside serve.
  void add(uint64_t number, Receiver& receiver);
  void remove(uint64_t number);

  // The error handler of endpoints, whose argument is the worker: tells the endpoint's listener.
  static void on_lost(void* self, ucp_ep_h endpoint, ucs_status_t status);
  void add(ucp_ep_h endpoint, LossListener& listener) { endpoints_[endpoint] = &listener; }
  void remove(ucp_ep_h endpoint) { endpoints_.erase(endpoint); }

  // Fetches data that a rendezvous brings; the result is a request.
  void* receive(void* data, void* place, uint64_t bytes);
  // Gives back data that is not needed, or not any more.
  void release(void* data) { api().ucp_am_data_release(worker_, data); }
  // There is no request, or look_at would say how it has ended.
  bool ended(void* request) const;
  // OK: the request has ended well, or there is none. A request that has ended is freed.
  // UCS_INPROGRESS: it has not ended.
  ucs_status_t look_at(void*& request) const;
  // Drives UCX until the request, whose endpoint was dropped, has ended, for a second at most. What
  // it brings meanwhile is put aside.
  void settle(void*& request);
  bool settling() const { return settling_; }

 private:
  static ucs_status_t on_message(void* self, const void* header, size_t header_bytes, void* data,
                                 size_t bytes, const ucp_am_recv_param_t* param);

  Status open();
  bool progress() { return api().ucp_worker_progress(worker_) != 0; }

  const std::shared_ptr<UcpContext> context_;
  const std::shared_ptr<UcxPoller> poller_;
  ucp_worker_h worker_ = nullptr;
  int descriptor_ = -1;
  std::string address_;
  std::unordered_map<uint64_t, Receiver*> receivers_;  // by number
  std::vector<Receiver*> served_;                      // null: removed inside serve
  std::map<ucp_ep_h, LossListener*> endpoints_;        // that are open
  bool serving_ = false;
  bool settling_ = false;
};

}  // namespace sotto::ucx
