"""The command line: one module per sub-command; `app` has the ``mmdecode`` command."""
