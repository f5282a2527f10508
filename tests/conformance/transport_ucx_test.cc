// UCX: the suite, and how it is found.
#include <signal.h>

#include <cstdlib>

#include "tests/conformance/ucx_case.h"
#include "transports/ucx/api.h"
#include "transports/ucx/caps.h"

namespace sotto::test {
namespace {

INSTANTIATE_TEST_SUITE_P(Ucx, TransportSuite, testing::Values(over_ucx()), case_name);

std::string refusal_of(const std::string& library) {
  UcxOptions options = options_of_ucx();
  if (!library.empty()) options.library = library;
  const Status status = make_ucx_backend(options).status();
  return fmt::format("{}: {}", code_name(status.code()), status.text());
}

TEST(UcxLibrary, ThatIsNotThereIsNamed) {
  EXPECT_EQ(refusal_of("/nowhere/libucp.so.0"),
            "UNSUPPORTED: UCX cannot be opened at SOTTO_UCX_LIBRARY=/nowhere/libucp.so.0: "
            "/nowhere/libucp.so.0: cannot open shared object file: No such file or directory");
}

TEST(UcxLibrary, ThatIsAnotherOneIsNamed) {
  EXPECT_EQ(refusal_of("libc.so.6"), "UNSUPPORTED: libc.so.6 is no UCX: it has no ucp_get_version");
}

TEST(UcxLibrary, TakesNoSignals) {
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
    struct sigaction before {
    }, after{};
    ASSERT_EQ(sigaction(number, nullptr, &before), 0);
    check(make_ucx_backend(options_of_ucx()).status());
    ASSERT_EQ(sigaction(number, nullptr, &after), 0);
    EXPECT_EQ(before.sa_handler, after.sa_handler) << "signal " << number;
  }
}

TEST(UcxLibrary, PassesMessagesOfTheUsualSizeThroughSocketsInOnePiece) {
  EXPECT_EQ(check(ucx::load(options_of_ucx().library))->socket_bytes, ucx::kCaps.segment_bytes);
}

TEST(UcxLibrary, WithoutATransportIsNamed) {
  ::setenv("UCX_TLS", "nothing", 1);
  const std::string refusal = refusal_of("");
  ::setenv("UCX_NET_DEVICES", "eth7", 1);
  const std::string of_devices = refusal_of("");
  ::unsetenv("UCX_NET_DEVICES");
  ::setenv("UCX_TLS", "tcp", 1);
  EXPECT_TRUE(refusal.starts_with("TRANSPORT: ucp_init (UCX_TLS is nothing): No such device"))
      << refusal;
  EXPECT_TRUE(of_devices.starts_with(
      "TRANSPORT: ucp_init (UCX_TLS is nothing, UCX_NET_DEVICES is eth7): No such device"))
      << of_devices;
}

}  // namespace
}  // namespace sotto::test
