#include "fields.hpp"

#include <algorithm>
#include <cstdint>

#include "format_tables.hpp"
#include "utf8.hpp"

namespace xl_export::detail {

const json::Value& table(std::string_view name) {
  static const json::Value tables = json::parse(format_tables);
  return tables.at(name);
}

std::string fault(const json::Value& type, json::Value& value, const std::string& name) {
  const std::string& kind = type.keys.front();
  const json::Value& limits = type.items.front();
  const auto unless = [&](bool holds, const std::string& expected) {
    return holds ? "" : name + " is " + value.shown_kind() + "; expected " + expected;
  };
  if (kind == "integer" || kind == "number") {
    bool inside = false;
    try {
      const double number = kind == "integer" ? static_cast<double>(value.integer()) : value.number();
      inside =
          limits.items.empty() || (number >= limits.items[0].number() && number <= limits.items[1].number());
    } catch (const Error&) {  // it is another kind of number, or none
    }
    std::string expected = kind == "integer" ? "a whole number" : "a number";
    if (!limits.items.empty()) expected += " from " + limits.items[0].text + " to " + limits.items[1].text;
    return unless(inside, expected);
  }
  if (kind == "boolean") return unless(value.is(json::Kind::boolean), "true or false");
  if (kind == "null") return unless(value.is(json::Kind::null), kind);
  if (kind == "any") {
    std::string first;
    for (const json::Value& each : limits.items) {
      const std::string found = fault(each, value, name);
      if (found.empty()) return "";
      if (first.empty()) first = found;
    }
    return first;
  }
  if (kind == "choice" || kind == "text") {
    if (!value.is(json::Kind::string)) return unless(false, "a text");
    const std::string& text = value.text;
    const auto wrong = [&](const std::string& expected) {
      return name + " is " + shown(text) + "; expected " + expected;
    };
    if (kind == "choice") {
      std::string known;
      for (const json::Value& each : limits.items) {
        if (each.text == text) return "";
        known += (known.empty() ? "one of " : ", ") + each.text;
      }
      return wrong(known);
    }
    if (limits.items.empty()) return "";
    const auto size = static_cast<std::int64_t>(text.size());
    const bool sound = size >= limits.items[3].integer() && size <= limits.items[4].integer() &&
                       limits.items[1].text.find(text[0]) != std::string::npos &&
                       text.find_first_not_of(limits.items[2].text) == std::string::npos;
    return sound ? "" : wrong(limits.items[0].text);
  }
  std::string found;
  if (kind == "list") {
    if (!value.is(json::Kind::list)) return unless(false, "a list");
    for (auto item = value.items.begin(); item != value.items.end() && found.empty(); ++item)
      found = fault(limits, *item, "an item of " + name);
    return found;
  }
  if (!value.is(json::Kind::object)) return unless(false, "an object");
  for (std::size_t at = 0; at < value.keys.size() && found.empty(); ++at) {
    if (kind == "map") {
      json::Value key;
      key.kind = json::Kind::string, key.text = value.keys[at];
      found = fault(limits.items[0], key, "a key of " + name);
      if (found.empty()) found = fault(limits.items[1], value.items[at], shown(key.text));
    } else if (!limits.find(value.keys[at])) {
      found = "it has the unknown key " + shown(value.keys[at]);
    }
  }
  if (kind == "map") return found;
  for (std::size_t field = 0; field < limits.keys.size() && found.empty(); ++field) {
    const std::string& key = limits.keys[field];
    const auto given = std::find(value.keys.begin(), value.keys.end(), key);
    if (given != value.keys.end()) {
      found =
          fault(limits.items[field], value.items[static_cast<std::size_t>(given - value.keys.begin())], key);
      continue;
    }
    const json::Value* absent = type.at("absent").find(key);
    if (!absent)
      found = "it has no \"" + key + "\"";
    else if (!absent->is(json::Kind::null))
      value.keys.push_back(key), value.items.push_back(*absent);
  }
  return found;
}

void verify_fields(const char* type, json::Value& document) {
  const std::string wrong = fault(table(type), document, "it");
  if (!wrong.empty()) throw json::Value::wrong(wrong);
}

}  // namespace xl_export::detail
