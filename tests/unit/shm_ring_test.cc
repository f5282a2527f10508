// The ring in shared memory, and the memory itself: what one end writes the other reads, whatever
// the sizes, and a peer that writes nonsense makes an error.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "transports/shm/bell.h"
#include "transports/shm/ring.h"
#include "transports/shm/segment.h"

namespace sotto::shm {
namespace {

constexpr uint64_t kBytes = 64;

class RingTest : public testing::Test {
 protected:
  struct alignas(64) Memory {
    RingControl control{};
    std::array<uint8_t, kBytes> data{};
  };
  uint64_t write(std::vector<uint8_t> bytes) {
    const std::array<iovec, 1> part{iovec{bytes.data(), bytes.size()}};
    return writer.write(part).take();
  }
  std::vector<uint8_t> read(size_t most) {
    std::vector<uint8_t> bytes(most);
    const std::array<iovec, 1> part{iovec{bytes.data(), bytes.size()}};
    bytes.resize(reader.read(part).take());
    return bytes;
  }
  static std::vector<uint8_t> numbers(size_t count, uint8_t first) {
    std::vector<uint8_t> bytes(count);
    std::iota(bytes.begin(), bytes.end(), first);
    return bytes;
  }

  Memory memory_;
  const RingMemory ring_{&memory_.control, memory_.data.data(), kBytes};
  RingWriter writer{ring_};
  RingReader reader{ring_};
};

TEST_F(RingTest, TakesWhatThereIsRoomForAndWraps) {
  EXPECT_EQ(write(numbers(50, 0)), 50u);
  EXPECT_EQ(read(40), numbers(40, 0));
  EXPECT_EQ(write(numbers(60, 50)), 54u);  // 10 were left
  EXPECT_EQ(write(numbers(1, 0)), 0u);
  EXPECT_EQ(read(100), numbers(64, 40));
  EXPECT_EQ(read(100).size(), 0u);
}

TEST_F(RingTest, PartsAreOneStream) {
  std::vector<uint8_t> a = numbers(5, 0), b = numbers(7, 5);
  const std::array<iovec, 3> parts{iovec{a.data(), a.size()}, iovec{nullptr, 0},
                                   iovec{b.data(), b.size()}};
  EXPECT_EQ(writer.write(parts).take(), 12u);
  std::vector<uint8_t> c(3), d(20);
  const std::array<iovec, 2> places{iovec{c.data(), c.size()}, iovec{d.data(), d.size()}};
  EXPECT_EQ(reader.read(places).take(), 12u);
  EXPECT_EQ(c, numbers(3, 0));
  d.resize(9);
  EXPECT_EQ(d, numbers(9, 3));
}

TEST_F(RingTest, TheEndComesBehindWhatWasWritten) {
  write(numbers(3, 0));
  writer.close();
  EXPECT_FALSE(reader.ended());
  EXPECT_FALSE(reader.wait());  // there are bytes
  read(3);
  EXPECT_TRUE(reader.ended());
  EXPECT_FALSE(reader.wait());  // there is the end
}

TEST_F(RingTest, AnEndThatWaitsIsRungForOnce) {
  EXPECT_TRUE(reader.wait());
  write(numbers(1, 0));
  EXPECT_TRUE(writer.take_waiting());
  EXPECT_FALSE(writer.take_waiting());
  EXPECT_FALSE(reader.wait());
  reader.stop_waiting();
  EXPECT_FALSE(writer.take_waiting());
  write(numbers(100, 0));
  EXPECT_TRUE(writer.wait());
  read(1);
  EXPECT_TRUE(reader.take_waiting());
  EXPECT_FALSE(writer.wait());  // there is room
}

// Whatever stands in the other end's position: an error, or no more than the memory has.
TEST_F(RingTest, ABrokenPositionIsAnError) {
  write(numbers(10, 0));
  for (const uint64_t written : {uint64_t{65}, uint64_t{1} << 40, UINT64_MAX}) {
    memory_.control.written.store(written);
    std::vector<uint8_t> bytes(1000);
    const std::array<iovec, 1> part{iovec{bytes.data(), bytes.size()}};
    const Status status = reader.read(part).status();
    EXPECT_EQ(status.code(), Code::kProtocol);
    EXPECT_EQ(status.text(),
              fmt::format("the ring is broken: its writer is at byte {}, 0 were read, and it has "
                          "64 bytes of memory",
                          written));
  }
  for (const uint64_t at : {uint64_t{11}, uint64_t{1} << 40, UINT64_MAX - 60}) {
    memory_.control.read.store(at);
    std::vector<uint8_t> bytes(1000);
    const std::array<iovec, 1> part{iovec{bytes.data(), bytes.size()}};
    EXPECT_EQ(writer.write(part).status().code(), Code::kProtocol) << at;
  }
}

TEST_F(RingTest, RandomPositionsNeverLeaveTheMemory) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    std::mt19937_64 random(seed);
    const auto memory = std::make_unique<Memory>();  // sanitizers see its end
    const RingMemory ring{&memory->control, memory->data.data(), kBytes};
    RingWriter to(ring);
    RingReader from(ring);
    std::vector<uint8_t> bytes(random() % 200);
    const std::array<iovec, 1> part{iovec{bytes.data(), bytes.size()}};
    for (int step = 0; step < 20; ++step) {
      const uint64_t nonsense = random() % 3 == 0 ? random() : random() % 200;
      (random() % 2 == 0 ? memory->control.written : memory->control.read).store(nonsense);
      const auto moved = random() % 2 == 0 ? to.write(part) : from.read(part);
      EXPECT_TRUE(!moved.ok() || *moved <= kBytes) << "seed " << seed;
    }
  }
}

