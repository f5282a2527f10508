// What sotto.h says about devices and streams: operations start after what is queued on the
// caller's stream, streams wait for operations without the host, buffers of a call are on one
// device.
#include <chrono>
#include <thread>

#include "tests/cuda/device_memory.h"

namespace sotto::test {
namespace {

const WorldOptions kDefault;

// Device memory of n floats, freed at the end.
class Floats {
 public:
  explicit Floats(uint64_t n, int device = 0) : count_(n), device_(device) {
    CUDA_OK(cudaSetDevice(device_));
    CUDA_OK(cudaMalloc(&data_, n * 4));
  }
  ~Floats() {
    (void)cudaSetDevice(device_);
    (void)cudaFree(data_);
  }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
  void* data() const { return data_; }
  sotto_buffer buffer() const {
    return {data_, count_, SOTTO_FLOAT32, SOTTO_DEVICE_CUDA, device_, 0};
  }

 private:
  uint64_t count_;
  int device_;
  void* data_ = nullptr;
};

struct Stream {
  Stream() { CUDA_OK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~Stream() { (void)cudaStreamDestroy(handle); }
  cudaStream_t handle = nullptr;
};

// Pinned host memory of n floats.
class PinnedFloats {
 public:
  PinnedFloats(uint64_t n, float value) : count_(n) {
    CUDA_OK(cudaHostAlloc(reinterpret_cast<void**>(&data_), n * 4, cudaHostAllocDefault));
    std::fill_n(data_, n, value);
  }
  ~PinnedFloats() { (void)cudaFreeHost(data_); }
  PinnedFloats(const PinnedFloats&) = delete;
  PinnedFloats& operator=(const PinnedFloats&) = delete;
  float* data() const { return data_; }
  uint64_t bytes() const { return count_ * 4; }

