"""The stream of a session on `cuda`, over the stub of NVIDIA's driver (see `tests/cuda`)."""

from __future__ import annotations

import gc
import shutil

import pytest

from runtimes.base.errors import StreamError
from runtimes.sessions.ort_gpu import stream
from tests.cuda.stubs import Stubs, built_driver

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def test_a_captured_step_copies_what_is_in_pinned_memory_then(monkeypatch: pytest.MonkeyPatch) -> None:
    library = built_driver()
    driver = Stubs(library)
    driver.forget()
    monkeypatch.setattr(stream, "LIBRARY", str(library))
    own = stream.Stream(0)
    given, answers, device = own.pinned(8), own.pinned(8), own.pinned(8)  # the stub's GPU has host memory
    given[:], answers[:] = 1, 0

    def enqueue() -> None:
        own.upload(device.ctypes.data, given)
        own.download(answers, device.ctypes.data)

    launch = own.capture(enqueue)
    assert not answers.any()  # a capture runs nothing
    given[:] = 7
    launch()
    own.synchronize()
    assert (answers == 7).all()
    kinds = [event.kind for event in driver.events() if not event.captured]
    assert kinds == ["graph", "copy", "copy", "wait"]

    with pytest.raises(StreamError, match=r"cuStreamSynchronize .*give --device cpu"):
        own.capture(own.synchronize)
    driver.forget()
    del launch
    gc.collect()
    assert [event.kind for event in driver.events()] == ["released"]
