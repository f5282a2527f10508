// Configurations as text: comments, base64url, and what is said about text that is no JSON.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/config/config.h"
#include "core/config/filter.h"

namespace sotto {
namespace {

using testing::HasSubstr;

void parse(std::string_view text) {
  const Result<Config> config = parse_config(text);
  EXPECT_TRUE(config.ok()) << config.status().text();
}

std::string error_of(std::string_view text) {
  const Result<Config> config = parse_config(text);
  EXPECT_FALSE(config.ok()) << text;
  if (config.ok()) return "";
  EXPECT_EQ(config.status().code(), Code::kInvalidArgument);
  return config.status().text();
}

std::string filtered(std::string_view text) {
  const Result<std::string> out = blank_comments(text);
  EXPECT_TRUE(out.ok());
  return out.ok() ? *out : "";
}

// ---- filter

TEST(ConfigFilter, BlanksCommentsAndTrailingCommas) {
  EXPECT_EQ(filtered("1 // x\n2"), "1     \n2");
  EXPECT_EQ(filtered("1 # x\r\n2"), "1    \r\n2");
  EXPECT_EQ(filtered("1/*x\ny*/2"), "1   \n   2");
  EXPECT_EQ(filtered("[1,]"), "[1 ]");
  EXPECT_EQ(filtered("{\"a\":1, /* , */ \n}"), "{\"a\":1          \n}");
}

TEST(ConfigFilter, LeavesStringsAlone) {
  for (const char* text : {R"(["a // b", "# c", "/* d */"])", R"(["\" // no", 1])",
                           R"(["\\", "#"])", R"(["x,]"])", R"({",}": "]"})"}) {
    EXPECT_EQ(filtered(text), text);
  }
}

TEST(ConfigFilter, OnlyACommaBehindAValueIsTrailing) {
  for (const char* text : {"[,]", "{,}", "[1,,2]", ",", "[1],"}) EXPECT_EQ(filtered(text), text);
  EXPECT_EQ(filtered("[1,,]"), "[1,,]");
  EXPECT_THAT(error_of("{\"betas\": [,]}"), HasSubstr("line 1, column 12"));
  EXPECT_THAT(error_of("{,}"), HasSubstr("line 1, column 2"));
}

TEST(ConfigFilter, DepthIsLimited) {
  EXPECT_TRUE(blank_comments(std::string(64, '[') + std::string(64, ']')).ok());
  EXPECT_EQ(blank_comments(std::string(65, '[')).status().text(),
            "configuration: line 1, column 65: nested more than 64 levels deep");
  EXPECT_TRUE(blank_comments("\"" + std::string(1000, '[') + "\"").ok());
  std::string flat = "[";
  for (int i = 0; i < 1000; ++i) flat += "[],";
  EXPECT_TRUE(blank_comments(flat + "]").ok());
}

TEST(ConfigFilter, PositionOfAPath) {
  const std::string text = "{\n \"a\": {\"b\": [1, {\"c\": \"x\"}]},\n \"d\": 2}";
  const auto at = [&](const char* path) {
    const TextPosition p = position_of_path(text, path, 0);
    return std::pair<size_t, size_t>(p.line, p.column);
  };
  EXPECT_EQ(at("a"), std::pair(size_t{2}, size_t{7}));
  EXPECT_EQ(at("a.b[0]"), std::pair(size_t{2}, size_t{14}));
  EXPECT_EQ(at("a.b[1].c"), std::pair(size_t{2}, size_t{23}));
  EXPECT_EQ(at("d"), std::pair(size_t{3}, size_t{7}));
  EXPECT_EQ(at("e"), std::pair(size_t{0}, size_t{0}));
  EXPECT_EQ(at(""), std::pair(size_t{0}, size_t{0}));
}

// ---- syntax

TEST(Config, SyntaxErrorsNameLineAndColumn) {
  EXPECT_THAT(error_of(""), HasSubstr("line 1, column 1"));
  EXPECT_THAT(error_of("# nothing\n\n"), HasSubstr("configuration: line 3, column 1"));
  EXPECT_THAT(error_of("{\n  // a comment\n  \"a\" 1\n}"),
              HasSubstr("configuration: line 3, column 7"));
  EXPECT_THAT(error_of("{} {}"), HasSubstr("line 1, column 4"));
  EXPECT_THAT(error_of("{\"gradient_clipping\": NaN}"), HasSubstr("line 1, column 23"));
  EXPECT_THAT(error_of("{\"gradient_clipping\": .5}"), HasSubstr("line 1, column 23"));
}

TEST(Config, ErrorsAreOnePlainLine) {
  for (const std::string& text :
       {std::string("{\"a\xff\": 1}"), std::string("{\"gradient_clippin\\u0000\": 1}"),
        std::string("{\"optimizer\": \0}", 16),
        std::string("{\"optimizer\": {\"type\": \"a\\nb\"}}")}) {
    for (const char c : error_of(text)) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << static_cast<int>(c);
  }
}

TEST(Config, DuplicateKeysAtEveryLevel) {
  EXPECT_EQ(error_of("{\"fp16\": {},\n\"fp16\": {}}"),
            "configuration: line 2, column 9: the key fp16 is there twice; leave one of them out");
  EXPECT_THAT(error_of(R"({"wandb": {"x": {"y": 1, "y": 1}}})"),
              HasSubstr("the key wandb.x.y is there twice"));
  EXPECT_THAT(error_of(R"({"wandb": [{"y": 1}, {"y": 1, "y": 2}]})"),
              HasSubstr("the key wandb.y is there twice"));
  parse(R"({"wandb": [{"y": 1}, {"y": 1}], "comet": {"y": {"y": 1}}})");  // the same name elsewhere
                                                                          // is fine
}

// ---- what is no JSON

struct Advice {
  const char* text;
  const char* error;  // behind "configuration: "
};

TEST(ConfigSyntax, SaysWhatIsMeant) {
  const std::vector<Advice> cases = {
      {"{train_batch_size: 8}",
       "line 1, column 2: the key train_batch_size is not in quotes; write \"train_batch_size\""},
      {"{\n  true_batch: 8}",
       "line 2, column 3: the key true_batch is not in quotes; write \"true_batch\""},
      {"{\"optimizer\": {\"type\": OneBitLamb}}",
       "line 1, column 24: the text OneBitLamb is not in quotes; write \"OneBitLamb\""},
      {"{'train_batch_size': 8}",
       "line 1, column 2: a text in single quotes is no JSON; write it in double quotes (a Python "
       "dictionary becomes JSON with json.dumps)"},
      {"{\"a\": 'x'}",
       "line 1, column 7: a text in single quotes is no JSON; write it in double quotes (a Python "
       "dictionary becomes JSON with json.dumps)"},
      {"{\"fp16\": {\"enabled\": True}}", "line 1, column 22: True is no JSON; write true"},
      {"{\"scheduler\": None}", "line 1, column 15: None is no JSON; write null"},
      {"{\"a\": NaN}", "line 1, column 7: NaN is no number in JSON; write a finite number"},
      {"{\"a\": -Infinity}",
       "line 1, column 7: -Infinity is no number in JSON; write a finite number"},
      {"{\"a\": .5}", "line 1, column 7: .5 is no number in JSON; write it like 0.5, 3e-5 or 1000"},
      {"{\"a\": 1.}", "line 1, column 7: 1. is no number in JSON; write it like 0.5, 3e-5 or 1000"},
      {"{\"a\": 1_000}",
       "line 1, column 7: 1_000 is no number in JSON; write it like 0.5, 3e-5 or 1000"},
      {"{\"a\": 0x10}",
       "line 1, column 7: 0x10 is no number in JSON; write it like 0.5, 3e-5 or 1000"},
      {"{\"betas\": (0.9, 0.999)}",
       "line 1, column 11: a Python tuple is no JSON; write a list: [...]"},
      {"{\"a\": 1\n \"b\": 2}", "line 2, column 2: a comma is missing before \"b\""},
      {"{\"a\": [1 2]}", "line 1, column 10: a comma is missing before 2"},
      {"{\"a\": 01}", "line 1, column 7: 01 is no number in JSON; write it like 0.5, 3e-5 or 1000"},
      {"{\"a\" \"b\"}", "line 1, column 6: a colon is missing before \"b\""},
      {"{\"a\": \"b,\n\"c\": 1}",
       "line 1, column 10: the text before has no closing quote on its line"},
      {"{\"a\": {\"b\": 1}", "line 1, column 15: the text ends before everything is closed"},
      {"ds_config = {\"x\": 1}",
       "line 1, column 1: the text begins with ds_config; a configuration is an object: {...}"},
      {"train_batch_size: 8\n",
       "line 1, column 1: the text begins with train_batch_size; a configuration is an object: "
       "{...}"},
      {"{} {}", "line 1, column 4: text follows behind the end of the object"},
      {"{\"lr\": ${LR}}",
       "line 1, column 8: ${LR}} looks like a template's placeholder: fill the template in first"},
      {"{\"lr\": {{ lr }}, \"x\": 1}",
       "line 1, column 8: {{ lr }} looks like a template's placeholder: fill the template in "
       "first"},
      {"{{\n \"train_batch_size\": 1}}",
       "line 1, column 1: {{ looks like a template's placeholder: fill the template in first"},
      {"{\"lr\": @LR@}",
       "line 1, column 8: @LR@ looks like a template's placeholder: fill the template in first"},
  };
  for (const Advice& c : cases)
    EXPECT_EQ(error_of(c.text), std::string("configuration: ") + c.error) << c.text;
}

// ---- base64url

TEST(ConfigBase64, IsReadAsTheTextItStandsFor) {
  // {"train_batch_size": 8, "x": "?>~"} in both alphabets; the last word has no padding.
  for (const char* word : {"eyJ0cmFpbl9iYXRjaF9zaXplIjogOCwgIngiOiAiPz5-In0=",
                           "eyJ0cmFpbl9iYXRjaF9zaXplIjogOCwgIngiOiAiPz5+In0=",
                           "eyJ0cmFpbl9iYXRjaF9zaXplIjogOCwgIngiOiAiPz5-In0",
                           "  eyJ0cmFpbl9iYXRjaF9z\naXplIjogOCwgIngiOiAiPz5-In0\r\n"}) {
    const Result<Config> config = parse_config(word);
    ASSERT_TRUE(config.ok()) << config.status().text();
    EXPECT_EQ(config->batch.train_batch_size, 8u);
  }
  // "// c\n{}" and "{}"
  parse("Ly8gYwp7fQ");
  parse("e30");
}

TEST(ConfigBase64, ErrorsAreAboutTheDecodedText) {
  // {"train_batch_size": 0}
  EXPECT_EQ(error_of("eyJ0cmFpbl9iYXRjaF9zaXplIjogMH0="),
            "configuration (decoded from base64url): line 1, column 22: train_batch_size: found 0, "
            "allowed is a whole number >= 1");
}

TEST(ConfigBase64, OtherWordsAreRefused) {
  EXPECT_EQ(
      error_of("OneBitLamb"),
      "configuration: found OneBitLamb, 10 characters, neither JSON nor JSON in base64url; pass "
      "the text of a file, or its base64url");
  EXPECT_THAT(error_of("a"), HasSubstr("found a, 1 character, neither JSON"));
  EXPECT_THAT(error_of("eyJ0c"), HasSubstr("neither JSON nor JSON in base64url"));  // 4k + 1
  EXPECT_THAT(error_of("AAAAAAAA"), HasSubstr("neither JSON"));
  EXPECT_EQ(
      error_of("configs/ds_config.json"),
      "configuration: found configs/ds_config.json, which looks like the name of a file; pass "
      "what the file holds");
  // JSON that consists of digits or letters stays JSON.
  EXPECT_THAT(error_of("12345678"), HasSubstr("found 12345678, expected an object"));
  EXPECT_THAT(error_of("null"), HasSubstr("found null, expected an object"));
}

// ---- "auto"

std::string resolved(std::string_view text, std::string_view values = "") {
  const Result<std::string> out = config_resolve(text, values);
  return out.ok() ? *out : out.status().text();
}

TEST(ConfigResolve, MakesPlainJson) {
  EXPECT_EQ(resolved("{\n  // a comment\n  \"a\": [1, 2,], # another\n}"), R"({"a":[1,2]})");
  EXPECT_EQ(resolved("e30"), "{}");
  EXPECT_EQ(resolved(R"({"a": "auto"})"), R"({"a":"auto"})");
}

TEST(ConfigResolve, ReplacesAutoAlone) {
  constexpr std::string_view kFile =
      R"({"a": "auto", "b": {"c": "auto", "d": 1}, "e": [{"f": "auto"}, "auto"]})";
  EXPECT_EQ(resolved(kFile, R"({"a": 64, "b.c": [0.9, 0.99], "b.d": 2, "e[0].f": null, "g": 1})"),
            R"({"a":64,"b":{"c":[0.9,0.99],"d":1},"e":[{"f":null},"auto"]})");
  parse(resolved(R"({"optimizer": {"type": "Lamb", "params": {"lr": "auto"}}})",
                 R"({"optimizer.params.lr": 0.25})"));
}

TEST(ConfigResolve, WhatIsRefused) {
  EXPECT_EQ(resolved("{\"a\": }"), error_of("{\"a\": }"));
  EXPECT_THAT(resolved("{}", "[1]"), HasSubstr("values: found [1], expected a JSON object"));
  EXPECT_THAT(resolved("{}", "{"), HasSubstr("values: found no JSON"));
  EXPECT_THAT(resolved("{}", R"({"a": "auto"})"), HasSubstr("values: \"a\" is \"auto\""));
  EXPECT_THAT(resolved("{}", R"({"a": {"b": 1}})"), HasSubstr("values: \"a\" is {\"b\":1}"));
  EXPECT_EQ(resolved(R"({"a": 1, "b": {"c": 1, "c": 2}})"),
            "configuration: line 1, column 29: the key b.c is there twice; leave one of them out");
  EXPECT_EQ(resolved(R"({"a": "auto"})", R"({"a": 1, "a": 2})"),
            "values: the key a is there twice; leave one of them out");
}

// A number of any length is one token of the parser.
TEST(ConfigText, LongNumbersAreCut) {
  const std::string digits(400, '7');
  for (const std::string& text :
       {"{\"a\": " + digits + "}", "{\"a\": -" + digits + "e9}", "{\"a\": 1" + digits + "x}",
        "{\"a\" " + digits + "}", "{\"optimizer\": {\"type\": " + digits + "}}"}) {
    const std::string error = resolved(text);
    EXPECT_LE(error.size(), 250u) << error;
    EXPECT_EQ(error.find(std::string(81, '7')), std::string::npos) << error;
    EXPECT_LE(error_of(text).size(), 250u) << error_of(text);
  }
}

}  // namespace
}  // namespace sotto
