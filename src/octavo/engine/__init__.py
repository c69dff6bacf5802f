"""What people talk to: prompts in, text out, around the pure core and an executor."""
