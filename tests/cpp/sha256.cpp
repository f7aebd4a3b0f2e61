// Prints the hash of each beginning of standard input, of 0 to 200 bytes, and of all of it. The last line
// says whether the processor's instructions and plain C++ give the same state.
#include "src/sha256.cpp"

#include <iostream>
#include <iterator>

int main() {
  using namespace xl_export::detail;
  const std::string data{std::istreambuf_iterator<char>(std::cin), {}};
  for (std::size_t size = 0; size <= 200; ++size) std::cout << sha256(data.data(), size) << '\n';
  std::cout << sha256(data.data(), data.size()) << '\n';
  if (!has_instructions()) {
    std::cout << "no instructions\n";
    return 0;
  }
  State plain = {1, 2, 3, 4, 5, 6, 7, 8}, other = plain;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(data.data()) + 1;  // not aligned
  compress_all_plainly(plain, bytes, data.size() / block_bytes - 1);
  compress_all_by_instructions(other, bytes, data.size() / block_bytes - 1);
  std::cout << (plain == other ? "equal\n" : "different\n");
}
