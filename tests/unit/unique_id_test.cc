#include "core/iface/unique_id.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace sotto {
namespace {

UniqueIdFields example() {
  UniqueIdFields f;
  f.kind = IdKind::kTcp;
  f.port = 45678;
  f.token = 0x1122334455667788u;
  f.process_token = 0x99aabbccddeeff00u;
  f.addresses = "127.0.0.1,::1";
  return f;
}

TEST(UniqueId, RoundTrip) {
  auto id = encode_unique_id(example());
  ASSERT_TRUE(id.ok());
  auto back = decode_unique_id(*id);
  ASSERT_TRUE(back.ok()) << back.status().text();
  EXPECT_EQ(back->kind, IdKind::kTcp);
  EXPECT_EQ(back->port, 45678);
  EXPECT_EQ(back->token, 0x1122334455667788u);
  EXPECT_EQ(back->process_token, 0x99aabbccddeeff00u);
  EXPECT_EQ(back->addresses, "127.0.0.1,::1");
}

TEST(UniqueId, LayoutIsLittleEndianAtFixedOffsets) {
  const UniqueId id = encode_unique_id(example()).take();
  EXPECT_EQ(std::string(id.begin(), id.begin() + 8), "SOTTOID1");
  EXPECT_EQ(id[8], 1);
  EXPECT_EQ(id[10], 2);
  EXPECT_EQ(id[12] | id[13] << 8, 45678);
  EXPECT_EQ(id[14], 13);
  EXPECT_EQ(id[16], 0x88);
  EXPECT_EQ(id[24], 0x00);
  EXPECT_EQ(id[31], 0x99);
  EXPECT_EQ(id[32], '1');
}

TEST(UniqueId, EveryFlippedBitIsNoticed) {
  const UniqueId id = encode_unique_id(example()).take();
  for (size_t bit = 0; bit < id.size() * 8; ++bit) {
    UniqueId damaged = id;
    damaged[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    EXPECT_FALSE(decode_unique_id(damaged).ok()) << "bit " << bit;
  }
}

TEST(UniqueId, RefusesWhatIsNoId) {
  EXPECT_EQ(decode_unique_id(UniqueId{}).status().code(), Code::kInvalidArgument);
  UniqueId other = encode_unique_id(example()).take();
  other[8] = 2;
  const Status status = decode_unique_id(other).status();
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_NE(status.text().find("version 2"), std::string::npos);
}

TEST(UniqueId, AddressesHaveALimit) {
  UniqueIdFields f = example();
  f.addresses.assign(kUniqueIdTextBytes, 'a');
  auto id = encode_unique_id(f);
  ASSERT_TRUE(id.ok());
  EXPECT_EQ(decode_unique_id(*id)->addresses, f.addresses);
  f.addresses += 'a';
  EXPECT_EQ(encode_unique_id(f).status().code(), Code::kInvalidArgument);
}

TEST(UniqueId, TokensDiffer) {
  EXPECT_NE(random_token(), random_token());
  EXPECT_EQ(process_token(), process_token());
}

TEST(UniqueId, AForkedChildHasAnotherProcessToken) {
  const uint64_t mine = process_token();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) _exit(process_token() == mine ? 1 : 0);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace sotto
