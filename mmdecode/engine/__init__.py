"""The loop and its machinery: tensors and laws, no modality, no method, no model family."""
