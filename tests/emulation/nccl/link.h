// The connections of one rank with all others, shared by a communicator and its splits.
//
// Threads: any. What ThreadSanitizer is told of them is that a receive comes after its send; locks
// and sockets, which a GPU has not, order nothing.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace sotto::fake_nccl {

// What a message is; matched by (comm, channel, source), in order. Of the last two, of which each
// side sends the other one, connections are made.
enum class LinkChannel : uint32_t { kData = 0, kSetup = 1, kToSender = 4, kToReceiver = 5 };

struct Message {
  uint32_t what = 0;  // operation and type, compared by the receiver
  std::vector<char> data;
};

// Why a receive has ended without a message.
enum class Wait : uint8_t { kGot, kAborted, kPeerGone };

class Link {
 public:
  // Finds the other ranks at the name that make_rendezvous gave. `stop` ends the attempt: null.
  static std::shared_ptr<Link> make(const std::string& rendezvous, int rank, int size,
                                    const std::atomic<bool>& stop);
  // A name where ranks can meet, served by a thread of this process until they have.
  static std::string make_rendezvous();
  ~Link();

  int size() const { return static_cast<int>(peers_.size()); }
  // False: the peer is gone.
  bool send(int peer, uint64_t comm, LinkChannel channel, uint32_t what, const void* data,
            size_t bytes);
  Wait receive(int peer, uint64_t comm, LinkChannel channel, const std::atomic<bool>& aborted,
               Message* message);
  // The communicator ends here in order, or by an abort, which its members are told.
  void leave(uint64_t comm, const std::vector<int>& members, bool abort);
  // A member of the communicator is gone or has aborted it.
  bool broken(uint64_t comm, const std::vector<int>& members);
  // Ends receives whose `aborted` has been set.
  void wake();

 private:
  struct Peer {
    int fd = -1;
    std::mutex sending;
    std::thread reader;
    bool gone = false;
  };
  explicit Link(int rank, int size) : rank_(rank), peers_(static_cast<size_t>(size)) {}
  void read_from(int peer);

  const int rank_;
  std::vector<Peer> peers_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::array<uint64_t, 3>, std::deque<Message>> inbox_;  // comm, channel, source
  std::map<std::pair<uint64_t, int>, bool> left_;  // comm, rank: in order, or by an abort
};

}  // namespace sotto::fake_nccl
