"""The only rooms that talk to other ranks during a step."""
