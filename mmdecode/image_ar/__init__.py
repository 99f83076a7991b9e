"""Image tokens: the sampling pipeline, next-scale models, row schedules, pictures from prompts."""
