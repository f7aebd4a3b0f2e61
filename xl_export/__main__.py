"""`python -m xl_export`, the same as the command `xl-export`."""

from xl_export.cli.main import main

main(prog_name="xl-export")
