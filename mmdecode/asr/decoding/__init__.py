"""What is decoded and when: windows of long audio, retries, beams, and where a window is cut."""
