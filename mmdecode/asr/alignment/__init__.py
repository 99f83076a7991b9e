"""Word times by cross-attention, or by CTC forced alignment."""
