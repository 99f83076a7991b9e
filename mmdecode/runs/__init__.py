"""Files, journals, failures and processes: what long jobs of all kinds share."""
