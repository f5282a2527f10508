// The ranks of another machine: an agent, sotto-run in a remote shell, runs them there.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "integration/cli/hosts.h"
#include "integration/cli/launch.h"
#include "integration/cli/output.h"
#include "integration/cli/protocol.h"
#include "integration/cli/ranks.h"

namespace sotto_cli {

struct RemoteShell {
  std::vector<std::string> words;  // called with the host and one string for the shell there
  std::string program;             // path of sotto-run there, or a name that is in PATH there
};

class RemoteRanks final : public RankRunner {
 public:
  // Starts the remote shell, whose messages go to `messages`. The watcher has been started; both
  // outlive this. Throws std::runtime_error if there is no such program here.
  RemoteRanks(const RemoteShell& shell, const Host& host, Job job,
              std::shared_ptr<Heartbeats> heartbeats, Watcher& watcher, Sink& messages);
  ~RemoteRanks() override;

  const RankGroup& group() const override { return job_.group; }
  bool ready() const override { return stage_ == Stage::kReady; }
  std::string rendezvous() override { return rendezvous_; }
  void start(const std::string& rendezvous, RankListener& listener) override;
  void signal_all(int number) override;
  void pause(bool stopping) override;

  void hold_output(bool held) override { shell_.held = held; }
  void watch(std::vector<pollfd>& fds) override;
  int64_t due_ns() const override;
  void handle(const std::vector<pollfd>& fds, RankListener& listener) override;
  // Ends the connection; the agent, and what it has running, end then. The remote shell gets a
  // while for that.
  void close() override;
  bool gone() const override { return shell_.pid < 0; }

 private:
  // One read each; true if there may be more.
  bool read_output(RankListener& listener);
  bool read_messages();
  // Takes what belongs to no frame out of what has been read.
  void look_for_hello(std::string_view bytes, RankListener& listener);
  void take_frames(RankListener& listener);
  void take_frame(const Frame& frame, RankListener& listener);
  void collect_shell(RankListener& listener);
  void lose_if_due(RankListener& listener);
  // The host is of no more use. why: what follows its name in the message.
  void lose(const std::string& why, RankListener& listener);
  std::string lost_ranks() const;
  bool done() const;  // nothing more is expected of the host

  enum class Stage { kCalled, kAnswered, kReady, kStarted, kLost };
  struct Shell {
    pid_t pid = -1;  // -1 when reaped
    int out = -1, err = -1;
    bool held = false;                         // out is not read
    size_t in_at = 0, out_at = 0, err_at = 0;  // where watch() put them; 0: nowhere
    int64_t eof_ns = 0;                        // when its output ended; 0: it has not
    int64_t kill_ns = 0;                       // when it is killed; 0: never
  };

  const Host host_;
  const std::string program_;
  const Job job_;
  const std::shared_ptr<Heartbeats> heartbeats_;
  Watcher& watcher_;
  Shell shell_;
  std::shared_ptr<FrameWriter> writer_;
  // What the remote shell itself says: on its standard error, and on its output before the hello.
  Relay messages_, greeting_;

  Stage stage_ = Stage::kCalled;
  FrameReader reader_;
  std::string before_hello_;
  std::string rendezvous_;
  std::vector<bool> closed_;
  int64_t heard_ns_ = 0;
};

}  // namespace sotto_cli
