"""N-best lists: oracles, selection and correction."""
