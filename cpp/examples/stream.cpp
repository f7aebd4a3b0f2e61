// Continues a text, and prints it as it grows:
//
//   stream ARTEFACT "Once upon a time" [TOKENS [TEMPERATURE [SEED]]]
#include <exception>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>

#include "xl_export.hpp"

namespace {

// Replaces a number by the one that a word says.
template <class Number>
void read(Number& number, const std::string& word) {
  std::istringstream stream(word);
  if (!(stream >> number) || !stream.eof())
    throw std::runtime_error(word + " is no number; usage: stream ARTEFACT PROMPT [TOKENS [TEMPERATURE [SEED]]]");
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) {
    std::cerr << "usage: stream ARTEFACT PROMPT [TOKENS [TEMPERATURE [SEED]]]\n";
    return 2;
  }
  try {
    const auto session = xl_export::Session::open(arguments[1]);
    xl_export::GenerateOptions options;
    auto sampler = session.sampler();
    if (count > 3) read(options.max_tokens, arguments[3]);
    if (count > 4) read(sampler.temperature, arguments[4]);
    if (count > 5) read(options.seed, arguments[5]);
    options.sampler = sampler;
    auto memory = session.start();
    std::string before = arguments[2];  // printed once the prompt and the options were accepted
    xl_export::generate(session, memory, before, options, [&](const xl_export::Piece& piece) {
      std::cout << before << piece.text << std::flush;
      before.clear();
      return true;
    });
    std::cout << '\n';
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
