// What sotto-run and its agents on other machines tell each other over a remote shell's standard
// input and output.
//
// An agent says hello with kHello, its protocol and a line feed; what a login shell has printed
// before that is no part of it. Frames follow in both directions: kind, rank, value and size of the
// body as four 32-bit integers in the byte order of the machines, then the body.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "integration/cli/ranks.h"

namespace sotto_cli {

inline constexpr std::string_view kHello = "\x01sotto-run agent ";
inline constexpr std::string_view kProtocol = "1";
inline constexpr double kHostTimeoutS = 60;

enum class FrameKind : int32_t {
  kHeartbeat = 1,  // both ways: the sender lives
  kPause,          // to the agent: the sender is being stopped, its silence means nothing
  kJob,            // to the agent; body: a Job
  kReady,          // from the agent; body: the rendezvous, if the job asks for one
  kRefused,        // from the agent; body: why it cannot do the job
  kStart,          // to the agent; body: the rendezvous
  kSignal,         // to the agent; value: signal for all its ranks
  kStartFailed,    // from the agent; rank, value: errno
  kOutput,         // from the agent; rank, value: stream, body: bytes
  kEnded,          // from the agent; rank, value: wait status
  kClosed,         // from the agent; rank
};

struct Frame {
  FrameKind kind = FrameKind::kHeartbeat;
  int32_t rank = 0;
  int32_t value = 0;
  std::string body;
};

// What an agent is to do.
struct Job {
  RankGroup group;
  std::string folder;           // working directory
  std::string host;             // the name by which the user knows the agent's machine
  bool has_rendezvous = false;  // whether the agent is to keep a port for rank 0
  bool has_others = false;      // whether ranks of other machines have to reach it
  int64_t silence_ns = 0;       // how long the other side may be silent
};

std::string pack(const Job& job);
// False if the text is no job.
bool unpack(std::string_view text, Job& job);

class FrameReader {
 public:
  void feed(std::string_view bytes) { buffer_ += bytes; }
  // The next whole frame; false if there is none yet, or none ever (damaged()).
  bool next(Frame& frame);
  bool damaged() const { return damaged_; }

 private:
  std::string buffer_;
  size_t used_ = 0;  // bytes of frames that have been handed out
  bool damaged_ = false;
};

// Writes frames as far as the other side takes them, and keeps the rest. Threads may share it.
class FrameWriter {
 public:
  // fd: owned; a socket, or a non-blocking descriptor in a process without SIGPIPE.
  explicit FrameWriter(int fd) : fd_(fd) {}
  ~FrameWriter() { close(); }
  FrameWriter(const FrameWriter&) = delete;
  FrameWriter& operator=(const FrameWriter&) = delete;

  void put(std::string_view bytes);
  void send(const Frame& frame);
  // A heartbeat, unless bytes are waiting: those show as well that the sender lives.
  void beat();
  void flush();
  void close();

  int fd() const { return fd_; }
  size_t queued() const;  // bytes
  // Whether the other side is gone; what is sent then is dropped.
  bool broken() const;

 private:
  void write_queue();  // with the lock held

  mutable std::mutex lock_;
  int fd_;
  std::string queue_;
  bool broken_ = false;
};

// A thread that sends heartbeats to agents, also while sotto-run waits for the reader of its
// output.
class Heartbeats {
 public:
  explicit Heartbeats(int64_t interval_ns) : interval_ns_(interval_ns) {}
  ~Heartbeats();
  Heartbeats(const Heartbeats&) = delete;
  Heartbeats& operator=(const Heartbeats&) = delete;

  // The thread starts with the first.
  void add(std::shared_ptr<FrameWriter> writer);
  void pause(bool paused);

 private:
  void run();

  const int64_t interval_ns_;
  std::mutex lock_;
  std::vector<std::shared_ptr<FrameWriter>> writers_;
  std::condition_variable wake_;
  bool stop_ = false;
  bool paused_ = false;
  std::thread thread_;
};

// How often to send heartbeats where silence of silence_ns counts as death.
int64_t heartbeat_interval_ns(int64_t silence_ns);

}  // namespace sotto_cli
