// Generates greedily, and prints what the start and each token cost, as benchmarks/first_tokens.py does:
//
//   start ARTEFACT THREADS UNTIMED TIMED [FUSED_LIBRARY]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "xl_export.hpp"

namespace {

double seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Bytes in use now (VmRSS) or at most so far (VmHWM).
long long resident(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind(field, 0) == 0) return 1024 * std::atoll(line.c_str() + field.size() + 1);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 5) {
    std::cerr << "usage: start ARTEFACT THREADS UNTIMED TIMED [FUSED_LIBRARY]\n";
    return 2;
  }
  try {
    xl_export::Options options;
    options.threads = std::atoi(arguments[2]);
    if (count > 5) options.fused_library = arguments[5];
    const auto session = xl_export::Session::open(arguments[1], options);
    auto memory = session.start();
    std::vector<std::int64_t> fed = {0};
    std::vector<std::int64_t> tokens;
    const auto advance = [&](const long steps) {
      for (long step = 0; step < steps; ++step) {
        const auto logits = session.predict(fed, memory);
        tokens.push_back(std::max_element(logits.begin(), logits.end()) - logits.begin());
        fed[0] = (tokens.back() + memory.positions[0]) % session.spec().vocabulary;
      }
    };
    advance(1);
    const double answered = seconds(CLOCK_MONOTONIC);
    const double first_cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    const long long bytes = resident("VmRSS");
    advance(std::atol(arguments[3]));
    const long timed = std::atol(arguments[4]);
    const double began = seconds(CLOCK_PROCESS_CPUTIME_ID);
    advance(timed);
    const double token_cpu = (seconds(CLOCK_PROCESS_CPUTIME_ID) - began) / static_cast<double>(timed);
    std::string list;
    for (const auto token : tokens) list += (list.empty() ? "" : ", ") + std::to_string(token);
    std::printf(
        "{\"tokens\": [%s], \"answered_s\": %.9f, \"first_cpu_s\": %.9f, \"resident_bytes\": %lld, "
        "\"token_cpu_s\": %.9g, \"peak_bytes\": %lld}\n",
        list.c_str(), answered, first_cpu, bytes, token_cpu, resident("VmHWM"));
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
