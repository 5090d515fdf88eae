"""``python -m mpicoll``."""

from .cli import main

main(prog_name="python -m mpicoll")
