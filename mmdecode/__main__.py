"""``python -m mmdecode``, which launchers of several processes need."""

from mmdecode.cli.app import main

main()
