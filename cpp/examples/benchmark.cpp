// Times single tokens of one stream, and prints one line of JSON:
//
//   benchmark ARTEFACT [TOKENS [THREADS [FUSED_LIBRARY]]]
//
// TOKENS are timed once the memory is full. Milliseconds are medians, of all and of the last tenth.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <vector>

#include "xl_export.hpp"

namespace {

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::cerr << "usage: benchmark ARTEFACT [TOKENS [THREADS [FUSED_LIBRARY]]]\n";
    return 2;
  }
  try {
    const long tokens = count > 2 ? std::max(10L, std::atol(arguments[2])) : 1000;
    xl_export::Options options;
    options.threads = count > 3 ? std::atoi(arguments[3]) : 1;
    if (count > 4) options.fused_library = arguments[4];
    const auto session = xl_export::Session::open(arguments[1], options);
    auto memory = session.start();
    const xl_export::Spec& spec = session.spec();
    std::vector<std::int64_t> before;
    for (std::int64_t at = 0; at < std::max(spec.memory, spec.segment); ++at)
      before.push_back(at % spec.vocabulary);
    session.feed(before, memory);
    std::vector<float> logits(static_cast<std::size_t>(spec.vocabulary));
    std::vector<double> times;
    for (long at = 0; at < tokens; ++at) {
      const std::vector<std::int64_t> token = {at % spec.vocabulary};
      const auto began = std::chrono::steady_clock::now();
      session.predict(token, memory, logits);
      const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
      times.push_back(took.count());
    }
    const std::vector<double> late(times.end() - std::max(1L, tokens / 10), times.end());
    std::printf(
        "{\"engine\": \"cpp\", \"kernel\": \"%s\", \"form\": \"%s\", \"precision\": \"%s\", "
        "\"threads\": %d, \"tokens\": %ld, \"ms_per_token\": %.5g, \"late_ms_per_token\": %.5g}\n",
        session.kernel(), spec.form.c_str(), spec.precision.c_str(), options.threads, tokens, median(times),
        median(late));
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
