"""Order of decoding: windows of long audio, retries, beams, and where a window is cut."""
