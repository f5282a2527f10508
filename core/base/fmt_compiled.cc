// The out-of-line parts of fmt, once: compiled into every file they are half of the build's time.
// Built as a library of its own (CMakeLists.txt); the rest of the tree only declares them.
#define FMT_HEADER_ONLY 1
#include <fmt/format.h>

namespace {

// Inline functions whose address is taken have a definition here.
[[gnu::used]] std::string (*const vformat)(fmt::string_view, fmt::format_args) = &fmt::vformat;
[[gnu::used]] void (*const throw_error)(const char*) = &fmt::detail::throw_format_error;
[[gnu::used]] bool (*const is_printable)(uint32_t) = &fmt::detail::is_printable;

}  // namespace
