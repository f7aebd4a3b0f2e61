// The optional signature of an artefact: Ed25519 over the bytes of spec.json, in spec.json.sig.
#ifndef XL_EXPORT_SIGNATURE_HPP
#define XL_EXPORT_SIGNATURE_HPP

#include <filesystem>
#include <string>

#include "file.hpp"

namespace xl_export::detail {

// Throws unless the owner of the key in a PEM file has signed the content of `spec.json` at `path`.
void verify_signature(const std::filesystem::path& path, const Bytes& content, const std::string& public_key);

}  // namespace xl_export::detail

#endif
