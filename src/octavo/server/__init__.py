"""The engine behind asyncio: a thread that runs the core, and clients that await it."""
