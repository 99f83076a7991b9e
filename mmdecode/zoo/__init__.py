"""Tiny models that are really trained, and the test sets they are judged on."""
