"""Controls of experiments: what a guide's gain is compared with."""
