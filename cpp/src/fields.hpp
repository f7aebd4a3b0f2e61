// Verifies JSON files whose fields format_tables.hpp describes.
#ifndef XL_EXPORT_FIELDS_HPP
#define XL_EXPORT_FIELDS_HPP

#include <string>
#include <string_view>

#include "json.hpp"

namespace xl_export::detail {

// The tables; cpp/tools/format_tables.py describes them.
const json::Value& table(std::string_view name);

// Why a value is not of a type, as a part of a sentence; empty if it is. Fills in what may be absent, except
// null. name: of the value.
std::string fault(const json::Value& type, json::Value& value, const std::string& name);

// Throws unless a document is of the type of a table.
void verify_fields(const char* type, json::Value& document);

}  // namespace xl_export::detail

#endif
