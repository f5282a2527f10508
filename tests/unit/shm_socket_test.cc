// Messages with descriptors between processes of one host: whole, or with the reason why not.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "transports/shm/unix_socket.h"

namespace sotto::shm {
namespace {

using testing::HasSubstr;

// Leaves this process so many descriptors, as long as it lives.
class FewDescriptors {
 public:
  explicit FewDescriptors(size_t left) {
    // UndefinedBehaviorSanitizer opens a pipe when it sees a class for the first time.
    (void)error(Code::kTransport, "{} of {}: {}", "a", std::string("text"), uint64_t{1});
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    for (;;) {
      const int fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
      if (fd < 0) break;
      taken_.emplace_back(fd);
      if (taken_.size() == 1) {  // not all that there are, which may be a million
        rlimit few = before_;
        few.rlim_cur = static_cast<rlim_t>(fd) + 32;
        EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
      }
    }
    for (size_t i = 0; i < left; ++i) taken_.pop_back();
  }
  ~FewDescriptors() {
    taken_.clear();
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before_), 0);
  }

 private:
  rlimit before_{};
  std::vector<Descriptor> taken_;
};

struct Ends {
  UnixSocket listener, one, other;
};
Ends connected() {
  UnixSocket listener = UnixSocket::listen("sotto-test-socket", 4).take();
  UnixSocket one = UnixSocket::connect("sotto-test-socket").take();
  UnixSocket other = listener.accept().take().value();
  return {std::move(listener), std::move(one), std::move(other)};
}

TEST(UnixSocket, BringsBytesAndDescriptors) {
  const Ends ends = connected();
  const Descriptor sent(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(ends.one.send("two", {sent.get(), sent.get()}).ok());
  const UnixMessage came = ends.other.receive(256).take();
  EXPECT_EQ(came.bytes, "two");
  ASSERT_EQ(came.descriptors.size(), 2u);
  EXPECT_NE(::fcntl(came.descriptors[0].get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_FALSE(ends.listener.accept().take().has_value());
}

TEST(UnixSocket, AMessageThatIsTooLongIsRefused) {
  const Ends ends = connected();
  ASSERT_TRUE(ends.one.send(std::string(300, 'x'), {}).ok());
  EXPECT_EQ(ends.other.receive(256).status().text(),
            "a message on a unix socket is longer than 256 bytes");
}

// The message is whole, but not its descriptors. Those that came are closed again.
TEST(UnixSocket, DescriptorsWithoutRoomAreNamed) {
  const Ends ends = connected();
  const Descriptor sent(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  for (const size_t left : {0, 1}) {
    ASSERT_TRUE(ends.one.send("two", {sent.get(), sent.get()}).ok());
    const FewDescriptors few(left);
    EXPECT_THAT(ends.other.receive(256).status().text(),
                HasSubstr("descriptors are allowed (RLIMIT_NOFILE, ulimit -n)"));
    EXPECT_EQ(::open("/dev/null", O_RDONLY | O_CLOEXEC) >= 0, left == 1);
  }
}

TEST(UnixSocket, AConnectionThatCannotBeTakenSaysWhy) {
  const Ends ends = connected();
  const UnixSocket waits = UnixSocket::connect("sotto-test-socket").take();
  const FewDescriptors few(0);
  EXPECT_THAT(ends.listener.accept().status().text(),
              HasSubstr("accept of a unix socket: Too many open files"));
}

}  // namespace
}  // namespace sotto::shm
