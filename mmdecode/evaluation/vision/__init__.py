"""Questions about images: tasks, scores and reports."""
