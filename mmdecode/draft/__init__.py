"""Drafters, one a file: who proposes the tokens. A drafter changes speed, never the law."""
