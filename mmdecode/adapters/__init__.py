"""One file per model family: what a branch needs to run it."""
