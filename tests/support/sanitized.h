// Whether this build has AddressSanitizer or ThreadSanitizer, under which everything takes 5 to 15
// times as long: cases that repeat themselves do so less often there.
#pragma once

namespace sotto::test {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = kThreadSanitizer;
#endif

}  // namespace sotto::test
