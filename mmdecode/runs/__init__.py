"""Parts that every long job shares, whatever it decodes."""
