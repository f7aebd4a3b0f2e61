"""The policy: trained at toy size, and the same actions in Python, C++ and the page."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import runtimes
from tests.browsers import opening
from tests.cpp.program import compiled
from tests.examples.conftest import EXAMPLES, load_example
from tests.web.npm import packages
from xl_export.web.serve import serving

POLICY = EXAMPLES / "policy"
CARTPOLE = POLICY / "cartpole"
SEEDS = 1  # an episode has 500 steps


@pytest.fixture(scope="module")
def train() -> ModuleType:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    return load_example("policy", "train")


def play(*, forget: bool = False) -> list[str]:
    """What the exported policy does in some episodes of gymnasium, 0 and 1 for left and right.

    forget: whether the memory is restarted before each step.
    """
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    session = runtimes.open_session(CARTPOLE, threads=1)
    memory = session.start(1)
    environment = gymnasium.make("CartPole-v1")
    played = []
    for seed in range(SEEDS):
        state, _ = environment.reset(seed=seed)
        memory.positions[0] = 0
        actions, over = "", False
        while not over:
            if forget:
                memory.positions[0] = 0
            outputs, memory = session.step({"observation": state[None, None, [0, 2]]}, memory)
            actions += str(outputs["action"].argmax())
            state, _, fallen, out_of_time, _ = environment.step(int(actions[-1]))
            over = fallen or out_of_time
        played.append(actions)
    return played


@pytest.fixture(scope="module")
def actions() -> list[str]:
    return play()


def test_the_policy_balances_every_episode_to_its_end(actions: list[str]) -> None:
    assert [len(each) for each in actions] == [500] * SEEDS


def test_the_program_in_cpp_takes_the_same_actions(actions: list[str], tmp_path: Path) -> None:
    program = compiled(POLICY / "run.cpp", "-O0")
    log = tmp_path / "actions"
    printed = subprocess.run(
        [program, CARTPOLE, str(SEEDS), "0", log], capture_output=True, text=True, check=True
    ).stdout
    assert f"return over {SEEDS} episodes: 500.0" in printed
    assert alike(log.read_text().split(), actions)


@pytest.mark.slow  # tests/web runs pages
def test_the_page_takes_the_same_actions_and_goes_back(
    browsers: Callable[..., Any], actions: list[str], tmp_path: Path
) -> None:
    load_example("policy", "page").write_page(CARTPOLE, tmp_path / "site", node_modules=packages())
    with serving(tmp_path / "site", port=0) as server, opening(browsers) as open_one:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = open_one(f"http://127.0.0.1:{server.server_port}/")
        assert alike([page.do("(seed) => page.play(seed)", seed) for seed in range(SEEDS)], actions)
        page.page.click("#save")
        page.until("parseInt(document.getElementById('steps').textContent.split(', ')[1]) > 60")
        page.page.click("#back")
        page.until("/ of (?!0 )/.test(document.getElementById('replayed').textContent)")
        same, total = page.text("replayed").split()[:3:2]
        assert same == total
        server.shutdown()


def alike(found: list[str], expected: list[str]) -> bool:
    """Whether episodes are equally long and begin with the same actions.

    Sines of other libraries may differ in their last digits, and a pole doubles such a difference every ten
    steps. So only the first 200 actions must be equal.
    """
    return [len(each) for each in found] == [len(each) for each in expected] and all(
        one[:200] == other[:200] for one, other in zip(found, expected, strict=True)
    )


def test_without_memory_the_pole_falls() -> None:
    assert max(len(each) for each in play(forget=True)) < 100


@pytest.mark.slow  # it traces a policy
def test_a_toy_run_exports_a_policy_with_pytorch_s_actions(
    train: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "ENVIRONMENTS", 2)
    monkeypatch.setattr(train, "ROLLOUT", 32)
    torch.manual_seed(0)
    policy = train.Policy()
    train.train(policy, 2 * 2 * 32, seed=0)
    train.compare(policy, train.export(policy, tmp_path / "artefact"), 3)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "PyTorch and artefact take the same actions in 3 of 3 episodes"
    assert printed[-4].split(":")[1] == printed[-3].split(":")[1]


@pytest.mark.slow
def test_training_balances_the_pole(train: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, POLICY / "train.py", tmp_path / "made"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed[-1] == "PyTorch and artefact take the same actions in 100 of 100 episodes"
    pytorch, artefact, forgetful = (float(line.split(":")[1].split(",")[0]) for line in printed[-4:-1])
    assert pytorch == artefact > 400 > 4 * forgetful
