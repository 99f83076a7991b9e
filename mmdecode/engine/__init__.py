"""The decoding loop: tensors and distributions; no modality, no method, no model family."""
