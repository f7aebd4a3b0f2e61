// Whether a loop should be shared with the other threads of a session.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace xl {

/// Decides whether to share a loop with the session's other threads.
///
/// Sharing costs time if they are asleep, or if another process has their CPU: a loop ends with its slowest
/// thread. Sizes are multiply-adds. Callers pass the time, so that tests can.
class Load {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr int64_t WORTH_WAKING = 1 << 19;  // about 50 µs of one core

  /// Of the thread that runs the session.
  static Load& of_this_thread() {
    static thread_local Load own;
    return own;
  }

  /// Whether a loop that begins now should be shared.
  bool shares(Clock::time_point now, int64_t size) {
    if (now > ended_ + AWAKE) steady_since_ = now;
    if (size >= ALWAYS_SHARED) return true;
    if (now < paused_until_) return false;
    return size >= WORTH_WAKING || now >= steady_since_ + STEADY;
  }

  void ended_alone(Clock::time_point began, Clock::time_point now, int64_t size) {
    ended_ = now;
    alone_time_ += now - began, alone_size_ += size;
  }

  void ended_shared(Clock::time_point began, Clock::time_point now, int64_t size) {
    const bool awake = began <= shared_ + AWAKE;
    ended_ = shared_ = now;
    if (size >= ALWAYS_SHARED || !awake || !alone_size_) return;
    const Clock::duration took = now - began;
    const std::chrono::duration<double, Clock::period> alone = alone_time_ * (double(size) / alone_size_);
    if (took < alone + DELAY) return;
    // A pause of 16 times what a late loop took makes such loops cost a few per cent. If the first loops after a
    // pause are late too, pauses become longer, until fewer than one token in a hundred is late.
    const Clock::duration longer = began < paused_until_ + SOON ? 2 * pause_ : took;
    pause_ = std::min<Clock::duration>(std::max<Clock::duration>(16 * took, longer), LONGEST_PAUSE);
    paused_until_ = now + pause_;
    alone_time_ = {}, alone_size_ = 0;  // measured again in the pause
  }

 private:
  static constexpr int64_t ALWAYS_SHARED = 1 << 21;  // on a busy machine too
  // Threads sleep after 200 µs without work (UNTIL_NEXT in ../onnx_runtime.py), and waking them costs as much as a
  // short loop. So short loops are shared only after 1 ms of steady work, not in a lone token every 10 ms.
  static constexpr std::chrono::microseconds AWAKE{150}, STEADY{1000};
  // What a loop may take longer than with one thread: an interrupt of a virtual machine takes 0.1 ms. Another process
  // takes a slice of a millisecond or more; if two threads are left with one CPU, each waits for the other to sleep.
  static constexpr std::chrono::microseconds DELAY{150}, SOON{10000};
  static constexpr std::chrono::milliseconds LONGEST_PAUSE{250};

  Clock::time_point ended_, shared_;  // the last loop, and the last one that was shared
  Clock::time_point steady_since_;    // loops followed one another before their threads fell asleep
  Clock::duration alone_time_{};      // of loops of one thread since the last pause began
  int64_t alone_size_ = 0;
  Clock::time_point paused_until_;
  Clock::duration pause_{};
};

}  // namespace xl
