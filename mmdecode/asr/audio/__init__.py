"""Reading of audio files, and detection of speech in them."""
