// The members of a struct of variables: a field for each row of the list that SOTTO_PARAMS names,
// with its default, and rows(). Included in the body of the struct.

#define SOTTO_PARAM_INT(field, env, fallback, lo, hi, text) int64_t field = fallback;
#define SOTTO_PARAM_DOUBLE(field, env, fallback, lo, hi, text) double field = fallback;
#define SOTTO_PARAM_ENUM(field, env, fallback, allowed, text) std::string field = fallback;
#define SOTTO_PARAM_STRING(field, env, fallback, text) std::string field = fallback;
#define SOTTO_PARAM_BOOL(field, env, fallback, text) bool field = fallback;
#include SOTTO_PARAMS
#undef SOTTO_PARAM_INT
#undef SOTTO_PARAM_DOUBLE
#undef SOTTO_PARAM_ENUM
#undef SOTTO_PARAM_STRING
#undef SOTTO_PARAM_BOOL

// In the order of the list. They are valid as long as this object.
std::vector<sotto::ParamRow> rows() {
#define SOTTO_PARAM_INT(field, env, fallback, lo, hi, text) \
  {env, text, sotto::ParamRow::Int{&field, lo, hi}},
#define SOTTO_PARAM_DOUBLE(field, env, fallback, lo, hi, text) \
  {env, text, sotto::ParamRow::Double{&field, lo, hi}},
#define SOTTO_PARAM_ENUM(field, env, fallback, allowed, text) \
  {env, text, sotto::ParamRow::Enum{&field, allowed}},
#define SOTTO_PARAM_STRING(field, env, fallback, text) {env, text, sotto::ParamRow::String{&field}},
#define SOTTO_PARAM_BOOL(field, env, fallback, text) {env, text, sotto::ParamRow::Bool{&field}},
  return {
#include SOTTO_PARAMS
  };
}
#undef SOTTO_PARAM_INT
#undef SOTTO_PARAM_DOUBLE
#undef SOTTO_PARAM_ENUM
#undef SOTTO_PARAM_STRING
#undef SOTTO_PARAM_BOOL
#undef SOTTO_PARAMS
