"""From the shape of a step to seconds. Pure."""
