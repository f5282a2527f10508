// Whether UCX can be tested here.
#pragma once

namespace sotto::test {

// Why the transport is not in this program; null: it is.
const char* why_no_ucx();

}  // namespace sotto::test
