// A fixed set of threads that execute shares of one task at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace sotto {

class ThreadPool {
 public:
  // task(context, index) is called once for every index 0 .. threads - 1; index 0 on the calling
  // thread.
  using Task = void (*)(void* context, uint32_t index);

  // Starts threads - 1 threads at the first run; none for threads <= 1.
  explicit ThreadPool(uint32_t threads) : threads_(threads) {}
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Returns when all shares are done. Not from two threads at once. Where the system refuses
  // threads, the caller does the shares of those that are missing.
  void run(Task task, void* context);

 private:
  void start();
  void work(uint32_t index) noexcept;

  const uint32_t threads_;
  bool started_ = false;
  std::vector<std::thread> workers_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> stop_ = false;
  alignas(64) std::atomic<uint32_t> generation_ = 0;  // raised when a task is there, or at the end
  alignas(64) std::atomic<uint32_t> pending_ = 0;     // workers that have not finished the task
};

}  // namespace sotto