 private:
  uint64_t count_;
  float* data_ = nullptr;
};

// A chain of three all-reduces and of copies before, between and behind them, on one stream, of
// which the host waits for the end alone.
TEST(CudaStreams, OrderWorkWithoutTheHost) {
  for (const char* transport : {"inproc", "tcp"}) {
    WorldOptions options;
    options.transport = transport;
    EXPECT_EQ(run_world(2, options,
                        [](Member& self) {
                          constexpr uint64_t kN = 40000;
                          Floats a(kN), b(kN);
                          PinnedFloats in(kN, static_cast<float>(self.rank + 1)), out(kN, 0);
                          Stream stream;
                          const sotto_buffer from = a.buffer(), to = b.buffer();
                          const sotto_call call =
                              call_with([&](auto& c) { c.stream = stream.handle; });
                          CUDA_OK(cudaMemcpyAsync(a.data(), in.data(), in.bytes(),
                                                  cudaMemcpyHostToDevice, stream.handle));
                          for (int round = 0; round < 3; ++round) {
                            sotto_op* op = nullptr;
                            OK(sotto_all_reduce(self.comm, &from, &to, 1, &call, &op));
                            OK(sotto_op_stream_wait(op, stream.handle));
                            OK(sotto_op_release(op));
                            CUDA_OK(cudaMemcpyAsync(a.data(), b.data(), in.bytes(),
                                                    cudaMemcpyDeviceToDevice, stream.handle));
                          }
                          CUDA_OK(cudaMemcpyAsync(out.data(), a.data(), out.bytes(),
                                                  cudaMemcpyDeviceToHost, stream.handle));
                          CUDA_OK(cudaStreamSynchronize(stream.handle));
                          // 1 + 2, then twice that over two ranks.
                          for (uint64_t i = 0; i < kN; ++i)
                            require(out.data()[i] == 12.0f, "the sum of sums");
                          OK(sotto_barrier(self.comm, nullptr, nullptr));
                        }),
              "")
        << transport;
  }
}

// Two streams wait for operations in the opposite order of their completion.
TEST(CudaStreams, SeveralStreamsWaitForSeveralOperations) {
  EXPECT_EQ(run_world(2, kDefault,
                      [](Member& self) {
                        constexpr uint64_t kN = 5000;
                        Floats a(kN), b(kN);
                        PinnedFloats in(kN, 1), out_a(kN, 0), out_b(kN, 0);
                        Stream first, second;
                        const sotto_buffer at_a = a.buffer(), at_b = b.buffer();
                        CUDA_OK(cudaMemcpyAsync(a.data(), in.data(), in.bytes(),
                                                cudaMemcpyHostToDevice, first.handle));
                        CUDA_OK(cudaMemcpyAsync(b.data(), in.data(), in.bytes(),
                                                cudaMemcpyHostToDevice, second.handle));
                        const auto on = [](const Stream& s) {
                          return call_with([&](auto& c) { c.stream = s.handle; });
                        };
                        const sotto_call with_first = on(first), with_second = on(second);
                        sotto_op* ops[2] = {};
                        OK(sotto_all_reduce(self.comm, &at_a, &at_a, 1, &with_first, &ops[0]));
                        OK(sotto_all_reduce(self.comm, &at_b, &at_b, 1, &with_second, &ops[1]));
                        OK(sotto_op_stream_wait(ops[1], first.handle));
                        OK(sotto_op_stream_wait(ops[0], second.handle));
                        CUDA_OK(cudaMemcpyAsync(out_b.data(), b.data(), out_b.bytes(),
                                                cudaMemcpyDeviceToHost, first.handle));
                        CUDA_OK(cudaMemcpyAsync(out_a.data(), a.data(), out_a.bytes(),
                                                cudaMemcpyDeviceToHost, second.handle));
                        CUDA_OK(cudaStreamSynchronize(first.handle));
                        CUDA_OK(cudaStreamSynchronize(second.handle));
                        require(out_a.data()[kN - 1] == 2 && out_b.data()[0] == 2, "sums");
                        for (sotto_op* op : ops) {
                          OK(sotto_op_wait(op, -1));
                          OK(sotto_op_stream_wait(op, first.handle));  // done: nothing to wait for
                          OK(sotto_op_release(op));
                        }
                      }),
            "");
}

// A failed operation lets the streams go that wait for it.
TEST(CudaStreams, AFailedOperationLetsStreamsGo) {
  EXPECT_EQ(run_world(2, kDefault,
                      [](Member& self) {
                        Floats a(1000);
                        Stream stream;
                        const sotto_buffer at = a.buffer();
                        const sotto_call call =
                            call_with([&](auto& c) { c.stream = stream.handle; });
                        if (self.rank == 0) {
                          sotto_op* op = nullptr;
                          OK(sotto_all_reduce(self.comm, &at, &at, 1, &call, &op));
                          std::thread aborts([&] {
                            std::this_thread::sleep_for(std::chrono::milliseconds(50));
                            EXPECT_EQ(sotto_comm_abort(self.comm, "test"), SOTTO_OK);
                          });
                          OK(sotto_op_stream_wait(op, stream.handle));
                          aborts.join();
                          require(sotto_op_wait(op, -1) == SOTTO_E_ABORTED, "aborted");
                          CUDA_OK(cudaStreamSynchronize(stream.handle));
                          OK(sotto_op_release(op));
                        } else {
                          while (sotto_comm_error(self.comm, nullptr) == SOTTO_OK)
                            OK(sotto_context_poll(self.context, 1000));
                        }
                      }),
            "");
}

// A graph would not run the host's side of an operation: what is called for a stream that is being
// captured is refused, changes nothing, and leaves the capture whole.
TEST(CudaStreams, AreRefusedWhileTheyAreCaptured) {
  EXPECT_EQ(
      run_world(
          2, kDefault,
          [](Member& self) {
            constexpr uint64_t kN = 3000;
            Floats a(kN), b(kN);
            PinnedFloats in(kN, 1), out(kN, 0);
            Stream stream, other;
            const sotto_buffer at = a.buffer(), to = b.buffer();
            const auto on = [](const Stream& s) {
              return call_with([&](auto& c) { c.stream = s.handle; });
            };
            const sotto_call captured = on(stream), free = on(other);
            CUDA_OK(cudaMemcpyAsync(b.data(), in.data(), in.bytes(), cudaMemcpyHostToDevice,
                                    other.handle));
            CUDA_OK(cudaMemcpyAsync(a.data(), b.data(), in.bytes(), cudaMemcpyDeviceToDevice,
                                    other.handle));
            sotto_op *flying = nullptr, *done = nullptr;
            OK(sotto_all_reduce(self.comm, &at, &at, 1, &free, &done));
            OK(sotto_op_wait(done, -1));
            sotto_param param = {};
            param.struct_size = sizeof param;
            param.param = at;
            param.grad = to;
            sotto_optim* optim = nullptr;
            OK(sotto_optim_create(self.comm,
                                  R"({"optimizer": {"type": "SGD", "params": {"lr": 1}}})", &param,
                                  1, &optim));
            CUDA_OK(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal));
            CUDA_OK(cudaMemcpyAsync(a.data(), in.data(), in.bytes(), cudaMemcpyHostToDevice,
                                    stream.handle));
            const char* why = "is being captured into a CUDA graph";
            OK(sotto_all_reduce(self.comm, &to, &to, 1, &free, &flying));
            FAILS(sotto_all_reduce(self.comm, &at, &at, 1, &captured, nullptr),
                  SOTTO_E_INVALID_STATE, "cuda:0", why);
            sotto_op* recorded = nullptr;
            FAILS(sotto_optim_step(optim, &captured, &recorded), SOTTO_E_UNSUPPORTED, "\"inproc\"",
                  "CUDA graph");
            for (sotto_op* op : {flying, done})
              FAILS(sotto_op_stream_wait(op, stream.handle), SOTTO_E_INVALID_STATE, "cuda:0", why);
            CUDA_OK(cudaMemcpyAsync(out.data(), a.data(), out.bytes(), cudaMemcpyDeviceToHost,
                                    stream.handle));
            cudaGraph_t graph = nullptr;
            CUDA_OK(cudaStreamEndCapture(stream.handle, &graph));
            cudaGraphExec_t exec = nullptr;
            CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
            OK(sotto_op_wait(flying, -1));
            // Between launches of the graph operations are as usual.
            for (int round = 0; round < 2; ++round) {
              CUDA_OK(cudaGraphLaunch(exec, stream.handle));
              sotto_op* op = nullptr;
              OK(sotto_all_reduce(self.comm, &at, &at, 1, &captured, &op));
              OK(sotto_op_stream_wait(op, stream.handle));
              OK(sotto_op_release(op));
            }
            PinnedFloats sum(kN, 0);
            CUDA_OK(cudaMemcpyAsync(sum.data(), a.data(), sum.bytes(), cudaMemcpyDeviceToHost,
                                    stream.handle));
            CUDA_OK(cudaStreamSynchronize(stream.handle));
            require(out.data()[kN - 1] == 1, "what the graph has copied");
            require(sum.data()[0] == 2 && sum.data()[kN - 1] == 2, "the sum behind the graph");
            OK(sotto_optim_step(optim, &captured, nullptr));
            OK(sotto_optim_destroy(optim));
            for (sotto_op* op : {flying, done}) OK(sotto_op_release(op));
            CUDA_OK(cudaGraphExecDestroy(exec));
            CUDA_OK(cudaGraphDestroy(graph));
          }),
      "");
}

// In the strictest mode, which forbids every thread what might disturb: operations in flight, and
// the progress thread, do not.
TEST(CudaStreams, OperationsAndCapturesOfOtherStreamsGoTogether) {
  EXPECT_EQ(run_world(1, kDefault,
                      [](Member& self) {
                        constexpr uint64_t kN = 3000;
                        Floats a(kN), b(kN);
                        PinnedFloats in(kN, 1);
                        Stream stream, other;
                        const sotto_buffer at = b.buffer();
                        const sotto_call call =
                            call_with([&](auto& c) { c.stream = other.handle; });
                        OK(sotto_all_reduce(self.comm, &at, &at, 1, &call, nullptr));
                        CUDA_OK(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeGlobal));
                        CUDA_OK(cudaMemcpyAsync(a.data(), in.data(), in.bytes(),
                                                cudaMemcpyHostToDevice, stream.handle));
                        const sotto_buffer larger = a.buffer();  // a plan that is not there yet
                        for (const sotto_buffer* x : {&at, &larger}) {
                          sotto_op* op = nullptr;
                          OK(sotto_all_gather(self.comm, x, x, 1, &call, &op));
                          OK(sotto_op_wait(op, -1));
                          OK(sotto_op_release(op));
                        }
                        cudaGraph_t graph = nullptr;
                        CUDA_OK(cudaStreamEndCapture(stream.handle, &graph));
                        CUDA_OK(cudaGraphDestroy(graph));
                      }),
            "");
}

TEST(CudaDevices, OneDevicePerCall) {
  EXPECT_EQ(run_world(1, kDefault,
                      [](Member& self) {
                        std::vector<float> host(8);
                        Floats device(8);
                        const sotto_buffer h = buffer(host), d = device.buffer();
                        FAILS(sotto_all_reduce(self.comm, &d, &h, 1, nullptr, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "in[0] is on cuda:0", "out[0] is on cpu");
                        const sotto_buffer two[] = {d, h};
                        FAILS(sotto_all_reduce(self.comm, two, two, 2, nullptr, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "in[0] is on cuda:0", "in[1] is on cpu");
                        sotto_buffer far = d;
                        far.device_id = 99;
                        FAILS(sotto_all_reduce(self.comm, &far, &far, 1, nullptr, nullptr),
                              SOTTO_E_DEVICE, "in[0]", "there is no cuda:99");
                        sotto_codec* codec = nullptr;
                        OK(sotto_codec_create(self.comm, R"({"type": "onebit"})", &d, 1, &codec));
                        const sotto_call call = call_with([&](auto& c) { c.codec = codec; });
                        FAILS(sotto_all_reduce(self.comm, &h, &h, 1, &call, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "in[0] is on cpu", "cuda:0");
                        OK(sotto_codec_destroy(codec));
                        // Pinned host memory is host memory, and has no stream.
                        sotto_buffer pinned = h;
                        pinned.device_type = SOTTO_DEVICE_CUDA_HOST;
                        sotto_op* op = nullptr;
                        OK(sotto_all_reduce(self.comm, &pinned, &h, 1, nullptr, &op));
                        OK(sotto_op_wait(op, -1));
                        FAILS(sotto_op_stream_wait(op, nullptr), SOTTO_E_UNSUPPORTED,
                              "host memory");
                        OK(sotto_op_release(op));
                      }),
            "");
}

// Calls leave the thread's current device alone, and every rank may use another one.
TEST(CudaDevices, EveryRankItsOwn) {
  int devices = 0;
  ASSERT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
  if (devices < 2) GTEST_SKIP() << "needs two CUDA devices";
  EXPECT_EQ(run_world(2, kDefault,
                      [](Member& self) {
                        Floats mine(3000, self.rank);
                        CUDA_OK(cudaSetDevice(1 - self.rank));
                        sotto_buffer at = mine.buffer();
                        CUDA_OK(cudaSetDevice(self.rank));
                        Stream stream;
                        PinnedFloats in(3000, 2), out(3000, 0);
                        CUDA_OK(cudaMemcpyAsync(mine.data(), in.data(), in.bytes(),
                                                cudaMemcpyHostToDevice, stream.handle));
                        const sotto_call call =
                            call_with([&](auto& c) { c.stream = stream.handle; });
                        CUDA_OK(cudaSetDevice(1 - self.rank));
                        OK(sotto_all_reduce(self.comm, &at, &at, 1, &call, nullptr));
                        int current = -1;
                        CUDA_OK(cudaGetDevice(&current));
                        require(current == 1 - self.rank, "the current device is the caller's");
                        CUDA_OK(cudaSetDevice(self.rank));
                        CUDA_OK(cudaMemcpyAsync(out.data(), mine.data(), out.bytes(),
                                                cudaMemcpyDeviceToHost, stream.handle));
                        CUDA_OK(cudaStreamSynchronize(stream.handle));
                        require(out.data()[2999] == 4, "the sum");
                      }),
            "");
}

TEST(CudaDevices, AreInTheReport) {
  sotto_context* context = new_context();
  const std::string text = read_all([&](char* buf, uint64_t cap, uint64_t* out_len) {
    return sotto_context_report(context, nullptr, buf, cap, out_len);
  });
  EXPECT_NE(text.find("cuda:0 ("), std::string::npos) << text;
  EXPECT_NE(std::string(sotto_build_info()).find("\"cuda\""), std::string::npos);
  EXPECT_EQ(sotto_context_destroy(context), SOTTO_OK);
}

}  // namespace
}  // namespace sotto::test
