"""`python -m xl_export`, the same as the command `xl-export`."""

from __future__ import annotations

from xl_export.start import stop_at_interrupt


def run() -> None:
    """Runs the command line. Ctrl-C ends it without a traceback from the first import on."""
    stop_at_interrupt()
    from xl_export.cli.main import main

    main(prog_name="xl-export")


if __name__ == "__main__":
    run()
