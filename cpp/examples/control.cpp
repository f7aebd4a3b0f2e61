// Steps a policy, or any other artefact that is no language model, at a fixed rate, as a robot's controller does:
//
//   control ARTEFACT [--hz 1000] [--ticks 10000] [--priority 1-99] [--cpu N] [--lock] [--log FILE]
//
// It replays the reference first, and ends if the answers differ. Then it steps one stream with random inputs.
// A step is late if its answer comes after the next tick. A tick that has passed when its turn comes is skipped.
// --priority is a priority of SCHED_FIFO, --cpu the only CPU to use, and --lock keeps all memory in RAM.
// --log writes a line for each step: its tick, the milliseconds that it computed, and those from its tick to its
// answer. It needs Linux.
#include <malloc.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "xl_export.hpp"

namespace {

constexpr int warmup_steps = 100;  // the first steps allocate, and fill the caches

struct Settings {
  std::string artefact, log;
  double hz = 1000;
  long ticks = 10000;
  int priority = 0, cpu = -1;
  bool lock = false;
};

struct Step {
  long tick;
  double compute_ms, answer_ms;  // answer_ms: since its tick
};

// Throws std::invalid_argument for words that are no settings.
Settings parsed(int count, char** arguments) {
  Settings settings;
  for (int at = 1; at < count; ++at) {
    const std::string name = arguments[at];
    if (name == "--lock") settings.lock = true;
    else if (name.rfind("--", 0) != 0 && settings.artefact.empty()) settings.artefact = name;
    else if (at + 1 == count) throw std::invalid_argument(name);
    else if (name == "--hz") settings.hz = std::stod(arguments[++at]);
    else if (name == "--ticks") settings.ticks = std::stol(arguments[++at]);
    else if (name == "--priority") settings.priority = std::stoi(arguments[++at]);
    else if (name == "--cpu") settings.cpu = std::stoi(arguments[++at]);
    else if (name == "--log") settings.log = arguments[++at];
    else throw std::invalid_argument(name);
  }
  if (settings.artefact.empty() || !(settings.hz > 0) || settings.ticks < 1) throw std::invalid_argument("");
  return settings;
}

void require(bool done, const std::string& what, const char* fix) {
  if (!done) throw std::runtime_error(what + " was refused (" + std::strerror(errno) + "); " + fix);
}

// Writes to each page, which maps it now, and not in the middle of a step. volatile: otherwise Clang would leave out
// the writes, and even the allocation.
void touch(volatile char* memory, std::size_t size) {
  for (std::size_t at = 0; at < size; at += 4096) memory[at] = 0;
}

// Keeps what the process has, and all that it will have, in RAM.
void lock_memory() {
#ifdef __GLIBC__
  mallopt(M_TRIM_THRESHOLD, -1);  // freed memory stays with the process
  mallopt(M_MMAP_MAX, 0);         // large blocks come from the same heap, so they are never unmapped either
#endif
  require(!mlockall(MCL_CURRENT | MCL_FUTURE), "--lock",
          "run it as root, or raise the memlock limit in /etc/security/limits.conf.");
  char stack[256 << 10];
  touch(stack, sizeof stack);
  std::vector<char> heap(16 << 20);
  touch(heap.data(), heap.size());
}

void schedule(const Settings& settings) {
  if (settings.cpu >= 0) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(static_cast<std::size_t>(settings.cpu), &cpus);
    require(!sched_setaffinity(0, sizeof cpus, &cpus), "--cpu", "give a CPU that `nproc --all` counts, from 0.");
  }
  if (settings.priority) {
    sched_param parameters{};
    parameters.sched_priority = settings.priority;
    require(!sched_setscheduler(0, SCHED_FIFO, &parameters), "--priority",
            "give 1 to 99; run it as root, or raise the rtprio limit in /etc/security/limits.conf.");
  }
}

// One token of every input for one row, written over the last one.
void draw(const xl_export::Spec& spec, xl_export::Random& random, xl_export::Arrays& inputs) {
  for (const auto& named : spec.inputs) {
    xl_export::Array& array = inputs[named.name];
    if (named.integers) array.integers.resize(named.value_size());
    else array.floats.resize(named.value_size());
    for (auto& id : array.integers)
      id = static_cast<std::int64_t>(random.next() * static_cast<double>(named.ids));
    for (float& number : array.floats) number = static_cast<float>(random.next() * 2 - 1);
  }
}

