// Steps an artefact that is no language model at a fixed rate, as a controller does, and times each step:
//
//   control ARTEFACT HZ
//
// It replays the reference first, and ends if the answers differ. For each line with a number of steps on
// standard input it continues one stream by that many, and prints the milliseconds of each and how many ended
// after the next step was due. Inputs are random.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <thread>

#include "xl_export.hpp"

namespace {

using Clock = std::chrono::steady_clock;

// One token of every input for one row.
xl_export::Arrays drawn(const xl_export::Spec& spec, xl_export::Random& random) {
  xl_export::Arrays inputs;
  for (const auto& named : spec.inputs) {
    xl_export::Array& array = inputs[named.name];
    for (std::size_t at = 0; at < named.value_size(); ++at)
      if (named.integers)
        array.integers.push_back(static_cast<std::int64_t>(random.next() * static_cast<double>(named.ids)));
      else
        array.floats.push_back(static_cast<float>(random.next() * 2 - 1));
  }
  return inputs;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3 || std::atof(arguments[2]) <= 0) {
    std::cerr << "usage: control ARTEFACT HZ\n";
    return 2;
  }
  try {
    const std::chrono::duration<double> seconds(1 / std::atof(arguments[2]));
    const auto period = std::chrono::duration_cast<Clock::duration>(seconds);
    xl_export::Options options;
    options.threads = 1;
    const auto session = xl_export::Session::open(arguments[1], options);
    const auto report = xl_export::check(session);
    std::printf("%.3g %s\n", report.max_difference, report.passed() ? "passed" : "FAILED");
    std::fflush(stdout);
    if (!report.passed()) return 1;
    auto memory = session.start();
    xl_export::Random random(0);
    for (long steps; std::cin >> steps;) {
      auto due = Clock::now();
      long late = 0;
      for (long step = 0; step < steps; ++step) {
        due = std::max(due + period, Clock::now());  // one late step does not make the next ones late
        std::this_thread::sleep_until(due);
        const auto inputs = drawn(session.spec(), random);
        const auto began = Clock::now();
        session.step(inputs, memory);
        const auto ended = Clock::now();
        if (ended > due + period) ++late;
        std::printf("%.5g ", std::chrono::duration<double, std::milli>(ended - began).count());
      }
      std::printf("%ld\n", late);
      std::fflush(stdout);
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
