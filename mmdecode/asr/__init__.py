"""Speech: audio files in, transcripts out."""
