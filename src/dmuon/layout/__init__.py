"""What is orthogonalized, and which rank stores which piece of it."""
