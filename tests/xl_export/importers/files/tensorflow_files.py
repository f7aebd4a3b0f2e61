"""Writes TensorFlow checkpoints with TensorFlow, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

PROGRAM = """
import sys, numpy, tensorflow
tensorflow.compat.v1.disable_eager_execution()
v1 = tensorflow.compat.v1
with v1.Session() as session, numpy.load(sys.argv[1]) as arrays:
    variables = [v1.Variable(arrays[name], name=name) for name in arrays.files]
    session.run(v1.global_variables_initializer())
    v1.train.Saver(variables).save(session, sys.argv[2], global_step=7)
"""


def write_checkpoint(folder: Path, variables: dict[str, np.ndarray]) -> Path:
    """Returns the prefix of a checkpoint with these variables, as a Saver of TensorFlow 1 writes it."""
    folder.mkdir()
    np.savez(folder.parent / "arrays.npz", **variables)
    arguments = [str(folder.parent / "arrays.npz"), str(folder / "model.ckpt")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=True, env=environment)
    return folder / "model.ckpt-7"
