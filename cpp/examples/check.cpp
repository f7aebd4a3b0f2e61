// Proves that this machine computes what the trained model computes:
//
//   check ARTEFACT [--public-key FILE] [--identity SHA256] [--library FUSED_LIBRARY]
#include <cstdio>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>

#include "xl_export.hpp"

int main(int count, char** arguments) {
  try {
    const std::string usage =
        "usage: check ARTEFACT [--public-key FILE] [--identity SHA256] [--library FUSED_LIBRARY]";
    if (count < 2) throw std::runtime_error(usage);
    xl_export::Options options;
    for (int at = 2; at < count; at += 2) {
      const std::string name = arguments[at];
      if (name != "--public-key" && name != "--identity" && name != "--library")
        throw std::runtime_error(name + " is no option; " + usage);
      if (at + 1 == count) throw std::runtime_error(name + " needs a value; " + usage);
      if (name == "--public-key") options.public_key = arguments[at + 1];
      if (name == "--identity") options.expected_identity = arguments[at + 1];
      if (name == "--library") options.fused_library = arguments[at + 1];
    }
    const auto session = xl_export::Session::open(arguments[1], options);
    const xl_export::Report report = xl_export::check(session);
    const bool text = session.spec().language_model();
    std::printf("%lld %s differ from the reference by at most %.2e%s (tolerance %g): %s\n",
                static_cast<long long>(report.tokens), text ? "log-probabilities" : "answers",
                report.max_difference, text ? " nats" : "", report.tolerance,
                report.passed() ? "passed" : "FAILED");
    return report.passed() ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
