// JSON of the library as text for people.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace sotto_cli {

using Json = nlohmann::ordered_json;

// A report of the C API: `call` is given a buffer, its size and where to write the needed length,
// and returns a sotto_status. Throws CommandError with the library's text.
std::string read_report(
    const std::function<int32_t(char* buf, uint64_t cap, uint64_t* out_len)>& call);

// A configuration file's text; "-": standard input. A name that is no file, but looks like a
// configuration as one base64url word, is that itself. Throws CommandError.
std::string read_config_file(const std::string& name);

// Writes standard output. Throws CommandError if that cannot be done.
void print(const std::string& text);

// A count with its unit: "1 rank", "3 ranks".
std::string counted(const Json& n, const std::string& unit);

// A value on one line: strings bare, lists separated by commas, null as a dash.
std::string plain(const Json& value);

// Rows with aligned columns, each line beginning with `indent`. The last column is not padded.
std::string table(const std::vector<std::vector<std::string>>& rows, const std::string& indent);

}  // namespace sotto_cli