std::int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void sleep_until(std::int64_t ns) {
  timespec due;
  due.tv_sec = static_cast<time_t>(ns / 1'000'000'000);
  due.tv_nsec = static_cast<long>(ns % 1'000'000'000);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, nullptr) == EINTR) {
  }
}

// The steps that were computed.
std::vector<Step> loop(const xl_export::Session& session, xl_export::Memory& memory, const Settings& settings) {
  xl_export::Random random(0);
  xl_export::Arrays inputs, outputs;  // used again by every step, so that the library allocates nothing
  for (int step = 0; step < warmup_steps; ++step) {
    draw(session.spec(), random, inputs);
    session.step(inputs, memory, outputs);
  }
  memory.positions[0] = 0;  // a new episode: the policy forgets the warm-up
  std::vector<Step> steps;
  steps.reserve(static_cast<std::size_t>(settings.ticks));
  const auto period = static_cast<std::int64_t>(1e9 / settings.hz);
  const std::int64_t start = now_ns() + period;
  for (long tick = 0; tick < settings.ticks; ++tick) {
    const std::int64_t due = start + tick * period;  // absolute, so that lateness does not add up
    if (tick > 0 && now_ns() >= due + period) continue;  // the robot holds its last action
    sleep_until(due);
    draw(session.spec(), random, inputs);  // a robot reads its sensors here
    const std::int64_t began = now_ns();
    session.step(inputs, memory, outputs);
    const std::int64_t ended = now_ns();
    steps.push_back({tick, static_cast<double>(ended - began) / 1e6, static_cast<double>(ended - due) / 1e6});
  }
  return steps;
}

void print_times(const char* what, const std::vector<Step>& steps, double Step::*field) {
  std::vector<double> times;
  for (const Step& step : steps) times.push_back(step.*field);
  std::sort(times.begin(), times.end());
  const auto within = [&](double share) {
    return times[static_cast<std::size_t>(std::ceil(share * static_cast<double>(times.size()))) - 1];
  };
  std::printf("%s: p50 %.3f ms, p99 %.3f ms, p99.9 %.3f ms, longest %.3f ms\n", what, within(0.5), within(0.99),
              within(0.999), times.back());
}

}  // namespace

int main(int count, char** arguments) {
  Settings settings;
  try {
    settings = parsed(count, arguments);
  } catch (const std::logic_error&) {  // of a number, or of an option
    std::cerr << "usage: control ARTEFACT [--hz 1000] [--ticks 10000] [--priority 1-99] [--cpu N] [--lock] "
                 "[--log FILE]\n";
    return 2;
  }
  try {
    xl_export::Options options;
    options.threads = 1;  // no other thread has to be woken during a step
    const auto session = xl_export::Session::open(settings.artefact, options);
    const auto report = xl_export::check(session);
    std::printf("the answers differ from the reference by at most %.2g: %s\n", report.max_difference,
                report.passed() ? "passed" : "FAILED");
    if (!report.passed()) return 1;
    auto memory = session.start();
    if (settings.lock) lock_memory();
    schedule(settings);  // after the slow part, so that other processes can run during it
    const std::vector<Step> steps = loop(session, memory, settings);
    long late = 0;
    for (const Step& step : steps) late += step.answer_ms > 1e3 / settings.hz;
    std::printf("%ld ticks at %g Hz: %ld steps late, %ld ticks skipped\n", settings.ticks, settings.hz, late,
                settings.ticks - static_cast<long>(steps.size()));
    print_times("step", steps, &Step::compute_ms);
    print_times("answer after its tick", steps, &Step::answer_ms);
    if (!settings.log.empty()) {
      std::ofstream log(settings.log);
      log << "tick,compute_ms,answer_ms\n";
      for (const Step& step : steps) log << step.tick << ',' << step.compute_ms << ',' << step.answer_ms << '\n';
      if (!log.flush()) throw std::runtime_error(settings.log + " cannot be written; give another file.");
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
