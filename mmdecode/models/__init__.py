"""Model code and checkpoint converters where transformers has none."""
