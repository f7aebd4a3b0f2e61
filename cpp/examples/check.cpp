// Proves that this machine computes what the trained model computes: `check ARTEFACT [FUSED_LIBRARY]`.
#include <cstdio>
#include <exception>
#include <iostream>

#include "xl_export.hpp"

int main(int count, char** arguments) {
  if (count < 2) {
    std::cerr << "usage: check ARTEFACT [FUSED_LIBRARY]\n";
    return 2;
  }
  try {
    xl_export::Options options;
    if (count > 2) options.fused_library = arguments[2];
    const auto session = xl_export::Session::open(arguments[1], options);
    const xl_export::Report report = xl_export::check(session);
    std::printf("%lld log-probabilities differ from the reference by at most %.2e nats (tolerance %g): %s\n",
                static_cast<long long>(report.tokens), report.max_difference, report.tolerance,
                report.passed() ? "passed" : "FAILED");
    return report.passed() ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
