"""Runs the command line as ``python -m mmdecode``, for example from ``accelerate launch``."""

from mmdecode.cli.app import main

main()
