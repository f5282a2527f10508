// How this translation unit is compiled: with exceptions or without.
#ifndef SOTTO_CPP_CONFIG_HPP
#define SOTTO_CPP_CONFIG_HPP

#include <sotto/sotto.h>

#if !defined(__cplusplus) || __cplusplus < 201103L
#error "sotto.hpp needs C++11 or later"
#endif

#if !defined(SOTTO_CPP_NO_EXCEPTIONS) && !defined(__cpp_exceptions) && !defined(__EXCEPTIONS)
#define SOTTO_CPP_NO_EXCEPTIONS 1
#endif

// Code of another ABI version or form of errors has other names: it can be linked to this.
#define SOTTO_CPP_JOIN_(major, minor, form) v##major##_##minor##_##form
#define SOTTO_CPP_JOIN(major, minor, form) SOTTO_CPP_JOIN_(major, minor, form)
#if defined(SOTTO_CPP_NO_EXCEPTIONS)
#define SOTTO_CPP_ABI SOTTO_CPP_JOIN(SOTTO_ABI_MAJOR, SOTTO_ABI_MINOR, results)
#else
#define SOTTO_CPP_ABI SOTTO_CPP_JOIN(SOTTO_ABI_MAJOR, SOTTO_ABI_MINOR, throws)
#endif

// Types whose values a caller must not drop unseen.
#if defined(__clang__) && __cplusplus < 201703L
#define SOTTO_CPP_CHECKED __attribute__((warn_unused_result))
#else
#define SOTTO_CPP_CHECKED [[nodiscard]]
#endif

#endif  // SOTTO_CPP_CONFIG_HPP
