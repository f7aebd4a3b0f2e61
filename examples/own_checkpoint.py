"""Takes a checkpoint of another project to a checked artefact, and scores a few tokens with it.

    python own_checkpoint.py CHECKPOINT FOLDER [OPTIONS]

CHECKPOINT is a file or folder that `xl-export import --help` names. FOLDER is made; it will hold `run` and
`artefact`. OPTIONS are passed to `import`, such as --mem-len 40. Importing and exporting need PyTorch.
Checking and scoring do not: copy `artefact` to the device and do these there.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np

import runtimes
import xl_export

if len(sys.argv) < 3:
    print("Error: give both: python own_checkpoint.py CHECKPOINT FOLDER [OPTIONS]", file=sys.stderr)
    sys.exit(2)
checkpoint, folder, options = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
for made in (folder / "run", folder / "artefact"):
    if made.exists():
        print(f"Error: {made} exists; give another FOLDER, or move this one away.", file=sys.stderr)
        sys.exit(2)

# The command prints every setting with the place that it comes from: read that once for your checkpoint.
command = [sys.executable, "-m", "xl_export", "import", checkpoint, "--out", str(folder / "run"), *options]
if ended := subprocess.run(command, check=False).returncode:
    sys.exit(ended)  # the command has said why, and has written nothing
try:
    artefact = xl_export.export(folder / "run", folder / "artefact")
except runtimes.UserError as error:
    print(f"Error: {error}", file=sys.stderr)
    sys.exit(2)

report = runtimes.check(artefact)
print(f"{'passed' if report.passed else 'FAILED'}: {report.sentence}")

session = runtimes.open_session(artefact)
tokens = np.arange(20) % session.vocab.size  # in place of a text of yours: session.vocab.encode(text)
print(f"{runtimes.evaluate(session, tokens).bits_per_token:.4f} bits per token")
