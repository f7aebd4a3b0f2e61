// Balances a pole with the exported policy, one decision every 20 ms as a robot would:
//
//   run ARTEFACT [EPISODES [HZ [LOG]]]
//
// HZ 0 runs as fast as it can. LOG is a file for the actions, a line of 0 (left) and 1 (right) per episode.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "xl_export.hpp"

namespace {

using Clock = std::chrono::steady_clock;

// CartPole-v1 of gymnasium. A seed begins where gymnasium's reset(seed=seed) does.
struct CartPole {
  double x, x_dot, theta, theta_dot;

  explicit CartPole(std::uint64_t seed) {
    xl_export::Random random(seed);
    for (double* each : {&x, &x_dot, &theta, &theta_dot}) *each = -0.05 + 0.1 * random.next();
  }

  bool upright() const {
    return std::abs(x) <= 2.4 && std::abs(theta) <= 12 * 2 * 3.14159265358979323846 / 360;
  }

  void push(bool right) {
    const double force = right ? 10 : -10, cosine = std::cos(theta), sine = std::sin(theta);
    const double temp = (force + 0.05 * (theta_dot * theta_dot) * sine) / 1.1;
    const double turning = (9.8 * sine - cosine * temp) / (0.5 * (4.0 / 3.0 - 0.1 * (cosine * cosine) / 1.1));
    const double moving = temp - 0.05 * turning * cosine / 1.1;
    x += 0.02 * x_dot;
    x_dot += 0.02 * moving;
    theta += 0.02 * theta_dot;
    theta_dot += 0.02 * turning;
  }
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::cerr << "usage: run ARTEFACT [EPISODES [HZ [LOG]]]\n";
    return 2;
  }
  try {
    const long episodes = count > 2 ? std::atol(arguments[2]) : 3;
    const double hz = count > 3 ? std::atof(arguments[3]) : 50;
    std::ofstream log(count > 4 ? arguments[4] : "/dev/null");

    xl_export::Options options;
    options.threads = 1;
    const auto session = xl_export::Session::open(arguments[1], options);
    auto memory = session.start();
    xl_export::Arrays inputs, outputs;  // of every step, so that no later one allocates anything
    std::vector<float>& observation = inputs["observation"].floats;
    std::vector<double> times;  // milliseconds of each decision
    double total = 0;
    auto due = Clock::now();
    for (long seed = 0; seed < episodes; ++seed) {
      CartPole world(static_cast<std::uint64_t>(seed));
      memory.positions[0] = 0;  // a new episode: the policy forgets the last one
      std::string actions;
      while (world.upright() && actions.size() < 500) {
        observation = {static_cast<float>(world.x), static_cast<float>(world.theta)};
        const auto began = Clock::now();
        session.step(inputs, memory, outputs);
        times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - began).count());
        const auto& logits = outputs.at("action").floats;
        const bool right = logits[1] > logits[0];
        actions += right ? '1' : '0';
        world.push(right);
        if (hz > 0) {
          due += std::chrono::nanoseconds(static_cast<long long>(1e9 / hz));
          std::this_thread::sleep_until(due);
        }
      }
      log << actions << '\n';
      total += static_cast<double>(actions.size());
      std::printf("seed %ld: return %zu\n", seed, actions.size());
      std::fflush(stdout);
    }
    std::sort(times.begin(), times.end());
    const auto within = [&](double share) {
      return times[static_cast<std::size_t>(share * static_cast<double>(times.size() - 1))];
    };
    std::printf("return over %ld episodes: %.1f\n", episodes, total / static_cast<double>(episodes));
    std::printf("a decision took %.3f ms (median), %.3f ms (99 %% within), %.3f ms (slowest)\n", within(0.5),
                within(0.99), times.back());
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
