// The SOTTO_* environment variables, read once when a context is created: those that several rooms
// read (core/base/params.def), and the lists of the rooms that have variables of their own.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/hierarchy.h"
#include "core/base/status.h"
#include "core/base/transports.h"

namespace sotto {

// Where variables come from; empty without further ado. Tests inject their own;
// process_environment() is the real one.
struct Environment {
  std::function<std::optional<std::string>(const std::string& name)> get = [](const std::string&) {
    return std::nullopt;
  };
  // Of all variables that exist.
  std::function<std::vector<std::string>()> names = [] { return std::vector<std::string>(); };
};
Environment process_environment();

// A row of a list, with the field that takes the value.
struct ParamRow {
  struct Int {
    int64_t* field;
    int64_t lo, hi;  // it may also be its default
  };
  struct Double {
    double* field;
    double lo, hi;
  };
  struct Enum {
    std::string* field;
    std::string_view allowed;  // "a|b|c"
  };
  struct String {
    std::string* field;
  };
  struct Bool {
    bool* field;
  };
  const char* name;
  const char* text;
  std::variant<Int, Double, Enum, String, Bool> value;
};

// One typed field per row, named like the variable in lower case without its prefix:
// SOTTO_TIMEOUT_US is timeout_us. The structs of other rooms are made alike.
struct Params {
#define SOTTO_PARAMS "core/base/params.def"
#include "core/base/param_members-inl.h"
};

// Reads lists of variables one after the other. What it knows of them all is complete when the last
// one was read.
class ParamReader {
 public:
  explicit ParamReader(Environment environment) : environment_(std::move(environment)) {}

  // A struct of variables, with the values of the environment. An empty value counts as unset.
  // A wrong one leaves the default, and is an error of status().
  template <class List>
  List read() {
    List list;
    read_rows(list.rows());
    return list;
  }

  // INVALID_ARGUMENT names the first wrong variable, its value and what is allowed.
  const Status& status() const { return status_; }
  // One line per unknown SOTTO_* name, naming the nearest known one; to be logged by the caller.
  std::vector<std::string> warnings() const;
  // [{"name", "value", "default", "source": "env" | "default", "text"}, ...] in the order of
  // reading.
  std::string to_json() const { return "[" + listing_ + "]"; }

 private:
  void read_rows(const std::vector<ParamRow>& rows);

  const Environment environment_;
  std::vector<std::string_view> names_;
  std::string listing_;
  Status status_;
};

}  // namespace sotto
