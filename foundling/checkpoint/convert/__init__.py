"""Out into the world and back: other layouts as sources and as results, each result compared."""
