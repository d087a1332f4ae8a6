"""The course's own tools: building notebooks from their sources, and checking the result."""
