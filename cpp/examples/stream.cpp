// Continues a text, and prints it as it grows:
//
//   stream ARTEFACT "Once upon a time" [TOKENS [TEMPERATURE [SEED]]]
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>

#include "xl_export.hpp"

int main(int count, char** arguments) {
  if (count < 3) {
    std::cerr << "usage: stream ARTEFACT PROMPT [TOKENS [TEMPERATURE [SEED]]]\n";
    return 2;
  }
  try {
    const auto session = xl_export::Session::open(arguments[1]);
    xl_export::GenerateOptions options;
    if (count > 3) options.max_tokens = std::atoll(arguments[3]);
    auto sampler = session.sampler();
    if (count > 4) sampler.temperature = std::atof(arguments[4]);
    options.sampler = sampler;
    if (count > 5) options.seed = std::strtoull(arguments[5], nullptr, 10);
    auto memory = session.start();
    const auto prompt = session.vocabulary().encode(arguments[2]);
    std::cout << arguments[2] << std::flush;
    xl_export::generate(session, memory, prompt, options, [](const xl_export::Piece& piece) {
      std::cout << piece.text << std::flush;
      return true;
    });
    std::cout << '\n';
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
