"""What every long job shares, whatever it decodes."""
