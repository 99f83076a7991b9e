"""Audio files to samples, and which of them hold speech."""
