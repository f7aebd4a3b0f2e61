// Characters of UTF-8.
#ifndef XL_EXPORT_UTF8_HPP
#define XL_EXPORT_UTF8_HPP

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "include/xl_export/error.hpp"

namespace xl_export::detail {

// One character at the beginning of some bytes. length: of its bytes, or of those that cannot be part of any
// character. unfinished: the bytes end before the character does.
struct Character {
  char32_t code = 0xfffd;
  std::size_t length = 1;
  bool valid = false;
  bool unfinished = false;
};

// The first character of bytes, of which there is at least one. Bytes that are none form the longest
// beginning of a character, as the Unicode standard and Python's decoder with errors="replace" have it.
inline Character first_character(std::string_view bytes) {
  const auto at = [&](std::size_t index) { return static_cast<unsigned char>(bytes[index]); };
  const unsigned char lead = at(0);
  if (lead < 0x80) return {lead, 1, true, false};
  const std::size_t wanted = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4) return {};
  char32_t code = lead & (0xffu >> (wanted + 1));
  for (std::size_t index = 1; index < wanted; ++index) {
    if (index == bytes.size()) return {0xfffd, index, false, true};
    // The second byte also excludes what is too long, halves of surrogate pairs, and what is beyond Unicode.
    const unsigned low = index == 1 && lead == 0xe0 ? 0xa0 : index == 1 && lead == 0xf0 ? 0x90 : 0x80;
    const unsigned high = index == 1 && lead == 0xed ? 0x9f : index == 1 && lead == 0xf4 ? 0x8f : 0xbf;
    if (at(index) < low || at(index) > high) return {0xfffd, index, false, false};
    code = code << 6 | (at(index) & 0x3fu);
  }
  return {code, wanted, true, false};
}

inline void append_utf8(std::string& text, char32_t code) {
  const auto byte = [&](char32_t value) { text += static_cast<char>(value); };
  if (code < 0x80) return byte(code);
  if (code < 0x800) return byte(0xc0 | code >> 6), byte(0x80 | (code & 0x3f));
  if (code < 0x10000)
    return byte(0xe0 | code >> 12), byte(0x80 | (code >> 6 & 0x3f)), byte(0x80 | (code & 0x3f));
  byte(0xf0 | code >> 18), byte(0x80 | (code >> 12 & 0x3f));
  byte(0x80 | (code >> 6 & 0x3f)), byte(0x80 | (code & 0x3f));
}

// A name or a text as it may stand in a sentence: short, on one line, printable, and UTF-8.
inline std::string shown(std::string_view text, std::size_t longest = 80) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    if (out.size() >= longest) return out + "...";
    const Character found = first_character(text.substr(at));
    const bool printable = found.valid && found.code >= 0x20 && (found.code < 0x7f || found.code > 0x9f);
    if (printable)
      append_utf8(out, found.code);
    else
      out += '?';
    at += found.length;
  }
  return out;
}

// The characters of a text; throws where it is not UTF-8.
inline std::vector<char32_t> characters(std::string_view text) {
  std::vector<char32_t> codes;
  codes.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const Character found = first_character(text.substr(at));
    if (!found.valid)
      throw Error(Fault::text,
                  "byte " + std::to_string(at) +
                      " of the text is not UTF-8; convert the text to UTF-8, or use a model with "
                      "a byte vocabulary, which takes any bytes.");
    codes.push_back(found.code);
    at += found.length;
  }
  return codes;
}

// White space as Python's str.split() and str.isspace() have it, by which words are separated.
inline bool is_space(char32_t code) {
  return (code >= 0x09 && code <= 0x0d) || (code >= 0x1c && code <= 0x20) || code == 0x85 || code == 0xa0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 ||
         code == 0x202f || code == 0x205f || code == 0x3000;
}

}  // namespace xl_export::detail

#endif
