"""The command line; one file per sub-command, ``app`` is the entry."""