// One thread writes, one reads, in pieces drawn by a seed; each sleeps when it can do nothing, and
// the other's bell is all that ends its sleep.
TEST_F(RingTest, TwoThreadsLoseNeitherBytesNorRings) {
  constexpr size_t kTotal = 200'000;
  const Bell for_reader = Bell::make().take(), for_writer = Bell::make().take();
  std::thread sender([&] {
    std::mt19937 random(1);
    std::vector<uint8_t> bytes(kTotal);
    std::iota(bytes.begin(), bytes.end(), uint8_t{0});
    size_t sent = 0;
    while (sent < kTotal) {
      const size_t most = std::min<size_t>(1 + random() % 100, kTotal - sent);
      const std::array<iovec, 1> part{iovec{bytes.data() + sent, most}};
      const uint64_t n = writer.write(part).take();
      sent += n;
      if (writer.take_waiting()) for_reader.ring();
      if (n > 0) continue;
      for_writer.silence();
      if (writer.wait()) for_writer.wait(20'000'000);
    }
    writer.close();
    for_reader.ring();
  });
  std::mt19937 random(2);
  std::vector<uint8_t> bytes(100);
  size_t received = 0;
  bool right = true;
  while (!reader.ended()) {
    const std::array<iovec, 1> part{iovec{bytes.data(), 1 + random() % 100}};
    const uint64_t n = reader.read(part).take();
    for (uint64_t i = 0; i < n; ++i)
      right = right && bytes[i] == static_cast<uint8_t>(received + i);
    received += n;
    if (n > 0 && reader.take_waiting()) for_writer.ring();
    if (n > 0) continue;
    for_reader.silence();
    if (reader.wait()) for_reader.wait(20'000'000);
  }
  sender.join();
  EXPECT_EQ(received, kTotal);
  EXPECT_TRUE(right);
}

TEST(Segment, IsSharedByAllWhoMapIt) {
  const Descriptor memory = Segment::make(8192).take();
  const Segment one = Segment::map(memory, 8192).take(), two = Segment::map(memory, 8192).take();
  EXPECT_NE(one.data(), two.data());
  one.data()[8191] = 7;
  EXPECT_EQ(two.data()[8191], 7);
  EXPECT_NE(::ftruncate(memory.get(), 0), 0);
}

// The system would end the process with SIGXFSZ.
TEST(Segment, IsNotMadeBeyondTheLimitOfFiles) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit most = before;
  most.rlim_cur = 4096;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &most), 0);
  const Status refused = Segment::make(8192).status();
  const bool fits = Segment::make(4096).ok();
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(refused.text(), "8192 bytes of shared memory are more than RLIMIT_FSIZE, 4096");
  EXPECT_TRUE(fits);
}

// A profiler's timer, or the end of a child process, does not cost a pair its shared memory.
TEST(Segment, IsMadeWhileSignalsCome) {
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = [](int) {};
  ASSERT_EQ(::sigaction(SIGALRM, &action, &before), 0);
  const itimerval often{{0, 500}, {0, 500}}, never{};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &often, nullptr), 0);
  Status made;
  for (int i = 0; i < 20 && made.ok(); ++i) made = Segment::make(32 << 20).status();
  ASSERT_EQ(::setitimer(ITIMER_REAL, &never, nullptr), 0);
  ASSERT_EQ(::sigaction(SIGALRM, &before, nullptr), 0);
  EXPECT_EQ(made.text(), "");
}

TEST(Segment, RefusesMemoryThatItsMakerCouldResize) {
  const Descriptor open(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(open.get(), 8192), 0);
  EXPECT_EQ(Segment::map(open, 8192).status().text(),
            "the shared memory could be resized: it has seals 0x0");
  const Descriptor memory = Segment::make(8192).take();
  EXPECT_EQ(Segment::map(memory, 4096).status().text(),
            "the shared memory has 8192 bytes, 4096 expected");
}

}  // namespace
}  // namespace sotto::shm
