"""Control guides for experiments: baselines that a guide's gain is compared with."""
