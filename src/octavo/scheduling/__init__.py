"""Who computes what, step by step: requests, sequences, plans, the scheduler, the step loop. Pure."""
