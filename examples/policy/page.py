"""Writes a page in which the exported policy balances a pole, and serves it until Ctrl-C.

python page.py ARTEFACT SITE [--port PORT]
"""

import argparse
import contextlib
import shutil
from pathlib import Path

from xl_export.web.files import web_files
from xl_export.web.packages import ONNXRUNTIME_WEB, WASM, copy_package
from xl_export.web.serve import serving


def write_page(artefact: Path, site: Path, *, node_modules: Path | None = None) -> None:
    """A folder that any web server can serve. node_modules: where npm has installed onnxruntime-web; None
    downloads it once.
    """
    shutil.copytree(Path(__file__).with_name("page"), site)
    shutil.copytree(web_files() / "src", site / "src")
    shutil.copytree(artefact, site / "policy")
    copy_package(ONNXRUNTIME_WEB, WASM, site / "vendor", node_modules=node_modules)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes a page with an exported policy, and serves it.")
    parser.add_argument("artefact", type=Path)
    parser.add_argument("site", type=Path, help="a new folder")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    write_page(given.artefact, given.site)
    with serving(given.site, port=given.port) as server:
        print(f"http://127.0.0.1:{server.server_port}/ serves it until Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
