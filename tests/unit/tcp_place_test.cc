// What a rank tells others about where it is reached.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "transports/tcp/net.h"

namespace sotto::tcp {
namespace {

using testing::AllOf;
using testing::HasSubstr;

ListenPlace place() {
  ListenPlace out;
  out.bind = asio::ip::make_address("10.0.0.1");
  out.published = {out.bind, asio::ip::make_address("10.0.1.1")};
  return out;
}

struct Advertised {
  const char* text;
  const char* address;  // null: the two of place()
  uint16_t port;
};

class Advertise : public testing::TestWithParam<Advertised> {};

TEST_P(Advertise, ReplacesWhatIsTold) {
  ListenPlace at = place();
  const Status status = advertise(GetParam().text, at);
  ASSERT_TRUE(status.ok()) << status.text();
  EXPECT_EQ(at.bind, place().bind);
  EXPECT_EQ(at.port, 0);
  EXPECT_EQ(at.published_port, GetParam().port);
  if (GetParam().address == nullptr) {
    EXPECT_EQ(at.published, place().published);
  } else {
    EXPECT_EQ(at.published, std::vector<Address>{asio::ip::make_address(GetParam().address)});
  }
}

INSTANTIATE_TEST_SUITE_P(, Advertise,
                         testing::Values(Advertised{"", nullptr, 0},
                                         Advertised{":4000", nullptr, 4000},
                                         Advertised{"203.0.113.5", "203.0.113.5", 0},
                                         Advertised{"203.0.113.5:65535", "203.0.113.5", 65535},
                                         Advertised{"2001:db8::5", "2001:db8::5", 0},
                                         Advertised{"[2001:db8::5]", "2001:db8::5", 0},
                                         Advertised{"[2001:db8::5]:1", "2001:db8::5", 1}));

class AdvertiseRefused : public testing::TestWithParam<const char*> {};

TEST_P(AdvertiseRefused, NamesTheTextAndTheForms) {
  ListenPlace at = place();
  const Status status = advertise(GetParam(), at);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.text(), AllOf(HasSubstr("SOTTO_ADVERTISE"), HasSubstr(GetParam()),
                                   HasSubstr("address:port or :port")));
  EXPECT_EQ(at.published, place().published);
  EXPECT_EQ(at.published_port, 0);
}

INSTANTIATE_TEST_SUITE_P(, AdvertiseRefused,
                         testing::Values(":", ":0", ":65536", ":-1", ":80x", "host", "host:80",
                                         "203.0.113.5:", "203.0.113.5:0", "203.0.113.256:80",
                                         "[2001:db8::5", "[]:80", "2001:db8:0:0:0:0:0:5:80",
                                         "0.0.0.0", "0.0.0.0:80", "::", "[::]:80"));

// Their zones are names of a host's own.
TEST(LinkLocal, AddressesAreRefusedByName) {
  const std::unique_ptr<Reactor> reactor = Reactor::make({}).take();
  ListenPlace to = place();
  for (const char* address : {"fe80::1", "fe80::1%lo", "fe80::1%nosuch"}) {
    for (const Status& status :
         {listen_place(address).status(),
          resolve_url(fmt::format("tcp://[{}]:80", address), *reactor).status()}) {
      EXPECT_EQ(status.code(), Code::kInvalidArgument);
      EXPECT_THAT(status.text(), AllOf(HasSubstr(address), HasSubstr("IPv6 address of one link")));
    }
  }
  EXPECT_THAT(advertise("[fe80::1]:80", to).text(), HasSubstr("IPv6 address of one link"));
  EXPECT_EQ(to.published, place().published);
}

Endpoint at(const char* address) { return {asio::ip::make_address(address), 80}; }

// Of several addresses of a name: 240.0.0.0/4 is reserved, and on no machine.
TEST(OwnEndpoint, IsTheOneThatThisMachineHas) {
  EXPECT_EQ(own_endpoint({at("240.0.0.1"), at("127.0.0.1")}), at("127.0.0.1"));
  EXPECT_EQ(own_endpoint({at("240.0.0.1"), at("240.0.0.2")}), at("240.0.0.1"));
  EXPECT_EQ(own_endpoint({at("127.0.1.1"), at("127.0.0.1")}), at("127.0.1.1"));
  const ListenPlace any = listen_place("any").take();
  const Endpoint reached(any.published.front(), 80);  // loopback if there is nothing else
  EXPECT_EQ(own_endpoint({at("240.0.0.1"), at("127.0.0.1"), reached}),
            reached.address().is_loopback() ? at("127.0.0.1") : reached);
}

}  // namespace
}  // namespace sotto::tcp
