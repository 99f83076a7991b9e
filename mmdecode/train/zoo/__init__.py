"""How the shipped models are made, one recipe a module."""
