// Ranks that are started, watched and signalled together: what a supervisor asks of them and hears.
#pragma once

#include <poll.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sotto_cli {

// Consecutive ranks of one machine.
struct RankGroup {
  int32_t first = 0;
  int32_t count = 0;
  int32_t world = 0;                     // ranks of the whole run
  std::vector<std::string> words;        // program and arguments
  std::vector<std::string> environment;  // "NAME=value", besides what sotto-run sets for every rank
};

enum class Stream : int32_t { kOut, kErr };

class RankListener {
 public:
  virtual ~RankListener() = default;

  virtual void on_output(int32_t rank, Stream stream, std::string_view bytes) = 0;
  // The rank's process has ended; wait_status as of waitpid(2).
  virtual void on_end(int32_t rank, int wait_status) = 0;
  // The last call about a rank: nothing runs and nothing more is printed. Without on_end before it
  // the rank has not been started or has been lost with its host.
  virtual void on_closed(int32_t rank) = 0;
  // The program of this rank cannot be run, for this errno. host: empty if it is this machine.
  virtual void on_start_failed(int32_t rank, int error, const std::string& host) = 0;
  // A host cannot be used, any more or at all.
  virtual void on_host_failed(const std::string& text) = 0;
};

class RankRunner {
 public:
  RankRunner() = default;
  virtual ~RankRunner() = default;
  RankRunner(const RankRunner&) = delete;
  RankRunner& operator=(const RankRunner&) = delete;

  virtual const RankGroup& group() const = 0;
  // Whether start() may be called.
  virtual bool ready() const = 0;
  // Where rank 0 may listen, tcp://host:port; of the ready runner that has rank 0, where the user
  // names no place. Throws std::runtime_error if there is none.
  virtual std::string rendezvous() = 0;
  virtual void start(const std::string& rendezvous, RankListener& listener) = 0;
  // Sends a signal to the process groups of all ranks that run; stopped ones go on.
  virtual void signal_all(int number) = 0;
  // Tells the ranks' host that this process is about to be stopped, or goes on.
  virtual void pause(bool stopping) = 0;

  // Whether the output of ranks stays where it is, since the listener has too much of it.
  virtual void hold_output(bool held) = 0;
  // Appends the descriptors that handle() wants to be woken by.
  virtual void watch(std::vector<pollfd>& fds) = 0;
  // When handle() has to be called at the latest; kNever if nothing is due.
  virtual int64_t due_ns() const = 0;
  // Does what can be done without waiting. fds: as watch() filled it, with answers.
  virtual void handle(const std::vector<pollfd>& fds, RankListener& listener) = 0;

  // Lets go of the host; what still runs there ends.
  virtual void close() = 0;
  // Whether nothing is left of it here, after close().
  virtual bool gone() const = 0;
};

}  // namespace sotto_cli
