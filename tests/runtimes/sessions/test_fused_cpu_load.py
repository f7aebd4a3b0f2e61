"""When the fused operator shares a loop with the other threads of a session."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from runtimes.sessions.fused_cpu.library import FOLDER

# Times are microseconds. They are given, so the test is the same on a busy machine.
PROGRAM = """
#include <cassert>
#include "load.hpp"
using xl::Load;
const auto start = Load::Clock::now();
auto at(int64_t time) { return start + std::chrono::microseconds(time); }
const int64_t SHORT = 1 << 15, MIDDLE = 1 << 19, LONG = 1 << 21;
const int64_t ALONE = 20;  // what one thread takes for a short loop

void alone(Load& load, int64_t time) { load.ended_alone(at(time), at(time + ALONE), SHORT); }
void shared(Load& load, int64_t time, int64_t took) { load.ended_shared(at(time), at(time + took), SHORT); }

/// Whether a short loop is shared then, after short loops of one thread for two milliseconds.
bool shares_after_loops(Load& load, int64_t time) {
  for (int64_t before = time - 2000; before < time; before += 100) {
    load.shares(at(before), SHORT);
    alone(load, before);
  }
  return load.shares(at(time), SHORT);
}

void threads_that_sleep_are_woken_if_it_is_worth_it() {
  Load load;
  assert(!load.shares(at(0), SHORT));
  assert(load.shares(at(0), MIDDLE) && load.shares(at(0), LONG));
  assert(shares_after_loops(load, 5000));
  shared(load, 5000, 15);
  assert(load.shares(at(5100), SHORT));
  assert(!load.shares(at(5500), SHORT));
}

void late_loops_are_followed_by_pauses() {
  Load load;
  assert(shares_after_loops(load, 4000));
  shared(load, 4000, 300);  // it wakes the threads
  assert(load.shares(at(4400), SHORT));
  shared(load, 4400, 160);
  assert(load.shares(at(4600), SHORT));
  load.ended_shared(at(4600), at(5060), MIDDLE);  // one thread takes 320
  assert(load.shares(at(5100), SHORT));
  shared(load, 5100, 1000);  // late: the pause is 16 times as long
  assert(!shares_after_loops(load, 22099) && load.shares(at(22099), LONG));
  assert(!load.shares(at(22099), MIDDLE));
  assert(shares_after_loops(load, 22100));
  shared(load, 22100, 300);  // it wakes the threads
  shared(load, 22500, 200);  // late again: the pause is twice as long
  assert(!shares_after_loops(load, 54699) && shares_after_loops(load, 54700));
  shared(load, 200000, 15);
  shared(load, 200100, 200);  // late after a long time
  assert(!shares_after_loops(load, 203499) && shares_after_loops(load, 203500));
}

void pauses_have_an_end() {
  Load load;
  assert(shares_after_loops(load, 4000));
  shared(load, 4000, 15);
  shared(load, 4100, 2000000);
  assert(!shares_after_loops(load, 2254099) && shares_after_loops(load, 2254100));
  shared(load, 2254100, 15);
  shared(load, 2254200, 200);
  assert(!shares_after_loops(load, 2504399) && shares_after_loops(load, 2504400));
}

int main() {
  threads_that_sleep_are_woken_if_it_is_worth_it();
  late_loops_are_followed_by_pauses();
  pauses_have_an_end();
}
"""


def test_loops_are_shared_where_it_is_worth_it(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here")
    (tmp_path / "load.cpp").write_text(PROGRAM)
    program = tmp_path / "load"
    command = ["g++", "-std=c++17", "-I", str(FOLDER), str(tmp_path / "load.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    subprocess.run([program], check=True)
